"""FP8 matrix products: numbers and scales, recipes, backends, and what a run has to remember of them."""
