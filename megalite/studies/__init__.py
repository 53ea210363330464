"""Training to find something out: which rate, whether a width carries over, whether a resume is exact."""
