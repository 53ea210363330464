"""Whether masters and optimizer state are still what the last update left, to the last bit.

Under ZeRO nobody else has a copy of them, so comparing copies (`replicas.py`) cannot see a memory cell that flips: the
next update takes the wrong number, and hands it to all ranks alike. So a rank hashes what it keeps behind an update,
and again before the next one; nothing may touch it in between. The rank whose memory changed is named.

    update --hash--> forward and backward pass of the next step --hash, compare--> update
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megalite.engine.protocol import Engine, StepResult
from megalite.monitor.recorder import Recorder
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import from_all
from megalite.train.components.component import Component, RollBack, Step
from megalite.train.replicas import hash_tensor


class MemoryCheck(Component):
    """Looks after an engine's state between chosen steps and the ones behind them.

    Args:
        engine: whose update asks this object first.
        axes: of this rank.
        every: steps between checks.
    """

    name = "memory_check"

    def __init__(self, engine: Engine, axes: Axes, recorder: Recorder, every: int):
        self._engine, self._axes, self._recorder, self._every = engine, axes, recorder, every
        self._left: dict[str, Tensor] = {}
        self._changed: list[str] = []
        engine.hooks.before_update.add(self._compare)

    def after_step(self, step: Step, result: StepResult) -> RollBack | None:
        """Ask to go back when a rank's masters or optimizer state had changed by themselves before this step."""
        found = self.take_note(step.number)
        if not found:
            return None
        why = f"memory has changed since the update before: {'; '.join(found)}"
        self._recorder.event("memory_changed", step.number, why=why)
        return RollBack(step.number - 1, why)  # a checkpoint of the step before may have the wrong number

    def rewind(self, step: int, state: dict[str, Any]) -> None:
        """The state is set from outside."""
        self._left, self._changed = {}, []

    def take_note(self, step: int) -> list[str]:
        """What was found before the update of a finished step. Collective.

        Returns:
            A sentence for each rank whose state had changed, the same on all ranks.
        """
        found = self._share() if self._left else []
        self._left, self._changed = {}, []
        if step % self._every == 0:
            self._left = dict(self._hashes())
        return found

    def _compare(self) -> None:
        """Before an update: note what is no longer what it was."""
        if self._left:
            now = dict(self._hashes())
            self._changed = [name for name, before in self._left.items() if not now[name].equal(before)]

    def _hashes(self) -> Iterator[tuple[str, Tensor]]:
        """All that this rank alone keeps, by weight and kind. State that is packed is left out: it is made anew for
        whoever asks."""
        for part in self._engine.slices():
            for kind, tensor in part.tensors.items():
                yield f"{kind} of {part.local.weight.name}, from {part.start}", hash_tensor(tensor)
        for owned in self._engine.owned_states():
            if owned.is_live:
                for kind, (place, tensor) in owned.tensors.items():
                    yield f"{kind} of {owned.unit.weight.name}, from row {place.start[0]}", hash_tensor(tensor)

    def _share(self) -> list[str]:
        everyone = from_all(self._changed, self._axes.world)
        return [f"rank {rank}: {'; '.join(changed)}" for rank, changed in enumerate(everyone) if changed]
