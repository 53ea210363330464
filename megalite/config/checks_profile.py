"""What must hold between the steps that are traced and the run that they are of."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.plan import derive_steps
from megalite.config.schema import Config


def check_profile(config: Config, world_size: int) -> Iterator[str]:
    """Complaints about `monitor.profile`."""
    profile, train = config.monitor.profile, config.train
    if profile is None:
        return
    steps = profile.step_range
    if (train.steps is None) != (train.tokens is None) and steps.stop - 1 > (total := derive_steps(config)):
        yield (
            f"monitor.profile.steps: {profile.steps} ends with step {steps.stop - 1}, and the run with step {total}; "
            f"use {max(1, total + 1 - len(steps))}:{total + 1}"
        )
    ranks = range(world_size) if profile.ranks is None else profile.ranks
    absent = [rank for rank in ranks if rank >= world_size]
    if absent:
        yield (
            f"monitor.profile.ranks: there is no rank {absent[0]}, the run has {world_size}; use numbers from 0 to "
            f"{world_size - 1}, or null for all"
        )
    if len(set(ranks)) < len(ranks) or not ranks:
        yield f"monitor.profile.ranks: found {list(ranks)}; name one or more, each once, or use null for all"
    if (asked := len(steps) * len(ranks)) > profile.most:
        yield (
            f"monitor.profile.most: {len(steps)} steps of {len(ranks)} ranks are {asked} steps to trace, and "
            f"{profile.most} are allowed; trace fewer steps or name some ranks (monitor.profile.ranks), or set "
            f"most={asked} where there is disk and memory for it"
        )
