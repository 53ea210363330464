"""The parallel building blocks of a transformer."""
