"""A gate before the update: the last moment at which a step can still be left out.

DeepSpeed's optimizers know the gradient norm only inside their own `step`, where they go on at once to clip and update.
All of them, at every ZeRO stage and under a pipeline, end in the `step` of the torch optimizer that they wrap, and by
then have written down the norm. So the gate stands there: refused, the torch optimizer does not step, weights and
moments stay as they are to the last bit, and DeepSpeed clears the gradients as after any step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megalite.engine.hooks import AroundUpdate, Update


class UpdateGate:
    """Takes the place of the torch optimizer's `step` inside a DeepSpeed optimizer, which may call it once a group."""

    def __init__(self, optimizer: Any):
        inner = getattr(optimizer, "optimizer", optimizer)
        self.why = ""
        """Why the last update was refused; empty when it was not."""
        self._ask: Callable[[], str] | None = None
        self._around: AroundUpdate = _just_make
        self._step = inner.step
        inner.step = self._step_unless_refused

    def prepare(self, ask: Callable[[], str], around: AroundUpdate) -> None:
        """Set what is asked before the coming update: why it is to be left out, empty to go on. It is asked once, and
        not at all when the norm is not finite, since DeepSpeed then leaves the update out by itself. `around` makes
        the update."""
        self.why, self._ask, self._around = "", ask, around

    def _step_unless_refused(self, *args: Any, **kwargs: Any) -> None:
        if self._ask is not None:
            self.why, self._ask = self._ask(), None
        if not self.why:
            self._around(partial(self._step, *args, **kwargs))


def _just_make(update: Update) -> None:
    update()
