"""megalite: large-scale pretraining that fits in one head.

Tensor, pipeline and data parallelism on DeepSpeed's ZeRO engines, the data tools that feed them, and checkpoints
that go to any layout and to Hugging Face. Everything runs on two CPU cores over gloo exactly as it does on GPUs.
"""

__version__ = "0.1.0"
