"""The tests mirror megalite/; `kit` holds what they share."""
