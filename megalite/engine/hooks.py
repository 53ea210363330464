"""Who wants a say around an update: lists of hooks with an order, so that nobody takes another's place.

    gradients are there -> before_update, one after the other
                        -> vetoes, until one has a reason to leave the update out
                        -> around_update, each around the next, and the update in the middle

All ranks must have the same hooks in the same order, since hooks may be collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

Hook = TypeVar("Hook")

FIRST, USUAL, LAST = -100, 0, 100
"""Orders of hooks; any number between will do."""

BeforeUpdate = Callable[[], None]
Veto = Callable[[float, float], str]
Update = Callable[[], None]
AroundUpdate = Callable[[Update], None]


class HookList(Generic[Hook]):
    """Functions that are called in rising order; those of one order as they were added."""

    def __init__(self) -> None:
        self._hooks: list[tuple[int, Hook]] = []

    def add(self, hook: Hook, *, order: int = USUAL) -> Callable[[], None]:
        """Add a hook; returns what takes it away again."""
        entry = (order, hook)
        self._hooks.append(entry)
        self._hooks.sort(key=lambda each: each[0])  # keeps the order of equals

        def remove() -> None:
            self._hooks = [each for each in self._hooks if each is not entry]

        return remove

    def __iter__(self) -> Iterator[Hook]:
        return iter([hook for _, hook in self._hooks])

    def __len__(self) -> int:
        return len(self._hooks)


@dataclass(frozen=True)
class UpdateHooks:
    """What an engine calls around every update, on all ranks."""

    before_update: HookList[BeforeUpdate] = field(default_factory=HookList)
    """Once the gradients are there, when weights and moments are about to change. Whoever still reads them, as a save
    in the background does, lets the update wait here."""
    vetoes: HookList[Veto] = field(default_factory=HookList)
    """Given the step's loss and gradient norm (before clipping, finite), once a step that has a valid token, when
    nothing has changed yet: why the update is to be left out, empty to make it. All ranks must say the same."""
    around_update: HookList[AroundUpdate] = field(default_factory=HookList)
    """Given the update, which each must make by calling it once: who looks at weights before and after it, and at
    `Engine.gradients`."""

    def prepare(self) -> None:
        """Call what comes before an update."""
        for hook in self.before_update:
            hook()

    def veto(self, loss: float, grad_norm: float) -> str:
        """The first reason to leave the update out; empty when there is none."""
        return next((why for hook in self.vetoes if (why := hook(loss, grad_norm))), "")

    def apply(self, update: Update) -> None:
        """Make the update, with all around it."""
        for hook in reversed(list(self.around_update)):
            update = partial(hook, update)
        update()
