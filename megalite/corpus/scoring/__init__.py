"""Scores of documents, by models that are trained here from sample files: perplexity, and good against bad."""
