"""Checkpoints that fit any layout."""
