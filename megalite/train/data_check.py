"""`data.verify: true`: everything that a run will read, read once before its first step, every rank its share."""

from __future__ import annotations

import time

import torch

from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data.verify import complaints, list_run, refuse
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import any_rank, from_all
from megalite.train.startup import Say


def verify_data(config: Config, plan: RunPlan, axes: Axes, device: torch.device, say: Say) -> dict[str, float]:
    """Compare the data of a run with its checksums. Collective: ranks share the files.

    Args:
        config: of the run.
        plan: of the run.
        axes: of the mesh.
        device: of this rank.
        say: is told what begins.

    Returns:
        What there is to say of it: megabytes and seconds.

    Raises:
        DataError: on all ranks: something is damaged; every complaint of every rank.
    """
    began = time.monotonic()
    listing = list_run(config, plan.model.vocab_size)
    say(f"comparing {listing.num_bytes / 1e9:,.1f} GB of data with its checksums")
    checks = listing.share(axes.global_rank, axes.world.size)
    found = list(complaints(checks, threads=torch.get_num_threads()))
    if any_rank(bool(found), axes.world, device):
        found = [complaint for each in from_all(found, axes.world) for complaint in each]
    refuse(found, listing)
    return {"megabytes": round(listing.num_bytes / 1e6, 3), "seconds": round(time.monotonic() - began, 3)}
