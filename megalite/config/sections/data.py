"""The section `data`: what the model reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt

from megalite.section import Problem, Section


class SourceConfig(Section):
    """One set of tokenized documents."""

    path: Path
    """A folder made by `megalite data pack` or `megalite data tokenize`, or the prefix of a Megatron `.bin/.idx`
    pair. What is not packed is concatenated and cut on the fly."""
    weight: PositiveFloat = 1.0
    """Share of the samples that come from here, relative to the other sources."""
    loss_weight: float = Field(1.0, gt=0.0, le=1000.0)
    """Times the weight of each label of its samples in the loss, which is the mean by weights: how much a token of this
    source counts beside one of another, whatever its share. Only of training sources."""
    name: str | None = None
    """Name in metrics and messages; null takes the last part of the path."""


class MixStageConfig(Section):
    """A stretch of the run with weights of its own. All stages but the last say where they end, in one of two ways."""

    until_tokens: PositiveInt | None = None
    """Tokens of the run at which this stage ends."""
    share: float | None = Field(None, gt=0.0, lt=1.0)
    """Part of the run that this stage takes."""
    weights: dict[str, float] | None = None
    """Share of each source, by name; those left out are not read in this stage. Null takes those of `data.train`."""


class MixConfig(Section):
    """What decides the sources' shares, beside their weights. `megalite data mix-plan CONFIG` shows the outcome."""

    temperature: PositiveFloat | None = None
    """T in p ~ weight x tokens^(1/T): 1 follows the sizes, more evens them out; null takes the weights as shares."""
    epochs: dict[str, PositiveFloat] = {}  # noqa: RUF012  (pydantic copies it)
    """Passes over a source in the whole run, by name; the others share what is left by their weights."""
    stages: tuple[MixStageConfig, ...] = ()
    """The run in parts (a curriculum, or annealing on good data at the end); empty for one."""
    ranks: dict[str, Path] = {}  # noqa: RUF012
    """Files made by `megalite data rank`, by source: its samples come in rising order of their score in each epoch."""
    rank_stretches: PositiveInt = 100
    """Parts of such an order that are shuffled within themselves."""


class DataConfig(Section):
    """What the model reads."""

    train: tuple[SourceConfig, ...] = ()
    """Sources of the training mixture."""
    valid: tuple[SourceConfig, ...] = ()
    """Validation sets, read from their start in a fixed order; weights are ignored. Each source is a set of its own,
    those that are given one name are a set together."""
    mix: MixConfig = MixConfig()
    """What decides the shares of the sources beside their weights: sizes, epochs, stages."""
    tokenizer: Path | None = None
    """Folder made by `megalite data train-tokenizer`: sets the vocabulary and travels into the export. Null takes the
    one recorded by the data."""
    document_masks: bool = True
    """Packed documents do not see each other, positions restart in each, and no label crosses a border."""
    verify: bool = False
    """Read all of the data before the first step of every start and compare it with its checksums, the ranks sharing
    the files. Sizes, indices and some places of each file are always looked at. Set it where a disk is not to be
    trusted; it costs the time that reading everything takes (`megalite data verify CONFIG` does it beforehand)."""
    prefetch: PositiveInt = 4
    """Micro-batches that the loader's thread reads ahead, at least; small ones are read together."""

    def problems(self) -> Iterator[Problem]:
        for number, source in enumerate(self.valid):
            if source.loss_weight != 1.0:
                why = "which a validation set does not read: its loss is the mean of its own labels; leave it out"
                yield ("valid", str(number), "loss_weight"), f"found {source.loss_weight:g}, {why}"
