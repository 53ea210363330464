"""Quantisation-aware training: weights rounded to integers in the forward pass."""
