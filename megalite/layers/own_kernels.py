"""Where kernels of ours can run: in Triton, which comes with torch for GPUs (`layers.triton_kernels`)."""

from __future__ import annotations

import torch
from torch import Tensor

FORMATS = (torch.bfloat16, torch.float16, torch.float32)
"""The kernels compute in fp32."""


def takes_own_kernels(x: Tensor) -> bool:
    """Whether a tensor is one for them; the answer is compiled in."""
    return x.is_cuda and x.dtype in FORMATS and _has_triton()


@torch.compiler.assume_constant_result
def _has_triton() -> bool:
    """Whether Triton makes kernels for this machine's GPU."""
    from torch.utils._triton import has_triton

    return has_triton()
