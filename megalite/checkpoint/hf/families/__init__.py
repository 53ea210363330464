"""Classes of transformers, one a file; `registry` has them all."""
