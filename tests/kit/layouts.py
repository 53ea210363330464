"""The planner's search against judging every layout."""

from __future__ import annotations

from megalite.config.fill import fill_model
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError
from megalite.planner.estimate import Estimate, estimate
from megalite.planner.layouts import Mesh, layouts
from megalite.planner.machines import Machine
from megalite.planner.practice import Practice
from megalite.planner.search import EQUAL, Bounds


def best_of_all(base: Config, world_size: int, machine: Machine, practice: Practice, *, top: int) -> list[Estimate]:
    """Of each mesh the leanest of those that are as quick as its quickest, and of these the quickest. No layout takes
    less than its bounds say."""
    bounds, found = Bounds(base, machine, None, practice), dict[Mesh, list[Estimate]]()
    for layout in layouts(base, fill_model(base.model, base.batch, None), world_size, machine, practice):
        applied = layout.applied_to(base)
        try:
            validate(applied, world_size)
        except ConfigError:
            continue
        overrides = layout.overrides(base)
        judged = estimate(applied, world_size, machine, overrides=overrides, practice=practice)
        assert bounds.seconds(layout) <= judged.seconds * (1 + 1e-9), layout
        assert bounds.memory(layout) <= max(judged.memory), layout
        if judged.fits:
            found.setdefault(layout.mesh, []).append(judged)
    quickest = {mesh: min(each.seconds for each in alike) for mesh, alike in found.items()}
    best = []
    for mesh in sorted(found, key=quickest.__getitem__)[:top]:
        equal = [each for each in found[mesh] if each.seconds <= quickest[mesh] * (1 + EQUAL)]
        best.append(min(equal, key=lambda each: (max(each.memory), each.seconds)))
    return best
