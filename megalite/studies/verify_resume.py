"""Proof that a restart changes nothing: the same training once in one go and once interrupted, compared bit for bit.

    whole    1 ............ N ............ 2N
    halves   1 ............ N | 1st process ends, 2nd starts from the checkpoint | N+1 ............ 2N

Compared are every step's metrics, every weight and moment in the checkpoints of steps N and 2N, the counters, and the
hash chain over all samples consumed. The first half tells a run that is not deterministic at all from one that resumes
wrongly: nothing has been restarted there yet. Schedules are those of the real run, of which these are the first steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from megalite.checkpoint.catalog import CHECKPOINTS
from megalite.checkpoint.format import Progress, folder_name
from megalite.checkpoint.reader import CheckpointReader
from megalite.config.length import derive_steps
from megalite.config.load import in_folder
from megalite.config.plan import default_world_size
from megalite.config.schema import Config
from megalite.data.run_config import load_run
from megalite.errors import EXIT_DONE, EXIT_REQUEUE, UserError
from megalite.train.local import train_locally
from megalite.train.run_folder import METRICS

Launch = Callable[..., int]
"""Trains `(config, world_size, stop_after=step)` and returns the exit code."""

METRIC_KEYS = ("loss", "grad_norm", "lr", "tokens", "skipped")
"""What a step's record says that is no matter of time."""

FORCED = (
    "checkpoint.keep_every=null",
    "checkpoint.keep_best=null",
    "train.early_stopping=null",  # both runs go to their ends
)
NO_VALIDATION = "train.eval_every=null"
"""It changes nothing and takes time, but for a schedule that goes by it."""


@dataclass(frozen=True)
class ResumeFinding:
    """How the two runs compare in one respect; an empty text says that they are equal."""

    what: str
    until_restart: str
    after_restart: str


@dataclass(frozen=True)
class Report:
    """All findings."""

    num_steps: int
    """N."""
    findings: list[ResumeFinding]

    @property
    def is_equal(self) -> bool:
        return not any(finding.until_restart or finding.after_restart for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One sentence."""
        n = self.num_steps
        if self.is_equal:
            return f"exact: {2 * n} steps, and {n} + restart + {n}, are equal to the last bit"
        if any(finding.until_restart for finding in self.findings):
            return (
                "not deterministic: the runs differ before anything was restarted; set run.deterministic=true, and "
                "look for what changes between two starts"
            )
        return "not exact: the runs agree until the restart and differ after it"


def verify_resume(
    path: Path,
    overrides: Sequence[str],
    num_steps: int,
    folder: Path,
    *,
    launch: Launch = train_locally,
    between: Callable[[Path], None] | None = None,
) -> Report:
    """Train a config twice, with and without a restart in the middle, and compare.

    Args:
        path: the run's YAML file.
        overrides: settings that replace the file's.
        num_steps: N; 2 N steps are trained.
        folder: takes the two run folders.
        between: called with the interrupted run's folder at the restart; a test plants its differences here.

    Raises:
        UserError: the run is shorter than 2 N steps, or cannot start.
    """
    asked = load_run(path, overrides)
    forced = [*overrides, *FORCED, *([] if asked.schedule.name == "plateau" else [NO_VALIDATION])]
    if asked.run.deterministic is None:
        forced.append("run.deterministic=true")
    forced += [f"checkpoint.every={num_steps}", "monitor.tensorboard=false"]
    forced.append(f"checkpoint.keep_last={num_steps + 1}")  # those of all steps from N on, whatever they are saved for
    whole, halves = (in_folder(load_run(path, forced), folder / name) for name in ("whole", "halves"))
    total = derive_steps(whole)
    if 2 * num_steps > total:
        raise UserError(f"the run has {total} steps, fewer than 2 x {num_steps}; use --steps {max(1, total // 2)}")
    _train(whole, 2 * num_steps, launch)
    _train(halves, num_steps, launch)
    if between is not None:
        between(halves.run.dir)
    _train(halves, 2 * num_steps, launch)
    return compare(whole.run.dir, halves.run.dir, num_steps)


def compare(whole: Path, halves: Path, num_steps: int) -> Report:
    """Compare the run folders of the two runs."""
    ranges = (range(num_steps), range(num_steps, 2 * num_steps))
    ours, theirs = ([json.loads(line) for line in (run / METRICS).read_text().splitlines()] for run in (whole, halves))
    findings = [
        ResumeFinding(key, *(_first_difference(key, ours, theirs, steps) for steps in ranges)) for key in METRIC_KEYS
    ]
    readers = [
        [CheckpointReader(run / CHECKPOINTS / folder_name(step)) for run in (whole, halves)]
        for step in (num_steps, 2 * num_steps)
    ]
    findings += [
        ResumeFinding(kind, *(_tensor_differences(kind, *pair) for pair in readers)) for kind in readers[0][0].kinds()
    ]
    findings += [
        ResumeFinding(field.name, *(_progress_difference(field.name, *pair) for pair in readers))
        for field in fields(Progress)
    ]
    return Report(num_steps, findings)


def _train(config: Config, stop_after: int, launch: Launch) -> None:
    code = launch(config, default_world_size(config), stop_after=stop_after)
    if code not in (EXIT_DONE, EXIT_REQUEUE):
        raise RuntimeError(f"training in {config.run.dir} up to step {stop_after} ended with exit code {code}")


def _first_difference(key: str, whole: list[dict], halves: list[dict], steps: range) -> str:
    for index in steps:
        one, two = (records[index][key] if index < len(records) else None for records in (whole, halves))
        if one != two:
            return f"step {index + 1}: {one!r} and {two!r}"
    return ""


def _tensor_differences(kind: str, whole: CheckpointReader, halves: CheckpointReader) -> str:
    """How many tensors of a kind differ, and which one the most."""
    names = sorted(name for name in whole.manifest.tensors if name.startswith(f"{kind}/"))
    distances: dict[str, float] = {}
    for name in names:
        pairs = zip(whole.slabs(name), halves.slabs(name), strict=True)
        worst = max(0.0 if torch.equal(one, two) else float((one - two).abs().max()) for one, two in pairs)
        if worst != 0.0:
            distances[name] = worst
    if not distances:
        return ""
    worst_name = max(distances, key=distances.__getitem__)
    return f"{len(distances)} of {len(names)} tensors, {worst_name} by {distances[worst_name]:.1e}"


def _progress_difference(key: str, whole: CheckpointReader, halves: CheckpointReader) -> str:
    one, two = (getattr(reader.manifest.progress, key) for reader in (whole, halves))
    return "" if one == two else f"{one!r} and {two!r}"
