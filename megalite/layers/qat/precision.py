"""Rounded weights for the linear layers and the experts of a stage: which of them, and from which step on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from megalite.config.rounded import rounded_blocks
from megalite.config.schema import QatConfig
from megalite.layers.documents import Documents
from megalite.layers.experts import Experts
from megalite.layers.gemm import Gemm
from megalite.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalite.layers.precision import ReadState
from megalite.layers.qat.linear import RoundedLinear, RoundedRows, RoundedWeight
from megalite.parallel.axes import SINGLE, Axis


@dataclass
class Qat:
    """See `layers.precision.Precision`. Nothing is remembered: a weight's integers follow from the weight.

    Args:
        config: the run's settings.
        num_layers: blocks of the whole model.
        keep_weights: keep rounded weights until a step ends.
    """

    config: QatConfig
    num_layers: int
    keep_weights: bool

    def __post_init__(self) -> None:
        self.weights: dict[str, RoundedWeight] = {}
        """By the names of their parameters."""

    def attach(self, blocks: nn.ModuleDict) -> None:
        within = rounded_blocks(self.config, self.num_layers)
        for index, block in blocks.items():
            for name, layer in block.named_modules(prefix=f"blocks.{index}") if int(index) in within else ():
                if isinstance(layer, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
                    across = layer.tp if isinstance(layer, RowParallelLinear) else SINGLE
                    weight, plain = self._rounded(f"{name}.weight", across), cast("Gemm", layer.gemm)
                    if layer.learned is None:
                        layer.gemm = RoundedLinear(plain, weight)
                    else:
                        layer.learned.attach(plain, weight)
                if isinstance(layer, Experts):
                    for is_cut_in, (part, product) in enumerate(layer.by_name()):  # columns first, then rows
                        across = layer.tp if is_cut_in else SINGLE
                        product.rows = RoundedRows(product.rows, self._rounded(f"{name}.{part}", across))

    def begin_step(self, number: int) -> None:
        """A step is about to be done, or was the last one before an evaluation."""
        is_on = number >= self.config.start_step
        for weight in self.weights.values():
            weight.is_on = is_on

    def context(self, documents: Documents) -> AbstractContextManager:
        return nullcontext()

    def end_step(self) -> None:
        self.forget_weights()

    def forget_weights(self) -> None:
        for weight in self.weights.values():
            weight.forget()

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, read: ReadState) -> list[str]:
        return []

    def _rounded(self, name: str, tp: Axis) -> RoundedWeight:
        across = tp if self.config.group_size is None else SINGLE
        found = self.weights[name] = RoundedWeight(self.config, across, keep=self.keep_weights)
        return found
