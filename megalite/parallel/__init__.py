"""The mesh of ranks and the operations across it."""
