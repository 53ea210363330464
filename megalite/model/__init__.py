"""The transformer as one list of layers, and the table of its weights."""
