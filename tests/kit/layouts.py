"""The planner's search against judging every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megalite.config.fill import fill_model
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError
from megalite.planner.bounds import Bounds
from megalite.planner.estimate import Estimate, estimate
from megalite.planner.layouts import Candidate, Mesh, layouts
from megalite.planner.machines import Machine
from megalite.planner.practice import Practice
from megalite.planner.search import EQUAL


def best_of_all(base: Config, world_size: int, machine: Machine, practice: Practice, *, top: int) -> list[Estimate]:
    """Of each mesh the leanest of those that are as quick as its quickest, and of these the quickest. No layout takes
    less than its bounds say."""
    bounds, found = Bounds(base, machine, None, practice), dict[Mesh, list[Estimate]]()
    model = fill_model(base.model, base.batch, None)
    most = model.num_layers - (0 if model.num_predictions else 1)  # what predicts further is not among them
    for plain in layouts(base, model, world_size, machine, practice):
        fitting: Estimate | None = None
        for layout in (plain, *_with_blocks_again(plain, most, practice)):
            applied = layout.applied_to(base)
            try:
                validate(applied, world_size)
            except ConfigError:
                break
            overrides = layout.overrides(base)
            if fitting is not None and layout.blocks_again < most:
                continue
            judged = estimate(applied, world_size, machine, overrides=overrides, practice=practice)
            assert bounds.seconds(layout) <= judged.seconds * (1 + 1e-9), layout
            assert bounds.memory(layout) <= max(judged.memory), layout
            if judged.fits and fitting is None:
                fitting = judged
                found.setdefault(layout.mesh, []).append(judged)
    quickest = {mesh: min(each.seconds for each in alike) for mesh, alike in found.items()}
    best = []
    for mesh in sorted(found, key=quickest.__getitem__)[:top]:
        equal = [each for each in found[mesh] if each.seconds <= quickest[mesh] * (1 + EQUAL)]
        best.append(min(equal, key=lambda each: (max(each.memory), each.seconds)))
    return best


def _with_blocks_again(layout: Candidate, most: int, practice: Practice) -> Iterator[Candidate]:
    """The layout with ever more of its blocks made again."""
    if layout.may_make_some_again and practice.makes_some_again:
        for count in range(1, most + 1):
            yield replace(layout, blocks_again=count)
