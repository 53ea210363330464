"""The MLP: column-parallel up, activation, row-parallel down.

The gated form keeps gate and up in one matrix, cut per half (see `model.weights`), so that one product feeds both.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.layers.gemm import PLAIN, Gemm
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.axes import Axis


def swiglu(x: Tensor) -> Tensor:
    """`silu(gate) * up` of `[t, 2f]` holding gate then up (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, as GPT-2 has it."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"swiglu": swiglu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}


class MLP(nn.Module):
    """`down(activation(up(x)))`, or with a gate `down(silu(gate(x)) * up(x))`. Shape: as the linear layers'."""

    def __init__(self, model: ModelConfig, *, tp: Axis, sequence_parallel: bool, gemm: Gemm = PLAIN):
        super().__init__()
        width = model.ffn_hidden_size // tp.size
        options = {"tp": tp, "bias": model.has_mlp_bias, "sequence_parallel": sequence_parallel, "gemm": gemm}
        if model.activation == "swiglu":
            self.gate_up = ColumnParallelLinear(model.hidden_size, 2 * width, **options)
        else:
            self.up = ColumnParallelLinear(model.hidden_size, width, **options)
        self.expand = self.gate_up if model.activation == "swiglu" else self.up
        self.activation = ACTIVATIONS[model.activation]
        self.down = RowParallelLinear(width, model.hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.expand(x)))
