"""How good the model is: validation sets, multiple-choice questions, and what a run makes of them."""
