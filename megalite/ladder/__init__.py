"""Runs of several sizes and lengths, the scaling law that they follow, and what it says of larger ones."""
