"""Steps of training behind one protocol, on DeepSpeed."""
