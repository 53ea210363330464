"""FP8 for the linear layers and the experts of a stage: which of them, by which backend, and what is kept between
steps. Each gets a `Site`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalite.config.schema import Fp8Config
from megalite.layers.documents import Documents
from megalite.layers.experts import Experts
from megalite.layers.fp8.grouped import Fp8Rows
from megalite.layers.fp8.linear import WeightSharding
from megalite.layers.fp8.site import Fp8Layer, GroupedSite, LinearSite, Site
from megalite.layers.fp8.watch import Gauge, LayerErrors, read_gauges
from megalite.layers.grouped import GroupedProduct
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.layers.precision import ReadState, linear_layers
from megalite.parallel.axes import Axis

HISTORY = "fp8_amax"
"""State tensors `fp8_amax/blocks.0.mlp.down`, `[3, h]`: maxima of activation, weight and gradient, newest first."""
RETIRED = "fp8_retired"
"""State tensors `fp8_retired/blocks.0.mlp.down`, `[1]`: the step after which the layer went back to `dtype`; IN_FP8
while it has not, or WAS_OVER when the last measurement found too much error."""
IN_FP8, WAS_OVER = -1, -2


class Backend(Protocol):
    """Makes the layers of a stage multiply in FP8. All ranks of the stage call every method."""

    def make_layers(self, layers: dict[str, ColumnParallelLinear | RowParallelLinear]) -> Mapping[str, Fp8Layer]:
        """An FP8 product for each layer, by name."""
        ...

    def make_rows(self, places: dict[str, WeightSharding]) -> Mapping[str, Fp8Rows]:
        """An FP8 product for each of experts, by name."""
        ...

    def context(self) -> AbstractContextManager:
        """Around what `Precision.context` is around."""
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
        self.sites: dict[str, Site[Any, Any]] = {}
        self._gauges: dict[str, Gauge] = {}
        self._may_retire = self.config.fallback_error is not None

    def attach(self, blocks: nn.ModuleDict) -> None:
        first, last = self.config.bf16_first_blocks, self.num_layers - self.config.bf16_last_blocks
        within = nn.ModuleDict({index: block for index, block in blocks.items() if first <= int(index) < last})
        layers = dict(linear_layers(within))
        for name, fp8 in self.backend.make_layers(layers).items():
            self.sites[name] = LinearSite(name, layers[name], fp8)
        products, places = dict[str, GroupedProduct](), dict[str, WeightSharding]()
        for name, experts in within.named_modules(prefix="blocks"):
            if isinstance(experts, Experts):
                for cut, (part, product) in enumerate(experts.by_name()):  # columns first, then rows
                    products[f"{name}.{part}"] = product
                    places[f"{name}.{part}"] = WeightSharding(experts.tp, cut)
        for name, rows in self.backend.make_rows(places).items():
            self.sites[name] = GroupedSite(name, products[name], rows)

    def context(self, documents: Documents) -> AbstractContextManager:
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


def _standing(site: Site[Any, Any]) -> int:
    """Where a layer stands on its way out of FP8."""
    if site.retired_at is not None:
        return site.retired_at
    return WAS_OVER if site.was_over else IN_FP8
