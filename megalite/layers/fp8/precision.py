"""FP8 for the linear layers of a stage: which of them, by which backend, and what is kept between steps.

Each layer gets a `Site`, which multiplies in FP8 or, where FP8 did harm, in the stage's own format again. A site
changes its way between steps, unseen by compiled blocks (`fp8.opaque`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from megalite.config.schema import Fp8Config
from megalite.layers.fp8.quantise import Quantised
from megalite.layers.fp8.recipes import Role
from megalite.layers.fp8.watch import Gauge, LayerErrors, read_gauges
from megalite.layers.gemm import Gemm, LinearGemm
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.layers.opaque import linear, number_of
from megalite.layers.precision import ReadState, linear_layers
from megalite.layers.weight_gradients import SummedLinear, WeightGradient
from megalite.parallel.axes import Axis

HISTORY = "fp8_amax"
"""State tensors `fp8_amax/blocks.0.mlp.down`, `[3, h]`: maxima of activation, weight and gradient, newest first."""
RETIRED = "fp8_retired"
"""State tensors `fp8_retired/blocks.0.mlp.down`, `[1]`: the step after which the layer went back to `dtype`; IN_FP8
while it has not, or WAS_OVER when the last measurement found too much error."""
IN_FP8, WAS_OVER = -1, -2


class Fp8Layer(LinearGemm, Protocol):
    """A linear layer's products in FP8, by some backend."""

    has_gradients: bool
    """Whether there is `gradients`, so that a compiled block may take the products in as ops; else its graph ends
    before each of them."""

    hand_over: Callable[[WeightGradient], None] | None
    """Gets gradients of the weight, which autograd then does not; None while autograd does. Set by the site."""

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of `x` and `weight`, from that of the product."""
        ...

    def forget_weights(self) -> None:
        """Round the weight anew at its next use."""
        ...

    def quantise(self, role: Role, x: Tensor) -> Quantised | None:
        """An operand as it is rounded, for the watch; None where only the library knows."""
        ...


class Backend(Protocol):
    """Makes the layers of a stage multiply in FP8. All ranks of the stage call every method."""

    def make_layers(self, layers: dict[str, ColumnParallelLinear | RowParallelLinear]) -> Mapping[str, Fp8Layer]:
        """An FP8 product for each layer, by name."""
        ...

    def context(self) -> AbstractContextManager:
        """See `Precision.context`."""
        ...

    def end_step(self) -> None:
        """See `Precision.end_step`."""
        ...

    def history(self, name: str) -> Tensor | None:
        """A layer's maxima `[3, h]`, where the recipe has a history."""
        ...

    def set_history(self, name: str, history: Tensor | None) -> None:
        """Take up a layer's maxima, `[3, any length]`, or forget them."""
        ...


class Site:
    """One linear layer's way to multiply. The layer's own gemm is one that makes bare products too."""

    def __init__(self, name: str, layer: ColumnParallelLinear | RowParallelLinear, fp8: Fp8Layer):
        self.name, self.fp8, self.plain = name, fp8, cast("Gemm", layer.gemm)
        if isinstance(layer.gemm, SummedLinear):
            fp8.hand_over = partial(layer.gemm.take, layer.weight)
        self._gemm: LinearGemm = fp8
        self._gauge: Gauge | None = None
        self._number = number_of(self) if fp8.has_gradients else None
        self.retired_at: int | None = None
        """The step after which FP8 was given up here."""
        self.was_over = False
        """Whether the last measurement found more error than is allowed."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [t, in]` and `weight [out, in]` -> `[t, out]`, with gradients, in the present way."""
        if self._number is not None and torch.compiler.is_compiling():
            return linear(x, weight, self._number, hands_over=isinstance(self.plain, SummedLinear))
        return self._multiply(x, weight)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `layers.opaque.OpaqueLayer`."""
        return self._multiply(x, weight)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `layers.opaque.OpaqueLayer`."""
        if self._gemm is self.plain and isinstance(self.plain, SummedLinear):
            return self.plain.gradients(grad, x, weight)
        if self._gemm is self.plain:
            return self.plain.multiply(grad, weight.t()), self.plain.multiply(grad.t(), x.t())
        if self._gauge is not None:
            self._measure(self._gauge, "gradient", grad)
        return self.fp8.gradients(grad, x, weight)

    def use_fp8(self) -> None:
        """Multiply in FP8, unless that was given up."""
        self._gemm, self._gauge = (self.fp8 if self.retired_at is None else self.plain), None

    def use_gauge(self, gauge: Gauge) -> None:
        """Multiply in FP8 and measure what that does."""
        self._gemm, self._gauge = self.fp8, gauge

    def use_plain(self) -> None:
        """Multiply in the stage's own format."""
        self._gemm, self._gauge = self.plain, None

    def retire(self, step: int) -> None:
        """Give FP8 up for good."""
        self.retired_at = step
        self.fp8.forget_weights()
        self.use_fp8()

    @torch.compiler.disable
    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        gauge = self._gauge
        y = self._gemm.linear(x, weight)
        if gauge is None or not torch.is_grad_enabled():  # without gradients it is a pass beside the step's own
            return y
        with torch.no_grad():
            gauge.product(y, self.plain.linear(x, weight))
            self._measure(gauge, "activation", x)
            self._measure(gauge, "weight", weight)
        if y.requires_grad:
            y.register_hook(lambda grad: self._measure(gauge, "gradient", grad))
        return y

    def _measure(self, gauge: Gauge, role: Role, operand: Tensor) -> None:
        rounded = self.fp8.quantise(role, operand.detach())
        if rounded is not None:
            gauge.operand(role, operand, rounded)


@dataclass
class Fp8:
    """See `layers.precision.Precision`.

    Args:
        config: the run's settings.
        num_layers: blocks of the whole model.
        backend: multiplies.
    """

    config: Fp8Config
    num_layers: int
    backend: Backend

    def __post_init__(self) -> None:
        self.sites: dict[str, Site] = {}
        self._gauges: dict[str, Gauge] = {}
        self._may_retire = self.config.fallback_error is not None

    def attach(self, blocks: nn.ModuleDict) -> None:
        first, last = self.config.bf16_first_blocks, self.num_layers - self.config.bf16_last_blocks
        layers = {name: layer for name, layer in linear_layers(blocks) if first <= int(name.split(".")[1]) < last}
        for name, fp8 in self.backend.make_layers(layers).items():
            self.sites[name] = Site(name, layers[name], fp8)
            layers[name].gemm = self.sites[name]

    def context(self) -> AbstractContextManager:
        return self.backend.context()

    def end_step(self) -> None:
        self.backend.end_step()
        self.forget_weights()

    def forget_weights(self) -> None:
        for site in self.sites.values():
            site.fp8.forget_weights()

    def begin_measuring(self, device: torch.device) -> None:
        """From now on measure what FP8 does to each layer that is still in FP8."""
        self._gauges = {name: Gauge(device) for name, site in self.sites.items() if site.retired_at is None}
        for name, gauge in self._gauges.items():
            self.sites[name].use_gauge(gauge)

    def end_measuring(self, tp: Axis, replicas: Axis) -> dict[str, LayerErrors]:
        """What was found, over all ranks of the stage. Collective over tp and replicas, and a sync."""
        for site in self.sites.values():
            site.use_fp8()
        return read_gauges(self._gauges, tp, replicas)

    def retire_worst(self, errors: dict[str, LayerErrors], step: int) -> list[str]:
        """Give up FP8 where a measurement found more error than is allowed for the second time in a row.

        Args:
            errors: of the layers of all stages, the same on all ranks.

        Returns:
            The layers of this stage that were given up.
        """
        allowed, retired = self.config.fallback_error, []
        for name, layer in errors.items():
            site = self.sites.get(name)
            if site is None or allowed is None:
                continue
            is_over = not layer.worst <= allowed
            if is_over and site.was_over:
                site.retire(step)
                retired.append(name)
            site.was_over = is_over
        return retired

    @contextmanager
    def unrounded(self) -> Iterator[None]:
        """Within it, every layer multiplies in the stage's own format."""
        for site in self.sites.values():
            site.use_plain()
        try:
            yield
        finally:
            for site in self.sites.values():
                site.use_fp8()

    def state(self) -> dict[str, Tensor]:
        tensors = {}
        for name, site in self.sites.items():
            history = self.backend.history(name)
            if history is not None:
                tensors[f"{HISTORY}/{name}"] = history
            if self._may_retire:
                tensors[f"{RETIRED}/{name}"] = torch.tensor([float(_standing(site))])
        return tensors

    def load(self, read: ReadState) -> list[str]:
        missing = []
        for name, site in self.sites.items():
            if self.backend.history(name) is not None:
                saved = read(f"{HISTORY}/{name}")
                self.backend.set_history(name, saved)
                missing += [name] if saved is None else []
            retired = read(f"{RETIRED}/{name}")
            standing = IN_FP8 if retired is None else int(retired.item())
            self._may_retire |= retired is not None
            site.was_over = standing == WAS_OVER
            site.retired_at = standing if standing >= 0 else None
            site.use_fp8()
        self.forget_weights()
        return missing


def _standing(site: Site) -> int:
    """Where a layer stands on its way out of FP8."""
    if site.retired_at is not None:
        return site.retired_at
    return WAS_OVER if site.was_over else IN_FP8
