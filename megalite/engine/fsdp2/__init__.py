"""Training steps by torch's FSDP2."""
