"""FP4 by emulation: products of 4-bit numbers as they are published for training."""
