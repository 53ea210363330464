"""A ladder from its first check to its law: runs of some sizes and lengths, trained as a sweep is, then read.

    config, widths, tokens a parameter -> runs (megalite/sweeps) -> losses -> law -> target, best shape for a budget

The folder is a sweep's: killed at any moment it goes on when the same command is given again. A target is a sweep of
one run in a folder beside the others, so that the law never sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.errors import ConfigError, UserError
from megalite.ladder.law import Interval, Law, fit_law, require_enough
from megalite.ladder.rule import Size, SizeFamily
from megalite.sweeps.record import SweepBook, TrialRecord
from megalite.sweeps.settings import SweepConfig

RUN, MODEL_WIDTH, STEPS = "run", "model.hidden_size", "train.steps"
METRIC = "validation"


@dataclass(frozen=True)
class Plan:
    """What a ladder is to train."""

    family: SizeFamily
    path: Path
    """Of the config."""
    overrides: tuple[str, ...]
    folder: Path
    widths: tuple[int, ...]
    ratios: tuple[float, ...]
    """Tokens a parameter."""

    @property
    def num_runs(self) -> int:
        """The target left out; the folder may hold more, of an earlier call with more sizes."""
        return len(self.widths) * len(self.ratios)

    def sweep(self) -> SweepConfig:
        """Every size at every length."""
        return self._sweep(self.folder, [(width, ratio) for width in self.widths for ratio in self.ratios])

    def target(self, width: int, ratio: float) -> SweepConfig:
        """The run that the law is to foretell."""
        return self._sweep(self.folder / f"target-{width}-{ratio:g}", [(width, ratio)])

    def _sweep(self, folder: Path, wanted: Sequence[tuple[int, float]]) -> SweepConfig:
        points = [self.family.run(self.family.size(width), ratio) for width, ratio in wanted]
        return SweepConfig(config=self.path, overrides=self.overrides, dir=folder, metric=METRIC, space={RUN: points})

    def problems(self) -> Iterator[str]:
        """What is wrong with lengths, and with the runs together: a law that they could not give."""
        sizes = [(self.family.size(width), ratio) for width in self.widths for ratio in self.ratios]
        steps_of_all = [self.family.run(size, ratio)[STEPS] for size, ratio in sizes]
        try:
            require_enough([size.num_parameters for size, _ in sizes], steps_of_all)
        except UserError as error:
            yield f"--widths and --ratios: {error}"
        for width in self.widths:
            steps = [self.family.run(self.family.size(width), ratio)[STEPS] for ratio in self.ratios]
            if len(set(steps)) < len(steps):
                yield (
                    f"--ratios: two of them are {min(steps)} steps at width {width}; take them further apart, or a "
                    "smaller batch"
                )


@dataclass(frozen=True)
class RungRun:
    """A run of a ladder that has ended well."""

    size: Size
    num_tokens: int
    """D."""
    loss: float
    flops: float
    """Of all its steps."""
    seconds: float


@dataclass(frozen=True)
class Foretold:
    """A target: what the law says of it, and what came."""

    size: Size
    num_tokens: int
    loss: Interval
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """Of what was foretold, relative."""
        return None if self.measured is None else self.loss.value / self.measured - 1.0


def runs_of(family: SizeFamily, records: Sequence[TrialRecord]) -> list[RungRun]:
    """Those of a ladder's runs that have a loss."""
    found = []
    for record in records:
        if record.state != "done" or record.value is None:
            continue
        size = family.size(record.point[RUN][MODEL_WIDTH])
        tokens = record.point[RUN][STEPS] * family.tokens_per_step
        found.append(RungRun(size, tokens, record.value, tokens * size.flops_per_token, record.seconds))
    return found


def law_of(runs: Sequence[RungRun]) -> Law:
    """Fitted to the runs.

    Raises:
        UserError: they are too few, or too much alike.
    """
    return fit_law(
        [each.size.num_parameters for each in runs], [each.num_tokens for each in runs], [each.loss for each in runs]
    )


def foretell(family: SizeFamily, law: Law, width: int, ratio: float) -> Foretold:
    """What the law says of a run."""
    size = family.size(width)
    tokens = family.steps(ratio * size.num_parameters) * family.tokens_per_step
    return Foretold(size, tokens, law.interval(size.num_parameters, tokens))


def compare(foretold: Foretold, book: SweepBook) -> Foretold:
    """With the loss of the run, where it has one."""
    (record,) = book.trials.values()
    return replace(foretold, measured=record.value if record.state == "done" else None)


def read_target(text: str, family: SizeFamily, option: str) -> tuple[int, float]:
    """`WIDTH:RATIO` of the command line.

    Raises:
        UserError: it is none, or the rule cannot make such a width.
    """
    width, _, ratio = text.partition(":")
    try:
        found = int(width), float(ratio)
    except ValueError:
        raise UserError(f"{option}: found {text!r}, expected WIDTH:TOKENS-A-PARAMETER, as in 256:20") from None
    if not 0.0 < found[1] < 1e6:
        raise UserError(f"{option}: found {found[1]:g} tokens a parameter, expected more than 0 and less than 1e6")
    problems = [each.replace("--widths", option) for each in family.problems([found[0]])]
    if problems:
        raise ConfigError(problems)
    return found


def to_json(runs: Sequence[RungRun], law: Law | None, targets: Sequence[Foretold], best: Any) -> dict[str, Any]:
    """Everything, JSON-ready."""
    return {
        "runs": [
            {
                "width": each.size.width,
                "layers": each.size.layers,
                "parameters": each.size.num_parameters,
                "tokens": each.num_tokens,
                "flops": each.flops,
                "loss": each.loss,
                "law": None if law is None else law.loss(each.size.num_parameters, each.num_tokens),
            }
            for each in runs
        ],
        "law": None if law is None else {name: vars(each) for name, each in law.numbers().items()},
        "doubts": [] if law is None else law.doubts(),
        "targets": [
            {
                "width": each.size.width,
                "parameters": each.size.num_parameters,
                "tokens": each.num_tokens,
                "predicted": vars(each.loss),
                "measured": each.measured,
                "error": each.error,
            }
            for each in targets
        ],
        "best": None if best is None else best.to_dict(),
    }
