"""Going back to an earlier checkpoint in the middle of a run, in the same processes."""

from __future__ import annotations

from dataclasses import replace

from megalite.checkpoint import catalog
from megalite.checkpoint.data_so_far import remix
from megalite.checkpoint.format import Progress
from megalite.checkpoint.precision_state import load_state
from megalite.checkpoint.retention import point_at_best
from megalite.data.cursor import add_counts
from megalite.data.samples import Samples
from megalite.errors import CheckpointError
from megalite.train.run import Run
from megalite.train.start import Start, first_start, newest_first, open_checkpoint, set_aside, verify


def load_before(run: Run, step: int) -> Start:
    """Load the newest whole checkpoint of a step before `step`, or what the run began with, into the engine.

    Later checkpoints are removed: after a crash the run must not go on from one that it has left. Damaged ones on the
    way back are set aside. Collective; no save may be pending.
    """
    root = run.config.run.dir / catalog.CHECKPOINTS
    chosen: Start | None = None
    damaged = []
    for folder in newest_first(root, run.axes):
        if catalog.step_of(folder) >= step:
            if run.recorder.is_writer:
                catalog.remove(folder)
        elif verify(folder, run.axes, run.device) is None:
            chosen = open_checkpoint(folder, run.stages, f"checkpoint {folder}")
            break
        else:
            damaged.append(folder)
    set_aside(damaged, run.axes)
    if run.recorder.is_writer:
        point_at_best(root)
    if chosen is None:
        chosen = first_start(run.whole, run.stages, run.axes, run.device, again=True)
    if not run.plan.goes_on_from(chosen.progress.step):
        raise CheckpointError(
            f"there is no checkpoint to go back to between step {run.plan.first_step - 1}, where sequences of "
            f"{run.config.batch.seq_len} began (batch.stages), and step {step}; raise checkpoint.keep_last, and start "
            f"again from {chosen.origin}"
        )
    run.engine.load(chosen.weights, chosen.moments, chosen.progress.num_updates)
    load_state(run.engine, chosen.reader)
    return chosen


def go_back(
    run: Run, samples: Samples, now: Progress, before: int, skip_samples: int | None
) -> tuple[Progress, Samples, str]:
    """Bring engine and data of a run back to before a step. Collective.

    Args:
        samples: that the run reads.
        now: where the run stands.
        before: a step; the run goes on from an earlier one.
        skip_samples: leave out all data that was read since then, and so many samples more; None to read the same data
            again.

    Returns:
        Where the run stands now, the samples that it reads from there on, and where its weights are from.
    """
    start = load_before(run, max(before, run.plan.first_step))
    then = start.progress
    drawn: dict[str, int] = {}
    account = replace(now.account, gaps=tuple(gap for gap in now.account.gaps if gap.at <= then.num_samples))
    has_changed = account.data_index(then.num_samples) < account.shift_from
    if skip_samples is not None:
        stop = now.account.data_index(now.num_samples - 1) + 1
        drawn = add_counts(now.consumed, now.account.left_out)  # also of sources that the mixture has no longer
        if has_changed and run.config.data.mix.epochs:  # of the passes more are left than there were at the change
            account = remix(account.leave_out(then.num_samples, stop), samples, then, drawn)
        account = account.leave_out(then.num_samples, stop + skip_samples)
    elif has_changed:  # what was read under another mixture comes again in this one
        account = then.account
    samples = samples.following(account)
    drawn = {**drawn, **samples.drawn(then.num_samples)}
    left_out = {name: count - then.consumed.get(name, 0) for name, count in drawn.items()}
    left_out = {**then.account.left_out, **left_out}
    account = replace(account, left_out={name: count for name, count in left_out.items() if count})
    run.recorder.rewind(then.step)
    return replace(then, account=account), samples, start.origin
