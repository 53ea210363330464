"""How far a run has come with its data, and how its samples go on from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megalite.checkpoint.format import Manifest, Progress
from megalite.data.cursor import DataCursor, add_counts
from megalite.data.samples import Samples
from megalite.errors import CheckpointError


def go_on_with_data(folder: Path, manifest: Manifest, samples: Samples) -> tuple[Progress, bool]:
    """How far a run has come with its data, and whether the mixture is another from here on.

    Raises:
        CheckpointError: the data itself is not what the run was trained on.
        DataError: the rest of the run has no room for the passes that are left.
    """
    progress, data = manifest.progress, manifest.data
    trained_on = data.get("fingerprint")
    if trained_on in (None, samples.fingerprint):
        if sum(progress.consumed.values()) != progress.num_samples:  # written before there were accounts
            progress = replace(progress, consumed=samples.following(DataCursor()).drawn(progress.num_samples))
        return progress, False
    former = data.get("sources", {})
    changed = [each.name for each in samples.sources if former.get(each.name, each.fingerprint) != each.fingerprint]
    if changed or not former:
        raise CheckpointError(
            f"{folder}: trained on data with fingerprint {trained_on}, data.train now has "
            f"{samples.fingerprint}{f' (another {changed[0]})' if changed else ''}; put the data back, or start a new "
            f"run from these weights: run.dir=NEW train.init_from={folder}"
        )
    orders = data.get("orders", {})  # of checkpoints that are older, nobody knows
    if reordered := [name for name, order in samples.orders.items() if orders.get(name, order) != order]:
        raise CheckpointError(
            f"{folder}: {reordered[0]} was read in another order; data.mix.ranks and rank_stretches of a source "
            "may not change in mid-run, or an epoch would have samples twice and leave others out; put them back, or "
            f"start a new run from these weights: run.dir=NEW train.init_from={folder}"
        )
    drawn = add_counts(progress.consumed, progress.account.left_out)
    return replace(progress, account=remix(progress.account, samples, progress, drawn)), True


def remix(account: DataCursor, samples: Samples, progress: Progress, drawn: dict[str, int]) -> DataCursor:
    """The account of a run whose mixture is that of `samples` from here on.

    Args:
        account: of the run so far.
        samples: that it goes on with.
        progress: where it stands.
        drawn: samples of each source that were drawn by then, those left out included.
    """
    at, unshifted = progress.num_samples, replace(account, shift={}, read=progress.consumed)
    return unshifted.remix(at, drawn, samples.following(unshifted).drawn(at))
