"""Hugging Face folders, both ways."""
