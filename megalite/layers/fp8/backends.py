"""The backends that are ours: emulation, and torch's `_scaled_mm`. They differ in the product alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megalite.config.schema import Fp8Config
from megalite.layers.fp8.grouped import Fp8Rows, scaled_grouped_mm
from megalite.layers.fp8.history import Histories
from megalite.layers.fp8.linear import CurrentScales, DelayedScales, Fp8Linear, Scales, WeightSharding
from megalite.layers.fp8.precision import Backend
from megalite.layers.fp8.products import emulated, scaled_mm
from megalite.layers.fp8.quantise import ONE_BY_ONE, Passes, compiled_passes
from megalite.layers.fp8.recipes import make_recipe
from megalite.layers.gemm import Gemm, choose_gemm
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.axes import Axis


class OwnBackend:
    """See `precision.Backend`.

    Args:
        config: names the product and the recipe.
        tp, replicas: the axes over which maxima are compared.
        device: of the stage.
        keep_weights: keep rounded weights until a step ends; not where ZeRO gathers them for each use.
        passes: what matrices are rounded with.
    """

    def __init__(
        self,
        config: Fp8Config,
        *,
        tp: Axis,
        replicas: Axis,
        device: torch.device,
        keep_weights: bool,
        passes: Passes = ONE_BY_ONE,
    ):
        self._config, self._device, self._keep_weights, self._passes = config, device, keep_weights, passes
        self._tp, self._replicas = tp, replicas
        self._recipe = make_recipe(config)
        self._histories: Histories | None = None

    def make_layers(self, layers: dict[str, ColumnParallelLinear | RowParallelLinear]) -> dict[str, Fp8Linear]:
        product = scaled_mm if self._config.backend == "scaled_mm" else emulated(self._exact_gemm())
        current = {
            n: CurrentScales(self._recipe, WeightSharding(each.tp, each.weight_cut), self._passes)
            for n, each in layers.items()
        }
        scales: Mapping[str, Scales] = current
        if self._config.recipe == "delayed":
            self._histories = self._make_histories(list(layers))
            scales = {n: DelayedScales(self._histories, i, current[n]) for i, n in enumerate(layers)}
        return {n: Fp8Linear(self._recipe, scales[n], product, keep_weights=self._keep_weights) for n in layers}

    def make_rows(self, places: dict[str, WeightSharding]) -> dict[str, Fp8Rows]:
        is_scaled = self._config.backend == "scaled_mm"
        product = scaled_mm if is_scaled else emulated(self._exact_gemm())
        at_once = scaled_grouped_mm if is_scaled and self._device.type == "cuda" else None
        return {
            name: Fp8Rows(self._recipe, CurrentScales(self._recipe, place, self._passes), product, at_once)
            for name, place in places.items()
        }

    def context(self) -> AbstractContextManager:
        return nullcontext()

    def end_step(self) -> None:
        if self._histories is not None:
            self._histories.end_step(self._tp, self._replicas)

    def history(self, name: str) -> Tensor | None:
        if self._histories is None:
            return None
        return self._histories.history[self._histories.names.index(name)]

    def set_history(self, name: str, history: Tensor | None) -> None:
        assert self._histories is not None
        self._histories.set_history(self._histories.names.index(name), history)

    def _exact_gemm(self) -> Gemm:
        """FP8 numbers multiply exactly in fp32; tensor cores must not shorten them to TF32."""
        return choose_gemm(self._device.type, torch.float32)

    def _make_histories(self, names: list[str]) -> Histories:
        return Histories(
            names,
            self._recipe,
            length=self._config.amax_history_len,
            most_recent=self._config.amax_compute == "most_recent",
            margin=self._config.margin,
            device=self._device,
        )


def choose_backend(
    config: Fp8Config,
    *,
    tp: Axis,
    replicas: Axis,
    device: torch.device,
    keep_weights: bool,
    is_compiled: bool = False,
) -> Backend:
    """The backend that a config names; whether it can run here was checked before.

    Args:
        is_compiled: the stage's blocks are.
    """
    if config.backend == "te":
        from megalite.layers.te import TransformerEngine

        return TransformerEngine(config, keep_weights=keep_weights)
    passes = compiled_passes() if is_compiled and device.type == "cuda" else ONE_BY_ONE
    return OwnBackend(config, tp=tp, replicas=replicas, device=device, keep_weights=keep_weights, passes=passes)
