"""ZeRO-3's weights come and go unseen by what recomputes a block.

Selective recomputation counts torch's ops while a block runs, and stops where it meets more of them the second time.
DeepSpeed gathers weights in hooks, in the midst of these ops, and not the same ones each time: what it keeps whole
(small weights) is there before a run's first forward pass when a checkpoint or an evaluation has brought it, and is let
go behind it, as long as no pass over the model has been noted. So its hooks run outside of whatever counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes


def gather_unseen(optimizer: Any) -> None:
    """Let a stage-3 optimizer fetch and release weights outside of dispatch modes."""
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    for name in ("fetch_sub_module", "release_sub_module"):
        setattr(coordinator, name, _unseen(getattr(coordinator, name)))


def _unseen(move: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(move)
    def moved(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            move(*args, **kwargs)

    return moved
