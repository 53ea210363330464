"""What training reads: token files, packed sequences, their mixture and order, batches."""
