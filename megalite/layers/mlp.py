"""The MLP: column-parallel up, activation, row-parallel down.

The gated form keeps gate and up in one matrix, cut per half (see `model.weights`), so that one product feeds both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.addition import load
from megalite.architecture.activations import ACTIVATIONS
from megalite.architecture.architecture import FeedForwardSpec
from megalite.layers.documents import Documents
from megalite.layers.gemm import PLAIN, Gemm
from megalite.layers.linear import ColumnParallelLinear, LinearOptions, RowParallelLinear, handed_over
from megalite.layers.swiglu import swiglu, swiglu_of
from megalite.parallel.axes import Axis

CLAMP, SIGMOID_SCALE = 7.0, 1.702


def swiglu_clamped(gate: Tensor, up: Tensor) -> Tensor:
    """`gate sigmoid(1.702 gate) (up + 1)`, both kept within 7, as gpt-oss has it."""
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(SIGMOID_SCALE * gate) * (up + 1)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """`gelu(gate) * up` (Shazeer 2020)."""
    return F.gelu(gate) * up


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """The same with GELU's tanh approximation, as Gemma has it."""
    return gelu_tanh(gate) * up


def reglu(gate: Tensor, up: Tensor) -> Tensor:
    """`relu(gate) * up` (Shazeer 2020)."""
    return F.relu(gate) * up


def relu2(x: Tensor) -> Tensor:
    """`relu(x)` squared (So et al. 2021, Primer)."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, as GPT-2 has it."""
    return F.gelu(x, approximate="tanh")


class MLP(nn.Module):
    """`down(activation(up(x)))`, or with a gate `down(silu(gate(x)) * up(x))`. Shape: as the linear layers'.

    Args:
        chunk_tokens: work on so many tokens of this rank at a time, and keep nothing of them but their input: what lies
            inside is made again in the backward pass. None for all at once.
        is_part: somebody else has brought all tokens to all ranks, and adds up what these put out.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: FeedForwardSpec,
        *,
        tp: Axis,
        sequence_parallel: bool,
        gemm: Gemm = PLAIN,
        chunk_tokens: int | None = None,
        is_part: bool = False,
    ):
        super().__init__()
        self.chunk_tokens = chunk_tokens
        width = spec.width // tp.size
        options: LinearOptions = {"tp": tp, "bias": spec.bias, "sequence_parallel": sequence_parallel, "gemm": gemm}
        if spec.is_gated:
            self.gate_up = ColumnParallelLinear(hidden_size, 2 * width, has_all=is_part, **options)
        else:
            self.up = ColumnParallelLinear(hidden_size, width, has_all=is_part, **options)
        self.expand = self.gate_up if spec.is_gated else self.up
        self.activation = load_activation(spec.activation)
        self.down = RowParallelLinear(width, hidden_size, leaves_parts=is_part, **options)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        return self.mix(x) if self.chunk_tokens is None else self._in_chunks(x, self.chunk_tokens)

    def mix(self, x: Tensor) -> Tensor:
        """The function of any tokens."""
        return self.down(self.activation(self.expand(x)))

    def handed_over(self) -> list[nn.Parameter]:
        """What has a gradient for each chunk, where somebody else keeps it."""
        return [each for layer in (self.expand, self.down) for each in handed_over(layer)]

    @torch.compiler.disable
    def _in_chunks(self, x: Tensor, size: int) -> Tensor:
        parts = x.split(size)
        return torch.cat([checkpoint(self.mix, part, use_reentrant=False, preserve_rng_state=False) for part in parts])


def load_activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of what the first product puts out: `[t, 2f]` holding gate then up, or `[t, f]`."""
    activation = ACTIVATIONS[name]
    function = load(activation.function)
    if function is swiglu:
        return swiglu_of
    return partial(_gated, function) if activation.is_gated else function


def _gated(function: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    return function(*x.chunk(2, dim=-1))
