"""The best layouts of a model on so many ranks of a machine.

All layouts are put in order by a lower bound of their time, which is quick: the work of a stage, and the bubble that no
order of passes avoids. What cannot fit, by a lower bound of its memory, is passed over. The others are judged one by
one, memory, time and legality, until no layout that is left could be among the best. What does not fit if nothing is
made again is tried with the fewest blocks of each stage with which it does (`Candidate.may_make_some_again`).

Of layouts that share ranks alike, and differ in micro-batch, schedule or recomputation, one is shown: of those that are
as quick as the quickest, as far as this clock can tell, the one that takes the least memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import itemgetter
from typing import NamedTuple

from megalite.config.fill import fill
from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError
from megalite.planner.bounds import Bounds, MicroBatches
from megalite.planner.estimate import (
    Estimate,
    Memory,
    estimate,
    memory_if_fits,
    timed,
    usable_host_memory,
    usable_memory,
)
from megalite.planner.layouts import Candidate, Mesh, layouts
from megalite.planner.machines import Machine
from megalite.planner.memory import on_device
from megalite.planner.practice import OURS, Practice


@dataclass(frozen=True)
class Search:
    """What was found."""

    best: tuple[Estimate, ...]
    """Those that fit, one of each mesh, the quickest first."""
    smallest: Estimate | None
    """Where none fits, the one that lacks the fewest bytes; None where no layout is legal."""
    num_layouts: int
    """That were looked at, those that make some blocks again left out."""
    complaint: str = ""
    """Why a layout was refused, where all were."""
    usable: int = 0
    """Bytes of a rank that a layout may take."""


def search(
    config: Config,
    world_size: int,
    machine: Machine,
    *,
    top: int,
    vocab_size: int | None = None,
    practice: Practice = OURS,
    known: MicroBatches | None = None,
) -> Search:
    """The layouts of a config that take the least time on so many ranks.

    Args:
        config: its own layout does not matter.
        top: layouts to find, each of another mesh.
        vocab_size: where the config takes its tokenizer's.
        practice: of the software, which has these layouts alone.
        known: what former searches of this model on this machine have worked out, to be added to.

    Raises:
        UserError: the machine has no units for the config's format.
    """
    config = on_device(config, machine.device_type)
    model = fill(config, vocab_size)
    bounds, most = Bounds(config, machine, vocab_size, practice, known), usable_memory(machine)
    legal = [each for each in layouts(config, model, world_size, machine, practice) if not bounds.is_repeated(each)]
    judge = _Judge(config, world_size, machine, vocab_size, practice)
    best, fitting = Quickest(top), set[Candidate]()
    for layout in _promising(legal, bounds, best, most):
        if fitted := judge.fitted(layout):
            best.add(layout.mesh, judge.timed(fitted, best.limit_of(layout.mesh)))
            fitting.add(layout)
    too_large = (each for each in legal if each.may_make_some_again and each not in fitting)
    with_some = _with_some_again(too_large, bounds, best, most) if practice.makes_some_again else ()
    for layout in _promising(with_some, bounds, best, most):
        limit = best.limit_of(layout.mesh)
        if fitted := judge.with_fewest_again(layout, bounds.most_again(layout), bounds.seconds, limit):
            best.add(layout.mesh, judge.timed(fitted, limit))
    if chosen := best.chosen():
        return Search(chosen, None, len(legal))
    smallest, complaint = _smallest(sorted(legal, key=bounds.memory), judge)
    return Search((), smallest, len(legal), complaint, int(most))


def _smallest(layouts: Sequence[Candidate], judge: _Judge) -> tuple[Estimate | None, str]:
    """Of layouts in order of what they take at least, the one that lacks the fewest bytes; or why all are refused."""
    complaint, judged = "", list[Estimate]()
    for layout in layouts:
        found = judge.judged(layout)
        if isinstance(found, ConfigError):
            complaint = complaint or found.problems[0]
        else:
            judged.append(found)
        if len(judged) == TRIED_FOR_SMALLEST:
            break
    of_device, of_host = usable_memory(judge.machine), usable_host_memory(judge.machine)
    least = min(judged, key=lambda each: max(max(each.memory) - of_device, max(each.host) - of_host), default=None)
    return least, "" if least else complaint


TRIED_FOR_SMALLEST = 64
"""Layouts that take little by their bounds, of which the least is said where none fits."""


def _promising(layouts: Iterable[Candidate], bounds: Bounds, best: Quickest, most: float) -> Iterator[Candidate]:
    """In order of seconds, those that by their bounds fit and may be among the best, of which there are ever more."""
    for seconds, layout in sorted(((bounds.seconds(each), each) for each in layouts), key=itemgetter(0)):
        if seconds >= best.limit * (1 + EQUAL):
            return
        if seconds < best.limit_of(layout.mesh) and bounds.memory(layout) <= most:
            yield layout


def _with_some_again(layouts: Iterable[Candidate], bounds: Bounds, best: Quickest, most: float) -> Iterator[Candidate]:
    """Layouts that take too much, with as many blocks made again as they have to by their bounds, at least."""
    for layout in layouts:
        if bounds.seconds(layout) < best.limit_of(layout.mesh) and (count := bounds.least_again(layout, most)):
            yield replace(layout, blocks_again=count)


@dataclass(frozen=True)
class _Judge:
    """Of layouts, one by one."""

    base: Config
    world_size: int
    machine: Machine
    vocab_size: int | None
    practice: Practice
    legal: set[Candidate] = field(default_factory=set)
    """That are known to be: whatever is made again."""

    def judged(self, layout: Candidate) -> Estimate | ConfigError:
        """Whether it fits or not; or why it is refused."""
        try:
            config = self._checked(layout)
        except ConfigError as error:
            return error
        return estimate(
            config,
            self.world_size,
            self.machine,
            vocab_size=self.vocab_size,
            overrides=layout.overrides(self.base),
            practice=self.practice,
        )

    def fitted(self, layout: Candidate) -> _Fitted | None:
        """One that is legal and fits."""
        return self._fitted(layout) if self._is_legal(layout) else None

    def with_fewest_again(
        self, layout: Candidate, most: int, seconds: Callable[[Candidate], float], limit: float
    ) -> _Fitted | None:
        """A layout with as few blocks made again as it fits with: at least as many as it has, at most so many. None
        where it is refused or does not fit even then, or one with too few takes so many seconds or more by its bound.
        Tried are ever larger steps until one fits, and then what lies between.

        Args:
            seconds: that a layout takes at least.
        """
        if not self._is_legal(layout):
            return None
        found, least, step = None, layout.blocks_again, 1
        while least <= most:
            if seconds(replace(layout, blocks_again=least)) >= limit:
                return None
            tried = min(least + step - 1, most) if found is None else (least + most) // 2
            if fitted := self._fitted(replace(layout, blocks_again=tried)):
                found, most = fitted, tried - 1
            else:
                least, step = tried + 1, 2 * step
        return found

    def timed(self, fitted: _Fitted, limit: float) -> Estimate | None:
        """None for one that takes so many seconds or more."""
        overrides = fitted.layout.overrides(self.base)
        return timed(
            fitted.config,
            fitted.plan,
            self.machine,
            fitted.memory,
            overrides=overrides,
            practice=self.practice,
            below=limit,
        )

    def _is_legal(self, layout: Candidate) -> bool:
        plain = replace(layout, blocks_again=0)
        if plain not in self.legal:
            try:
                self._checked(layout)
            except ConfigError:
                return False
            self.legal.add(plain)
        return True

    def _checked(self, layout: Candidate) -> Config:
        config = layout.applied_to(self.base)
        validate(config, self.world_size)
        return config

    def _fitted(self, layout: Candidate) -> _Fitted | None:
        """Of one that is legal."""
        config = layout.applied_to(self.base)
        plan = make_plan(config, self.world_size, self.vocab_size)
        memory = memory_if_fits(config, plan, self.machine, vocab_size=self.vocab_size, practice=self.practice)
        return None if memory is None else _Fitted(layout, config, plan, memory)


class _Fitted(NamedTuple):
    """A layout that fits."""

    layout: Candidate
    config: Config
    plan: RunPlan
    memory: Memory


EQUAL = 0.005
"""Of a step: layouts that are nearer to each other are equally quick."""


class Quickest:
    """The quickest layouts of the meshes that are quickest."""

    def __init__(self, top: int):
        self._top = top
        self._found: dict[Mesh, list[Estimate]] = {}
        """All that are equal to the quickest of their mesh, it first."""

    @property
    def limit(self) -> float:
        """Seconds that a layout of another mesh has to stay below."""
        quickest = sorted(each[0].seconds for each in self._found.values())
        return quickest[self._top - 1] if len(quickest) >= self._top else inf

    def limit_of(self, mesh: Mesh) -> float:
        """Seconds that a layout of a mesh has to stay below, to be quicker or as quick."""
        known = self._found.get(mesh)
        return min(self.limit, inf if known is None else known[0].seconds) * (1 + EQUAL)

    def add(self, mesh: Mesh, layout: Estimate | None) -> None:
        """One that fits; None for one that takes as long as its mesh may not."""
        if layout is None:
            return
        all_of_mesh = sorted([*self._found.get(mesh, ()), layout], key=lambda each: each.seconds)
        equal = all_of_mesh[0].seconds * (1 + EQUAL)
        self._found[mesh] = [each for each in all_of_mesh if each.seconds <= equal]

    def chosen(self) -> tuple[Estimate, ...]:
        """One of each of the quickest meshes, the quickest first."""
        meshes = sorted(self._found.values(), key=lambda each: each[0].seconds)[: self._top]
        return tuple(sorted((min(each, key=_least) for each in meshes), key=lambda each: each.seconds))


def _least(layout: Estimate) -> tuple[int, float]:
    return max(layout.memory), layout.seconds
