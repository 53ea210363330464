"""What routers do, seen in a forward pass: how evenly tokens go to experts, and how sure routers are.

Of the tokens that count in the loss, whatever the layout:

    load_max, load_min     tokens of the fullest and the emptiest expert, over the mean
    load_entropy           of the experts' shares of all choices, over that of even ones: 1 is even
    dead_experts           share of the experts that no token has chosen
    router_entropy         mean over tokens of the entropy of their scores, over that of even ones
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import log
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megalite.layers.router import Router, Routing
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import all_reduce


class RouterStatistics:
    """Watches routers, by name."""

    def __init__(self, routers: Mapping[str, Router], device: torch.device):
        self._routers = routers
        self._seen = {
            name: torch.zeros(router.settings.num_experts + 2, dtype=torch.float64, device=device)
            for name, router in self._routers.items()
        }
        """Of each: how often every expert was chosen; the sum of the tokens' entropies; tokens."""

    def hooks(self) -> list[RemovableHandle]:
        """Begin to watch."""
        return [router.register_forward_hook(partial(self._see, name)) for name, router in self._routers.items()]

    def collect(self, axes: Iterable[Axis]) -> dict[str, dict[str, float]]:
        """What was seen of each block. Collective over the axes, whose ranks have other tokens."""
        if not self._seen:
            return {}
        seen = torch.stack(list(self._seen.values()))
        for axis in axes:
            seen = all_reduce(seen, axis)
        rows = zip(self._seen, seen.tolist(), strict=True)
        return {name.removesuffix(".mlp.router"): load_figures(row[:-2]) | _entropy(row) for name, row in rows}

    def _see(self, name: str, router: nn.Module, inputs: Any, routing: Routing) -> None:
        assert isinstance(router, Router)
        x, documents = inputs
        counted = router.counted(documents).double()
        seen, top_k = self._seen[name], routing.chosen.shape[1]
        seen[:-2].index_add_(0, routing.chosen.flatten(), counted.repeat_interleave(top_k))
        seen[-2] += (entropies(router.scores(x)) * counted).sum()
        seen[-1] += counted.sum()


def load_figures(counts: list[float]) -> dict[str, float]:
    """How even counts of experts are."""
    total, size = sum(counts), len(counts)
    mean = total / size if total else 1.0
    shares = [count / total for count in counts if count]
    entropy = sum(share * -log(share) for share in shares)
    return {
        "load_max": max(counts) / mean,
        "load_min": min(counts) / mean,
        "load_entropy": entropy / log(size) if size > 1 and total else 1.0,
        "dead_experts": counts.count(0.0) / size,
    }


def entropies(scores: Tensor) -> Tensor:
    """`[t]`: of each token's scores, as shares of their sum."""
    shares = scores / scores.sum(1, keepdim=True)
    return torch.special.entr(shares).sum(1)


def _entropy(row: list[float]) -> dict[str, float]:
    size = len(row) - 2
    return {"router_entropy": row[-2] / max(row[-1], 1.0) / log(size) if size > 1 else 1.0}
