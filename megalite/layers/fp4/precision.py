"""FP4 for the linear layers of a stage: which of them, and what they know of where they stand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Weight, by_parameter, weight_table
from megalite.config.schema import Fp4Config
from megalite.layers.documents import Documents
from megalite.layers.fp4.linear import Fp4Linear, Places, TokenKeys, make_fp4_recipe
from megalite.layers.fp8.linear import WeightSharding
from megalite.layers.gemm import Gemm, choose_gemm
from megalite.layers.precision import ReadState, linear_layers
from megalite.parallel.axes import Axis
from megalite.parallel.random import name_seed


@dataclass
class Fp4:
    """See `layers.precision.Precision`. Nothing is remembered: all chances are functions of tokens and places.

    Args:
        config: the run's settings.
        model: filled.
        device: of the stage.
        keep_weights: keep rounded weights until a step ends.
        seed: the run's.
    """

    config: Fp4Config
    model: Architecture
    device: torch.device
    keep_weights: bool
    seed: int

    def __post_init__(self) -> None:
        self.layers: dict[str, Fp4Linear] = {}
        self._keys = TokenKeys()

    def attach(self, blocks: nn.ModuleDict) -> None:
        rounded = self.config.rounded_blocks(self.model.num_layers)
        within = nn.ModuleDict({index: block for index, block in blocks.items() if int(index) in rounded})
        parameters = by_parameter(weight_table(self.model, rounded))
        recipe, exact = make_fp4_recipe(self.config, self.seed), choose_gemm(self.device.type, torch.float32)
        for name, layer in linear_layers(within):
            layer.gemm = self.layers[name] = Fp4Linear(
                recipe,
                cast("Gemm", layer.gemm),
                exact,
                WeightSharding(layer.tp, layer.weight_cut),
                places_of(parameters[f"{name}.weight"], layer.tp, self.device),
                keys=self._keys,
                seed=name_seed(self.seed, f"fp4/{name}"),
                keep_weights=self.keep_weights,
            )

    @contextmanager
    def context(self, documents: Documents) -> Iterator[None]:
        before, self._keys.now = self._keys.now, documents.keys
        try:
            yield
        finally:
            self._keys.now = before

    def end_step(self) -> None:
        self.forget_weights()

    def forget_weights(self) -> None:
        for layer in self.layers.values():
            layer.forget_weight()

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, read: ReadState) -> list[str]:
        return []


def places_of(fused: list[Weight], tp: Axis, device: torch.device) -> Places:
    """Of the canonical weights that are fused into a layer's matrix, in their order."""
    rows, before = list[Tensor](), 0
    for weight in fused:
        part = weight.local(tp.size, tp.rank)
        rows.append(before + part.start[0] + torch.arange(part.shape[0], device=device))
        before += weight.shape[0]
    part = fused[0].local(tp.size, tp.rank)
    return Places(torch.cat(rows), part.start[1] + torch.arange(part.shape[1], device=device))
