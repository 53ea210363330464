"""FP8 by Transformer Engine: the only file that imports it.

Each linear layer has a `te.Linear` of its own whose weight *is* the layer's parameter, outside the module tree: names,
cuts and checkpoints stay ours, and so does the communication. Recipes without history only, so there is no state.

Every forward pass of a stage, and every one that is run again for the backward pass, happens inside Transformer
Engine's autocast; outside of it a `te.Linear` would quietly multiply in bf16. Importing the package proves nothing on a
machine without a GPU, so `why_unavailable` asks for the device first, and then asks the package itself.

Its scales are those of what one rank multiplies: its part of a weight, and of an input or gradient that tensor
parallelism cuts; ours (`fp8.linear`) are of the whole. Both are right, but here another tp rounds differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import Fp8Config
from megalite.layers.fp8.grouped import Fp8Rows
from megalite.layers.fp8.linear import WeightSharding
from megalite.layers.fp8.quantise import Quantised, cast, scale_of, tile_amax
from megalite.layers.fp8.recipes import Recipe, Role, make_recipe
from megalite.layers.kept_products import keep_product
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.layers.weight_gradients import WeightGradient

CHECKS = {
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}
"""The package's own word on whether device, driver and libraries can do a recipe."""


@functools.cache
def why_unavailable(recipe: str) -> str:
    """Why Transformer Engine cannot run a recipe on this machine; empty when it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        import transformer_engine.pytorch as te

        check = getattr(te, CHECKS[recipe])
        available, reason = check(return_reason=True)
    except Exception as error:  # it fails in many ways beside a torch that it was not built for
        return f"Transformer Engine cannot be used: {type(error).__name__}: {error}"
    return "" if available else reason or f"Transformer Engine has no {recipe} on this device"


class TransformerEngine:
    """See `fp8.precision.Backend`.

    Args:
        config: names the recipe.
        keep_weights: keep the rounded weight over the micro-batches of a step.
    """

    def __init__(self, config: Fp8Config, *, keep_weights: bool):
        self._config, self._recipe = config, _make_recipe(config)
        self._keep_weights = keep_weights

    def make_layers(self, layers: dict[str, ColumnParallelLinear | RowParallelLinear]) -> dict[str, TeLinear]:
        rounding = None if self._config.recipe == "nvfp4" else make_recipe(self._config)
        return {name: TeLinear(layer, rounding, keep_weights=self._keep_weights) for name, layer in layers.items()}

    def make_rows(self, places: dict[str, WeightSharding]) -> dict[str, Fp8Rows]:
        assert not places, "experts were refused"
        return {}

    def context(self) -> AbstractContextManager:
        import transformer_engine.pytorch as te

        return te.autocast(enabled=True, recipe=self._recipe)

    def end_step(self) -> None:
        pass

    def history(self, name: str) -> Tensor | None:
        return None

    def set_history(self, name: str, history: Tensor | None) -> None:
        raise AssertionError("recipes of this backend have no history")


class TeLinear:
    """A linear layer's products by a `te.Linear` on the layer's own weight.

    Args:
        rounding: what the watch takes for the library's rounding; None where we have none like it.
        keep_weights: as above.
    """

    has_gradients = False

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear, rounding: Recipe | None, *, keep_weights: bool):
        import transformer_engine.pytorch as te

        out_features, in_features = layer.weight.shape
        self._linear: Any = te.Linear(in_features, out_features, bias=False, params_dtype=torch.bfloat16, device="meta")
        self._linear.weight = layer.weight
        self._keep_weights = keep_weights
        self._rounding = rounding
        self._is_first = True
        self.hand_over: Callable[[WeightGradient], None] | None = None  # autograd adds the library's gradients up

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [t, in]` -> `[t, out]`, with gradients. The weight is known already."""
        if not torch.is_grad_enabled():
            return self._linear(x)
        return keep_product(partial(self._multiply, x))

    def _multiply(self, x: Tensor) -> Tensor:
        if not self._keep_weights:
            return self._linear(x)
        is_first, self._is_first = self._is_first, False
        return self._linear(x, is_first_microbatch=is_first)

    def forget_weights(self) -> None:
        """Round the weight anew at its next use."""
        self._is_first = True

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("gradients are the library's own")

    def quantise(self, role: Role, x: Tensor) -> Quantised | None:
        """An operand as the library rounds it, by our formulas: scales of this rank's part."""
        if self._rounding is None:
            return None
        tile, fp8 = self._rounding.tiles[role], self._rounding.formats[role]
        return cast(x, scale_of(tile_amax(x, tile), fp8, power_of_two=self._rounding.power_of_two), tile, fp8)


def _make_recipe(config: Fp8Config) -> Any:
    from transformer_engine.common import recipe as recipes

    if config.recipe == "current":
        formats = recipes.Format.HYBRID if config.number_format == "hybrid" else recipes.Format.E4M3
        return recipes.Float8CurrentScaling(fp8_format=formats)
    kinds = {
        "block": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
        "nvfp4": "NVFP4BlockScaling",
    }
    return getattr(recipes, kinds[config.recipe])()
