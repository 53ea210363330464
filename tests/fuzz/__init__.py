"""Inputs that nobody would write: hundreds of each kind in `make test`, thousands by `make fuzz`."""
