"""How much of each source a run reads: from what people say about a mixture to weights, and what comes of it.

    settings --resolve_stages--> stages of plain weights --mix.StagedMixture--> the order of the run
                                                         --plan_mix--> samples, tokens and epochs of each source

A mixture is told by one of

    weights        the share of each source, as it stands
    temperature    p ~ weight x tokens^(1/T): T = 1 follows the sizes, so a weight of 2 then reads a source twice as
                   often as its size asks (upsampling); a large T evens the sources out (Devlin 2018, Arivazhagan et al.
                   2019)
    epochs         how often a source is read in the whole run; the others share what is left by their weights

and stages change it on the way (a curriculum, or the annealing on good data at the end). Nothing said is exactly
`data.train`'s weights, in the order of runs from before there were stages.

The plan is counted from the order itself, not estimated. Reading a source more than about four times brings little over
reading it four times (Muennighoff et al. 2023, "Scaling data-constrained language models"), so the plan warns of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from megalite.data.mix import ROUNDED_BY, MixStage, Mixture, StagedMixture
from megalite.errors import DataError

if TYPE_CHECKING:
    from rich.table import Table

EPOCHS_THAT_PAY = 4.0
"""Passes over the same text up to which they are worth nearly as much as new text."""


@dataclass(frozen=True)
class SourceSize:
    """How much there is of a source."""

    name: str
    num_samples: int
    num_tokens: int


@dataclass(frozen=True)
class StageSettings:
    """A stretch of the run with weights of its own. All but the last stage say where they end, in one of two ways."""

    until_tokens: int | None = None
    """Tokens of the run at which this stage ends, rounded up to a whole sample."""
    share: float | None = None
    """Part of the run that this stage takes, in (0, 1)."""
    weights: Mapping[str, float] | None = None
    """Share of each source, by name; those left out are not read in this stage. None takes those of the run."""


@dataclass(frozen=True)
class MixSettings:
    """What a run says about its mixture, beside the weight of each source."""

    temperature: float | None = None
    """T in p ~ weight x tokens^(1/T); None leaves the sizes out."""
    epochs: Mapping[str, float] = field(default_factory=dict)
    """Passes over a source in the whole run, by name."""
    stages: tuple[StageSettings, ...] = ()
    """The run in parts; empty for one."""
    ranks: Mapping[str, Path] = field(default_factory=dict)
    """Files of `ranking.write_ranks`, by source: its samples come in rising order of their score in each epoch."""
    rank_stretches: int = 100
    """Parts of such an order that are shuffled within themselves."""

    @property
    def is_plain(self) -> bool:
        """Only the weights of the sources decide the shares."""
        return self.temperature is None and not self.epochs and not self.stages


PLAIN = MixSettings()
"""Only the weights of the sources."""


def resolve_stages(
    sources: Sequence[SourceSize],
    weights: Sequence[float],
    settings: MixSettings,
    seq_len: int,
    total_samples: int | None = None,
    read: Mapping[str, int] = MappingProxyType({}),
) -> tuple[MixStage, ...]:
    """Stages of plain weights.

    Args:
        sources: names and sizes.
        weights: of each source, positive.
        settings: what is said about them.
        seq_len: tokens in a sample.
        total_samples: samples of the whole run; only needed for epochs beside weights, and for shares of stages. Where
            it is used, a run made longer has another mixture from there on.
        read: samples of each source that the run has read when these stages begin to count: of passes that are asked
            for they are read already.

    Returns:
        The stages; none when the settings are plain.

    Raises:
        DataError: every setting that is wrong, that contradicts another or that lacks the length of the run.
    """
    if settings.is_plain:
        return ()
    problems = _complaints(sources, settings, total_samples)
    if problems:
        raise DataError("\n".join(problems))
    base = _base_weights(sources, weights, settings, total_samples, read)
    if not settings.stages:
        return (MixStage(None, base),)
    stages, stop = [], 0
    for number, stage in enumerate(settings.stages):
        own = base
        if stage.weights is not None:
            own = tuple(float(stage.weights.get(source.name, 0.0)) for source in sources)
        if number == len(settings.stages) - 1:
            stages.append(MixStage(None, own))
            break
        start = stop
        if stage.until_tokens is not None:
            stop = -(-stage.until_tokens // seq_len)
        else:
            assert stage.share is not None, "it was complained of"
            assert total_samples is not None, "it was complained of"
            stop = start + round(stage.share * total_samples)
        if stop <= start:
            raise DataError(
                f"data.mix.stages.{number}: it ends at sample {stop:,} of the run and begins at {start:,}, so it holds "
                "none; let stages end one after the other"
            )
        stages.append(MixStage(stop, own))
    return tuple(stages)


@dataclass(frozen=True)
class StagePlan:
    """What one stage reads."""

    first_sample: int
    stop_sample: int
    samples: tuple[int, ...]
    """Of each source."""

    @property
    def num_samples(self) -> int:
        """Of all sources."""
        return self.stop_sample - self.first_sample


@dataclass(frozen=True)
class MixPlan:
    """What a run reads of each source."""

    sources: tuple[SourceSize, ...]
    seq_len: int
    stages: tuple[StagePlan, ...]

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples of each source over the run."""
        return tuple(map(sum, zip(*(stage.samples for stage in self.stages), strict=True)))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of each source over the run, padding included: samples x seq_len."""
        return tuple(count * self.seq_len for count in self.samples)

    @property
    def epochs(self) -> tuple[float, ...]:
        """Passes over each source."""
        return tuple(count / source.num_samples for count, source in zip(self.samples, self.sources, strict=True))

    @property
    def warnings(self) -> list[str]:
        """What the owner of the run should think about, in sentences."""
        found = []
        for source, count, epochs in zip(self.sources, self.samples, self.epochs, strict=True):
            if epochs > EPOCHS_THAT_PAY:
                found.append(
                    f"{source.name}: read {epochs:.1f} times; passes beyond {EPOCHS_THAT_PAY:.0f} or so bring little "
                    "(Muennighoff et al. 2023): lower its weight, or give more text of its kind"
                )
            elif count == 0:
                found.append(f"{source.name}: not read at all in this run")
        return found


def plan_mix(
    mixture: Mixture | StagedMixture, sources: Sequence[SourceSize], *, seq_len: int, total_samples: int
) -> MixPlan:
    """Count what a run reads.

    Args:
        mixture: the order of the run, as training uses it.
        sources: names and sizes.
        seq_len: tokens in a sample.
        total_samples: samples of the run.
    """
    stops = [stop for stop in mixture.stops if stop < total_samples] + [total_samples]
    stages, start = [], 0
    before = np.zeros(len(sources), np.int64)
    for stop in stops:
        after = mixture.count(stop)
        stages.append(StagePlan(start, stop, tuple((after - before).tolist())))
        start, before = stop, after
    return MixPlan(tuple(sources), seq_len, tuple(stages))


def plan_rest(
    consumed: Mapping[str, int],
    drawn: Callable[[int], Mapping[str, int]],
    stops: Sequence[int],
    sources: Sequence[SourceSize],
    *,
    seq_len: int,
    total_samples: int,
) -> MixPlan:
    """Count what a run will have read that goes on: the plan's first stage is what it has consumed.

    Args:
        consumed: samples of each source, also of those that it has no longer.
        drawn: samples of each source that come before one of the run.
        stops: samples of the run at which weights change.
        sources: names and sizes.
        seq_len: tokens in a sample.
        total_samples: samples of the run.
    """
    at = sum(consumed.values())
    stages = [StagePlan(0, at, tuple(consumed.get(source.name, 0) for source in sources))]
    borders = [at, *(stop for stop in (*stops, total_samples) if at < stop <= total_samples)]
    for start, stop in pairwise(borders):
        before, after = drawn(start), drawn(stop)
        stages.append(StagePlan(start, stop, tuple(after[source.name] - before[source.name] for source in sources)))
    return MixPlan(tuple(sources), seq_len, tuple(stages))


def render(plan: MixPlan) -> Table:
    """A plan as a table: a row for each source, a column for each stage."""
    from megalite.page.terminal import FittingTable

    total = sum(plan.tokens)
    title = f"{total:,} tokens in {sum(plan.samples):,} sequences of {plan.seq_len}"
    table = FittingTable(title=title, title_justify="left")
    table.add_column("source")
    table.add_column("has tokens", justify="right")
    for number, stage in enumerate(plan.stages, start=1):
        if len(plan.stages) > 1:
            table.add_column(f"stage {number}\nfrom {stage.first_sample * plan.seq_len:,}", justify="right")
    for name in ("reads tokens", "share", "epochs"):
        table.add_column(name, justify="right")
    for row, source in enumerate(plan.sources):
        cells = [f"{100 * stage.samples[row] / stage.num_samples:.2f} %" for stage in plan.stages]
        epochs = f"{plan.epochs[row]:.2f}" + (" !" if plan.epochs[row] > EPOCHS_THAT_PAY else "")
        share = f"{100 * plan.tokens[row] / total:.2f} %"
        own = cells if len(plan.stages) > 1 else []
        table.add_row(source.name, f"{source.num_tokens:,}", *own, f"{plan.tokens[row]:,}", share, epochs)
    for warning in plan.warnings:
        table.caption = f"{table.caption}\n{warning}" if table.caption else warning
    table.caption_justify = "left"
    return table


def _base_weights(
    sources: Sequence[SourceSize],
    weights: Sequence[float],
    settings: MixSettings,
    total_samples: int | None,
    read: Mapping[str, int],
) -> tuple[float, ...]:
    """Weights of the whole run, or of what is left of it, before stages."""
    parts = [float(weight) for weight in weights]
    if settings.temperature is not None:
        largest = max(source.num_tokens for source in sources)  # ratios, so that no power overflows
        parts = [
            part * (source.num_tokens / largest) ** (1 / settings.temperature)
            for part, source in zip(parts, sources, strict=True)
        ]
    if not settings.epochs:
        return tuple(parts)
    asked = [settings.epochs.get(source.name) for source in sources]
    fixed = [0.0 if epochs is None else epochs * size.num_samples for epochs, size in zip(asked, sources, strict=True)]
    left = [max(0.0, number - read.get(size.name, 0)) for number, size in zip(fixed, sources, strict=True)]
    if all(epochs is not None for epochs in asked):
        return tuple(left if any(left) else fixed)
    assert total_samples is not None, "it was complained of"
    total = total_samples - sum(read.values())
    if total > 0:
        fixed = left
    else:  # it ends here, and nothing more is read
        total = total_samples
    free = total - sum(fixed)
    if read and 0 > free >= -_rounding(asked, sources):
        free = 0.0
    if free < 0 or (free == 0 and not read):
        asked_for = f"{sum(fixed):,.0f} samples are asked for" + (" beside those that are read" if read else "")
        raise DataError(
            f"data.mix.epochs: {asked_for} and {'the rest of ' if read else ''}the run has {total:,}, which leaves "
            "nothing for the sources without epochs; ask for fewer, or lengthen the run"
        )
    others = sum(part for part, epochs in zip(parts, asked, strict=True) if epochs is None)
    return tuple(
        free * part / others if epochs is None else own for part, epochs, own in zip(parts, asked, fixed, strict=True)
    )


def _rounding(asked: Sequence[float | None], sources: Sequence[SourceSize]) -> float:
    """Samples by which a run may have read fewer of the passes that are asked for than it was to by then."""
    whole = sum(size.num_samples * epochs for epochs, size in zip(asked, sources, strict=True) if epochs is not None)
    return whole * ROUNDED_BY + len(sources)


def _complaints(sources: Sequence[SourceSize], settings: MixSettings, total_samples: int | None) -> list[str]:
    """Everything that is wrong with the settings by themselves."""
    names = [source.name for source in sources]
    known = ", ".join(names)
    problems = []
    if settings.temperature is not None and not 0 < settings.temperature < math.inf:
        problems.append(
            f"data.mix.temperature: {settings.temperature} found; give a positive number, 1 follows the sizes"
        )
    for name, epochs in settings.epochs.items():
        if name not in names:
            problems.append(f"data.mix.epochs.{name}: no such source; there are {known}")
        elif not 0 < epochs < math.inf:
            problems.append(f"data.mix.epochs.{name}: {epochs} found, a positive number expected")
    if settings.epochs and any(stage.weights is not None for stage in settings.stages):
        problems.append("data.mix.epochs: stages with weights of their own decide how often a source is read; drop one")
    if settings.epochs and len(set(settings.epochs) & set(names)) < len(names) and total_samples is None:
        problems.append("data.mix.epochs: the length of the run is needed to share out the rest; set train.tokens")
    for number, stage in enumerate(settings.stages):
        last = number == len(settings.stages) - 1
        problems += [
            f"data.mix.stages.{number}{text}" for text in _stage_complaints(stage, names, total_samples, last=last)
        ]
    return problems


def _stage_complaints(
    stage: StageSettings, names: Sequence[str], total_samples: int | None, *, last: bool
) -> list[str]:
    ends = (stage.until_tokens is not None) + (stage.share is not None)
    problems = []
    if last and ends:
        problems.append(": the last stage goes on to the end of the run; leave until_tokens and share out")
    elif not last and ends != 1:
        problems.append(f": {'both' if ends else 'none'} of until_tokens and share found; give one of them")
    elif not last and stage.until_tokens is not None and stage.until_tokens < 1:
        problems.append(f".until_tokens: {stage.until_tokens} found, 1 or more expected")
    elif not last and stage.share is not None and not 0 < stage.share < 1:
        problems.append(f".share: {stage.share} found, a part between 0 and 1 expected")
    elif not last and stage.share is not None and total_samples is None:
        problems.append(".share: the length of the run is needed; set train.tokens, or use until_tokens")
    for name, weight in (stage.weights or {}).items():
        if name not in names:
            problems.append(f".weights.{name}: no such source; there are {', '.join(names)}")
        elif not 0 <= weight < math.inf:
            problems.append(f".weights.{name}: {weight} found, 0 or more expected")
    if stage.weights is not None and not any(stage.weights.values()):
        problems.append(".weights: no source has a positive weight")
    return problems
