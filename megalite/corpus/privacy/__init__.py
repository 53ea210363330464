"""Personal data and secrets out of texts."""
