"""Raw text to clean documents, tokens and packed sequences: what `megalite data prepare` does, station by station."""
