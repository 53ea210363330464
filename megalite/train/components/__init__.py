"""The parts of the training loop: each a file with one class, and one line in `assemble.py`."""
