"""What training reads: a mixture of sources as one endless sequence of samples, addressed by a global index.

    global index --mix--> source, epoch, position --layout--> pieces of documents --gather--> arrays

Everything is a pure function of the index, so any rank can read any sample, at any time, after any restart: neither
the number of data-parallel ranks nor the step at which a run began can change what step n learns from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from megalite.config.evaluation import validation_sets
from megalite.config.length import derive_samples
from megalite.config.schema import Config, SourceConfig
from megalite.data.cursor import DataCursor
from megalite.data.mix import InTurn, MixStage, ShuffledMixture, quotas_of_blocks
from megalite.data.mix_plan import (
    PLAIN,
    MixPlan,
    MixSettings,
    SourceSize,
    StageSettings,
    plan_mix,
    plan_rest,
    resolve_stages,
)
from megalite.data.ranking import open_ranks
from megalite.data.sample import NO_DOCUMENT, Sample, SampleRows, empty_rows, first_sample
from megalite.data.sources import TokenizerRecord, TokenSource, open_source
from megalite.data.vocabulary import beyond_vocabulary, check_vocabularies
from megalite.errors import DataError
from megalite.tokenizer.tokenizer import Tokenizer


class SampleId(NamedTuple):
    """Which sample of the data a global index means."""

    source: str
    epoch: int
    position: int
    """Sample number in the source, before shuffling."""


class SampleOrder(Protocol):
    """Places every global index: ShuffledMixture for training, InTurn for validation."""

    def locate(self, index: int) -> tuple[int, int, int]: ...

    def locate_many(self, indices: np.ndarray) -> np.ndarray: ...


class Samples:
    """Samples by global index. Made by `open_samples` and `open_validation_samples`."""

    def __init__(
        self,
        sources: Sequence[TokenSource],
        order: SampleOrder,
        *,
        seq_len: int,
        document_masks: bool,
        fingerprint: str,
        orders: Mapping[str, str] | None = None,
        rest: Callable[[Mapping[str, int]], Sequence[MixStage]] | None = None,
    ):
        self.sources = tuple(sources)
        self.seq_len = seq_len
        self.document_masks = document_masks
        self.fingerprint = fingerprint
        """Hash of the data, of its order and of how it is cut. A run may go on only with an equal one."""
        self.orders = {each.name: (orders or {}).get(each.name, "") for each in sources}
        """What orders each source within an epoch beside the seed, by its name; empty for nothing."""
        self.num_samples_per_epoch = sum(source.layout.num_samples for source in sources)
        """Samples of all sources together."""
        self.first = 0  # the run index at which these samples begin
        self.cursor = DataCursor()
        """What the run has left out; global indices are its run indices."""
        self._order = order
        self._rest = rest
        self._first_document = np.cumsum([0, *(source.tokens.num_documents for source in sources)]).tolist()
        self._vocab_size = self.vocab_size
        self.is_weighted = any(source.is_weighted for source in sources)  # then plain sources' labels are too

    @property
    def tokenizer(self) -> TokenizerRecord | None:
        """The tokenizer of the data, where a source records it."""
        return next((source.tokenizer for source in self.sources if source.tokenizer), None)

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary of the data's tokenizer, where a source records it."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def tokenizer_path(self) -> Path | None:
        """Folder of the data's tokenizer, where a source records it."""
        return None if self.tokenizer is None else self.tokenizer.folder

    def identity(self, global_index: int) -> SampleId:
        """Which sample of the data `global_index` means."""
        source, *place = self._place(global_index)
        return SampleId(self.sources[source].name, *place)

    def beginning_at(self, first: int) -> Samples:
        """The same data, whose first sample is that of a run index."""
        (other := copy.copy(self)).first = first
        return other

    def following(self, cursor: DataCursor) -> Samples:
        """The same data in the order of a run with a cursor of its own."""
        assert isinstance(self._order, ShuffledMixture), "validation data has no mixture"
        other = copy.copy(self)
        shift = [cursor.shift.get(source.name, 0) for source in self.sources]
        rest = self._rest(cursor.read) if self._rest is not None and cursor.read else ()
        other.cursor, other._order = cursor, self._order.moved(shift, rest)
        return other

    def drawn(self, run_index: int) -> dict[str, int]:
        """Samples of each source that come before a run index in the order, those left out included."""
        assert isinstance(self._order, ShuffledMixture), "validation data has no mixture"
        number = max(0, self.cursor.data_index(run_index) - self.cursor.beginning(self.first))
        counts = self._order.mixture.count(number) + self._order.shift
        return dict(zip((source.name for source in self.sources), counts.tolist(), strict=True))

    def count(self, start: int, stop: int) -> dict[str, int]:
        """Samples of each source among global samples start..stop-1."""
        counts = np.bincount(self.identities(start, stop)[:, 0], minlength=len(self.sources))
        return dict(zip((source.name for source in self.sources), counts.tolist(), strict=True))

    def document_ids(self, start: int, stop: int) -> list[int]:
        """The documents in global samples start..stop-1, as `data show` numbers them."""
        ids = np.unique(np.concatenate([self.sample(index).document_ids for index in range(start, stop)]))
        return ids[ids != NO_DOCUMENT].tolist()

    def plan(self, total_samples: int, consumed: Mapping[str, int] | None = None) -> MixPlan:
        """What the first `total_samples` samples of a training mixture hold of each source; of a run that has consumed
        some and goes on with these, what it will have read."""
        assert isinstance(self._order, ShuffledMixture), "validation data has no mixture"
        mixture, sizes = self._order.mixture, _sizes_of(self.sources)
        if not consumed:
            return plan_mix(mixture, sizes, seq_len=self.seq_len, total_samples=total_samples)
        stops = [self.cursor.run_index(stop) for stop in mixture.stops]
        return plan_rest(consumed, self.drawn, stops, sizes, seq_len=self.seq_len, total_samples=total_samples)

    def identities(self, start: int, stop: int) -> np.ndarray:
        """Source number, epoch and position of global samples start..stop-1: int64 [stop - start, 3]."""
        return self.locate(np.arange(start, stop, dtype=np.int64))

    def locate(self, global_indices: np.ndarray) -> np.ndarray:
        """Source number, epoch and position of any global samples, int64 [n]: int64 [n, 3].

        Raises:
            DataError: one was read under an earlier mixture, which the present one knows nothing of.
        """
        indices = self.cursor.data_indices(global_indices)
        if self.cursor.shift and indices.size and int(indices.min()) < self.cursor.shift_from:
            raise DataError(
                f"global sample {int(indices.min())} was read before the mixture changed at {self.cursor.shift_from}; "
                "look at it with the config of that time, and a run.dir without checkpoints"
            )
        return self._order.locate_many(indices - self.cursor.beginning(self.first))

    def sample(self, global_index: int) -> Sample:
        """The arrays of one sample. Document ids are unique over all sources.

        Raises:
            DataError: it holds a token beyond the vocabulary, or its index is damaged.
        """
        place = self._place(global_index)
        return first_sample(self.read(np.array([place], np.int64), document_ids=True), self._first_document[place[0]])

    def _place(self, global_index: int) -> tuple[int, int, int]:
        return tuple(self.locate(np.array([global_index], np.int64))[0].tolist())

    def read(self, places: np.ndarray, *, document_ids: bool = False) -> SampleRows:
        """The arrays of several samples at once, one compiled call for each source among them.

        Args:
            places: int64 [n, 3] from `locate`.
            document_ids: fill these too, counted within each source.

        Raises:
            DataError: one holds a token beyond the vocabulary, or its index is damaged.
        """
        rows = empty_rows(len(places), self.seq_len, document_ids=document_ids, weights=self.is_weighted)
        of_source: dict[int, tuple[list[int], list[int]]] = {}
        for row, (number, _, position) in enumerate(places.tolist()):
            positions, targets = of_source.setdefault(number, ([], []))
            positions.append(position)
            targets.append(row)
        for number, (positions, targets) in of_source.items():
            source = self.sources[number]
            chosen = np.array(positions, np.int64), np.array(targets, np.int64)
            largest = source.layout.fill(source.tokens, *chosen, rows, document_masks=self.document_masks)
            if self._vocab_size is not None and largest >= self._vocab_size:
                raise DataError(beyond_vocabulary(source, largest, self._vocab_size, positions))
            if source.loss_weight != 1.0:
                rows.weights[targets] *= np.float32(source.loss_weight)
        return rows

    def check_unchanged(self) -> None:
        """Look whether the files are as they were when they were opened.

        Raises:
            DataError: one was shortened or lost.
        """
        for source in self.sources:
            source.tokens.check_unchanged()

    def check_vocab_size(self, vocab_size: int) -> None:
        """Refuse data with tokens that a model of `vocab_size` does not know; from here on every sample is checked.

        Raises:
            DataError: a source was made with a larger vocabulary or holds a larger token.
        """
        problems = check_vocabularies(self.sources, vocab_size)
        if problems:
            raise _data_error(problems)
        self._vocab_size = vocab_size

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse data that records another tokenizer than this one.

        Raises:
            DataError: a source was tokenized by another one, or holds tokens beyond its vocabulary.
        """
        problems = [
            f"{source.name}: tokenized with {source.tokenizer.folder}, not with {tokenizer.folder}; set data.tokenizer "
            "to null or tokenize the data again"
            for source in self.sources
            if source.tokenizer and source.tokenizer.fingerprint != tokenizer.fingerprint
        ]
        if problems:
            raise _data_error(problems)
        self.check_vocab_size(tokenizer.vocab_size)


def open_samples(
    sources: Sequence[SourceConfig],
    *,
    seq_len: int,
    seed: int,
    document_masks: bool,
    mix: MixSettings = PLAIN,
    total_samples: int | None = None,
) -> Samples:
    """Open the training mixture: sources by weight, each shuffled anew every epoch.

    Args:
        sources: at least one.
        seq_len: tokens in a sample.
        seed: seed of the shuffles.
        document_masks: packed documents do not see each other.
        mix: what else decides the shares: sizes, epochs, stages.
        total_samples: samples of the whole run, where `mix` needs it.

    Raises:
        DataError: every complaint about every source, or about the mixture.
    """
    opened = _open_all(sources, seq_len, "data.train", document_masks)
    sizes = _sizes_of(opened)
    weights = [config.weight for config in sources]
    rest = partial(resolve_stages, sizes, weights, mix, seq_len, total_samples)
    stages = rest({})
    order = ShuffledMixture(
        sizes=[size.num_samples for size in sizes],
        weights=weights,
        names=[size.name for size in sizes],
        seed=seed,
        stages=stages,
        ranks=(ranks := open_ranks(mix.ranks, {size.name: size.num_samples for size in sizes})),
        num_stretches=mix.rank_stretches,
    )
    turns = [[stage.stop, _turns_of(stage.weights)] for stage in stages] or _turns_of(weights)
    hashes = {sizes[number].name: xxhash.xxh3_128_hexdigest(own.data) for number, own in ranks.items()}
    told = "".join(f"/{name} ranked {found}" for name, found in hashes.items())
    told += f"/{mix.rank_stretches}" if told else ""
    told += f"/{stages}" if mix.epochs else ""  # of passes what is left depends on, not on their ratios alone
    return Samples(
        opened,
        order,
        seq_len=seq_len,
        document_masks=document_masks,
        fingerprint=_fingerprint(opened, f"shuffled/{seed}/{turns}/{document_masks}{told}"),
        orders={name: f"ranked {found}, {mix.rank_stretches} stretches" for name, found in hashes.items()},
        rest=rest if mix.epochs else None,
    )


def open_training_samples(config: Config) -> Samples:
    """Open the training mixture of a config.

    Raises:
        DataError: every complaint about every source, or about the mixture.
    """
    given = config.data.mix
    stages = tuple(StageSettings(stage.until_tokens, stage.share, stage.weights) for stage in given.stages)
    return open_samples(
        config.data.train,
        seq_len=config.batch.seq_len,
        seed=config.run.seed,
        document_masks=config.data.document_masks,
        mix=MixSettings(given.temperature, given.epochs, stages, given.ranks, given.rank_stretches),
        total_samples=derive_samples(config),
    )


def open_validation_samples(sources: Sequence[SourceConfig], *, seq_len: int, document_masks: bool) -> Samples:
    """Open the validation data: every source from its start, in a fixed order; weights do not matter.

    Past the last sample it begins again, as epoch 1: no label counts from there on (`Batch.up_to`).

    Raises:
        DataError: every complaint about every source.
    """
    return _in_turn(_open_all(sources, seq_len, "data.valid", document_masks), seq_len, document_masks)


def open_validation_sets(sources: Sequence[SourceConfig], *, seq_len: int, document_masks: bool) -> dict[str, Samples]:
    """Open every validation set of a config, by name; see `config.evaluation.validation_sets`.

    Raises:
        DataError: every complaint about every source.
    """
    opened = _open_all(sources, seq_len, "data.valid", document_masks) if sources else []
    return {
        name: _in_turn([opened[number] for number in numbers], seq_len, document_masks)
        for name, numbers in validation_sets(sources).items()
    }


def _sizes_of(sources: Sequence[TokenSource]) -> list[SourceSize]:
    return [SourceSize(each.name, each.layout.num_samples, each.tokens.num_tokens) for each in sources]


def _turns_of(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a block, or in a cycle of blocks: they tell orders apart."""
    return quotas_of_blocks(weights).sum(axis=0).tolist()


def _in_turn(opened: Sequence[TokenSource], seq_len: int, document_masks: bool) -> Samples:
    """Sources one behind the other, from their starts."""
    order = InTurn(sizes=[source.layout.num_samples for source in opened])
    fingerprint = _fingerprint(opened, f"in turn/{document_masks}")
    return Samples(opened, order, seq_len=seq_len, document_masks=document_masks, fingerprint=fingerprint)


def _open_all(configs: Sequence[SourceConfig], seq_len: int, key: str, document_masks: bool) -> list[TokenSource]:
    """Open every source, or raise all complaints at once."""
    if not configs:
        raise DataError(f"{key}: no source is given; name a folder made by `megalite data prepare`")
    opened: list[TokenSource] = []
    problems: list[str] = []
    for index, config in enumerate(configs):
        try:
            source = open_source(config, name=config.name or config.path.absolute().name, seq_len=seq_len)
            source.check_labels(document_masks)
            opened.append(source)
        except DataError as error:
            problems.append(f"{key}.{index}: {error}")
    tokenizers = {own.fingerprint: (source, own) for source in opened if (own := source.tokenizer)}
    if len(tokenizers) > 1:
        made_with = ", ".join(f"{source.name} with {own.folder}" for source, own in tokenizers.values())
        problems.append(f"{key}: its sources were tokenized by different tokenizers: {made_with}; tokenize them alike")
    elif tokenizers:
        ((_, tokenizer),) = tokenizers.values()
        problems += check_vocabularies(opened, tokenizer.vocab_size)
    if problems:
        raise _data_error(problems)
    return _with_distinct_names(opened)


def _data_error(problems: Sequence[str]) -> DataError:
    if len(problems) == 1:
        return DataError(problems[0])
    return DataError("\n".join([f"{len(problems)} problems with the data:", *(f"  - {text}" for text in problems)]))


def _with_distinct_names(sources: Sequence[TokenSource]) -> list[TokenSource]:
    """Number the later ones of sources with one name, so that messages and shuffles tell them apart."""
    seen: dict[str, int] = {}
    renamed = []
    for source in sources:
        seen[source.name] = count = seen.get(source.name, 0) + 1
        renamed.append(source if count == 1 else replace(source, name=f"{source.name}-{count}"))
    return renamed


def _fingerprint(sources: Sequence[TokenSource], order: str) -> str:
    text = "/".join([order, *(f"{source.name}:{source.fingerprint}" for source in sources)])
    return xxhash.xxh3_128_hexdigest(text.encode())
