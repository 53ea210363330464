"""What the routers of a stage remember between steps: biases, and how often each expert was chosen.

Both are equal on all ranks that hold the stage, whatever its layout, and are in checkpoints beside FP8's maxima.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from megalite.architecture.weights import ROUTER_BIAS
from megalite.layers.precision import ReadState
from megalite.layers.router import Router
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import all_reduce

LOADS = "router_loads"
"""State tensors `router_bias/blocks.3.mlp.router` and `router_loads/blocks.3.mlp.router`, `[experts]`."""


class Routers:
    """The routers of a stage's blocks, by name.

    Args:
        layers: by their name in the model.
    """

    def __init__(self, layers: Mapping[str, nn.Module]):
        self.by_name = {
            name: module
            for layer, within in layers.items()
            for name, module in within.named_modules(prefix=layer)
            if isinstance(module, Router)
        }
        self._first: dict[str, Tensor] = {}
        for name, router in self.by_name.items():
            if router.settings.bias_rate is not None:
                self.begin_with(name, torch.zeros(router.settings.num_experts))

    def begin_with(self, name: str, bias: Tensor) -> None:
        """The bias that a router begins with, `[experts]` fp32."""
        self._first[name], self.by_name[name].bias = bias, bias.clone()

    def to(self, device: torch.device) -> None:
        """Bring all of it to a device."""
        for router in self.by_name.values():
            router.noted = router.noted.to(device)
            router.bias = None if router.bias is None else router.bias.to(device)
            router.loads = None if router.loads is None else router.loads.to(device)

    def end_step(self, axes: Iterable[Axis], *, is_skipped: bool = False) -> None:
        """A step is over: its loads are known, and biases move, as weights do, unless it was left out. Nothing waits
        for it. Collective over the axes, whose ranks have had other tokens."""
        routers = list(self.by_name.values())
        if not routers:
            return
        counts = torch.stack([router.noted for router in routers])
        for axis in axes:
            counts = all_reduce(counts, axis)
        for router, noted in zip(routers, counts, strict=True):
            router.noted.zero_()
            router.loads = _in_place(router.loads, noted[0].float())
            router.dropped = noted[1].float() if noted.shape[0] > 1 else None
            if router.bias is not None and router.settings.bias_rate and not is_skipped:
                excess = torch.sign(noted[0] - noted[0].mean()).float()
                router.bias -= router.settings.bias_rate * excess

    def loads(self) -> dict[str, list[float]]:
        """By block, how often each expert was chosen in the last step; empty before the first. Waits for the device."""
        return {
            name.removesuffix(".mlp.router"): router.loads.tolist()
            for name, router in self.by_name.items()
            if router.loads is not None
        }

    def dropped(self) -> dict[str, float]:
        """By block, the share of choices that found no room in the last step, where some may; likewise."""
        return {
            name.removesuffix(".mlp.router"): (router.dropped.sum() / router.loads.sum().clamp(min=1.0)).item()
            for name, router in self.by_name.items()
            if router.dropped is not None and router.loads is not None
        }

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs to go on exactly: fp32, by names that no layout changes; copies."""
        found = dict[str, Tensor]()
        for name, router in self.by_name.items():
            found |= {f"{ROUTER_BIAS}/{name}": router.bias.clone()} if router.bias is not None else {}
            found |= {f"{LOADS}/{name}": router.loads.clone()} if router.loads is not None else {}
        return found

    def load(self, read: ReadState) -> None:
        """Take up saved state, in place of what there is; what is not there begins anew."""
        for name, router in self.by_name.items():
            device = router.noted.device
            loads = read(f"{LOADS}/{name}")
            router.loads = None if loads is None else loads.to(device)
            if router.bias is not None:
                bias = read(f"{ROUTER_BIAS}/{name}")
                router.bias = (self._first[name] if bias is None else bias).to(device, copy=True)


def _in_place(former: Tensor | None, x: Tensor) -> Tensor:
    """The same numbers, where there were others before: a recorded pass reads them there."""
    return x if former is None else former.copy_(x)
