"""What a model is, as arithmetic: layers, weights, costs. No torch, so a laptop plans 70B on 512 ranks at once."""
