"""One linear layer in FP4: its three products, and what each of them rounds.

    forward    y  = x w^T      x [t, in] and w [out, in] in blocks along in
    backward   dx = dy w       dy [t, out] and w^T [in, out] along out
               dw = dy^T x     dy^T [out, t] and x^T [in, t] along t

    nvfp4, as published        y to nearest;  dy of dx and dw by chance;  dy^T and x^T transformed before;  w in squares
    mxfp4, as published        y in `dtype`;  both operands of dx and dw by chance, and transformed before

"Transformed" is by `fp4.hadamard`. A weight in squares of one scale has the same numbers in y and in dx, which then is
the gradient of what the forward pass did. Operands are rounded from unrounded numbers, each for its product. Products
are made in fp32 of what 4-bit numbers and scales stand for, which it has all but exactly.

What is rounded by chance asks a hash of (seed, layer, operand, token, channel) or, of a weight, (seed, layer, first
token, row, column): places are those of the whole model, and a token's key is unique in the whole run
(`parallel.random`). So tp, sp, pp and ZeRO round alike, and a restart needs no state. Where tensor parallelism cuts a
tensor, its one scale is that of all ranks; blocks are never cut, which a check of the config sees to. Tokens that do
not fill a block are followed by zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.schema import Fp4Config
from megalite.layers.fp4.hadamard import Hadamard
from megalite.layers.fp4.numbers import FORMATS, Fp4Format
from megalite.layers.fp8.linear import WeightSharding
from megalite.layers.fp8.quantise import Tile
from megalite.layers.fp8.recipes import Role
from megalite.layers.gemm import Gemm
from megalite.layers.weight_gradients import SummedLinear, WholeGradient
from megalite.parallel.axes import SINGLE, Axis
from megalite.parallel.random import name_seed, random_bits, uniform


@dataclass(frozen=True)
class Fp4Recipe:
    """What a run rounds, and how."""

    format: Fp4Format
    rounds_forward: bool
    chance_in_gradients: bool
    chance_in_others: bool
    """Of activations and weights in the backward pass; of weights unless they are in squares."""
    input_transform: Hadamard | None
    """Of both operands of dx."""
    weight_transform: Hadamard | None
    """Of both operands of dw."""
    has_square_weights: bool

    @property
    def tokens_at_once(self) -> int:
        """What divides the tokens that dw reduces over."""
        return max(self.format.block, 1 if self.weight_transform is None else self.weight_transform.size)


def make_fp4_recipe(config: Fp4Config, seed: int) -> Fp4Recipe:
    """The recipe of a validated config."""
    full = config.filled
    transform = Hadamard(full.hadamard_size or 1, seed) if full.hadamard != "none" else None
    return Fp4Recipe(
        format=FORMATS[full.format],
        rounds_forward=bool(full.forward),
        chance_in_gradients=full.stochastic_rounding != "none",
        chance_in_others=full.stochastic_rounding == "backward",
        input_transform=transform if full.hadamard == "backward" else None,
        weight_transform=transform,
        has_square_weights=bool(full.square_weights),
    )


@dataclass(frozen=True)
class Places:
    """Where a rank's part of a weight stands in the whole model's, fused with what it is fused with."""

    rows: Tensor
    """`[out]` int64."""
    columns: Tensor
    """`[in]` int64."""


@dataclass
class TokenKeys:
    """Of the stream that passes through a stage just now."""

    now: Tensor | None = None
    """`[t]` int64, unique in the whole run."""


class Fp4Linear:
    """A linear layer's products in FP4, as `layers.gemm.LinearGemm`.

    Args:
        plain: what it multiplied with before; a `SummedLinear` has the weight's gradient handed over.
        exact: multiplies fp32.
        sharding: where the layer stands among the tensor-parallel ranks.
        keys: of the tokens that come.
        seed: of this layer.
        keep_weights: keep the rounded weight until the step ends.
    """

    def __init__(
        self,
        recipe: Fp4Recipe,
        plain: Gemm,
        exact: Gemm,
        sharding: WeightSharding,
        places: Places,
        *,
        keys: TokenKeys,
        seed: int,
        keep_weights: bool,
    ):
        self.recipe, self.plain, self._exact, self._sharding = recipe, plain, exact, sharding
        self._places, self._keys, self._keep_weights = places, keys, keep_weights
        self._seeds = {what: name_seed(seed, what) for what in ("dx", "dw", "x", "w")}
        self._kept: dict[bool, Tensor] = {}

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [t, in]` and `weight [out, in]` -> `[t, out]`, with gradients."""
        return _Fp4Product.apply(x, weight, self, self._keys.now, torch.is_grad_enabled())

    def product(self, x: Tensor, weight: Tensor, *, in_training: bool) -> Tensor:
        """y."""
        if not self.recipe.rounds_forward:
            return self.plain.multiply(x, weight)
        left = self._quantise("activation", x)
        right = self._kept_weight(weight, transposed=False, keep=in_training)
        return self._exact.multiply(left, right).to(x.dtype)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """dx, and dw where it is not handed over.

        Args:
            keys: of the tokens of x, `[t]`.
        """
        grad_x = self._input_gradient(grad, weight, keys).to(x.dtype)
        make = self._weight_gradient(grad, x, keys, weight.dtype)
        if isinstance(self.plain, SummedLinear):
            self.plain.take(self.plain.weight, WholeGradient(make))
            return grad_x, None
        return grad_x, make()

    def forget_weight(self) -> None:
        """The weight changes."""
        self._kept.clear()

    def _input_gradient(self, grad: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
        recipe, transform = self.recipe, self.recipe.input_transform
        left = grad if transform is None else transform(grad)
        chance = _chances(keys, self._places.rows, self._seeds["dx"]) if recipe.chance_in_gradients else None
        left = self._quantise("gradient", left, chance)
        if recipe.has_square_weights:
            return self._exact.multiply(left, self._kept_weight(weight, transposed=False, keep=True).t())
        if not recipe.chance_in_others:
            return self._exact.multiply(left, self._kept_weight(weight, transposed=True, keep=True))
        seed = random_bits(keys[0], self._seeds["w"], 63)
        chance = _chances(self._places.rows, self._places.columns, seed).t()
        return self._exact.multiply(left, self._transposed_weight(weight, chance))

    def _weight_gradient(self, grad: Tensor, x: Tensor, keys: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        """dw, yet to be made of what is rounded here and now: scales of whole tensors ask other ranks."""
        recipe, transform = self.recipe, self.recipe.weight_transform
        padding = -grad.shape[0] % recipe.tokens_at_once
        if padding:
            grad, x = (F.pad(each, (0, 0, 0, padding)) for each in (grad, x))
            behind = random_bits(keys[-1], self._seeds["dw"], 62) + torch.arange(padding, device=keys.device)
            keys = torch.cat((keys, behind))
        left, right = grad.t(), x.t()
        if transform is not None:
            left, right = transform(left), transform(right)
        rows, columns = self._places.rows, self._places.columns
        of_grad = _chances(keys, rows, self._seeds["dw"]).t() if recipe.chance_in_gradients else None
        of_x = _chances(keys, columns, self._seeds["x"]).t() if recipe.chance_in_others else None
        left, right = self._quantise("gradient", left, of_grad), self._quantise("activation", right, of_x)
        return lambda: self._exact.multiply(left, right).to(dtype)

    def _kept_weight(self, weight: Tensor, *, transposed: bool, keep: bool) -> Tensor:
        """The rounded weight `[out, in]` of the forward pass, or `[in, out]` of the backward pass."""
        if transposed in self._kept:
            return self._kept[transposed]
        block = self.recipe.format.block
        if transposed:
            rounded = self._transposed_weight(weight, None)
        else:
            rounded = self._quantise("weight", weight, tile=(block if self.recipe.has_square_weights else 1, block))
        if keep and self._keep_weights:
            self._kept[transposed] = rounded
        return rounded

    def _transposed_weight(self, weight: Tensor, chance: Tensor | None) -> Tensor:
        transform, matrix = self.recipe.input_transform, weight.detach().t()
        return self._quantise("weight", matrix if transform is None else transform(matrix), chance)

    def _quantise(self, role: Role, x: Tensor, chance: Tensor | None = None, tile: Tile | None = None) -> Tensor:
        across: Axis = SINGLE if self._sharding.cut(role) is None else self._sharding.tp
        tile = (1, self.recipe.format.block) if tile is None else tile
        return self.recipe.format.quantise(x, tile=tile, across=across, chance=chance)


ROWS_AT_ONCE = 64
"""Of chances: what a core's cache holds. In one piece they take three times as long on a CPU (2048 x 704 of them)."""


def _chances(keys: Tensor, channels: Tensor, seed: int | Tensor) -> Tensor:
    """`parallel.random.uniform`."""
    return torch.cat([uniform(part, channels, seed) for part in keys.split(ROWS_AT_ONCE)])


class _Fp4Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: Fp4Linear, keys: Tensor | None, in_training: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.keys = layer, keys
        return layer.product(x, weight, in_training=in_training)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.keys is not None, "a pass within the precision's context"
        return *ctx.layer.gradients(grad, *ctx.saved_tensors, ctx.keys), None, None, None
