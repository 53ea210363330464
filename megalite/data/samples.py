"""What training reads: a mixture of sources as one endless sequence of samples, addressed by a global index.

    global index --mix--> source, epoch, position --layout--> pieces of documents --sample--> arrays

Everything is a pure function of the index, so any rank can read any sample, at any time, after any restart: neither
the number of data-parallel ranks nor the step at which a run began can change what step n learns from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from megalite.config.schema import SourceConfig
from megalite.data.mix import BLOCK, InTurn, ShuffledMixture, round_to_quotas
from megalite.data.sample import NO_DOCUMENT, Sample, assemble
from megalite.data.sources import TokenizerRecord, TokenSource, largest_token, open_source
from megalite.data.tokenizer import Tokenizer
from megalite.errors import DataError


class Identity(NamedTuple):
    """Which sample of the data a global index means."""

    source: str
    epoch: int
    position: int
    """Sample number in the source, before shuffling."""


class Order(Protocol):
    """Places every global index: ShuffledMixture for training, InTurn for validation."""

    def locate(self, index: int) -> tuple[int, int, int]: ...

    def locate_range(self, start: int, stop: int) -> np.ndarray: ...


class Samples:
    """Samples by global index. Made by `open_samples` and `open_validation_samples`."""

    def __init__(
        self, sources: Sequence[TokenSource], order: Order, *, seq_len: int, document_masks: bool, fingerprint: str
    ):
        self.sources = tuple(sources)
        self.seq_len = seq_len
        self.document_masks = document_masks
        self.fingerprint = fingerprint
        """Hash of the data, of its order and of how it is cut. A run may go on only with an equal one."""
        self.num_samples_per_epoch = sum(source.layout.num_samples for source in sources)
        """Samples of all sources together."""
        self._order = order
        documents = [source.tokens.num_documents for source in sources]
        self._first_document = np.cumsum([0, *documents]).tolist()
        self._vocab_size = self.vocab_size

    @property
    def tokenizer(self) -> TokenizerRecord | None:
        """The tokenizer of the data, where a source records it."""
        return next((source.tokenizer for source in self.sources if source.tokenizer), None)

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary of the data's tokenizer, where a source records it."""
        return self.tokenizer and self.tokenizer.vocab_size

    @property
    def tokenizer_path(self) -> Path | None:
        """Folder of the data's tokenizer, where a source records it."""
        return self.tokenizer and self.tokenizer.folder

    def identity(self, global_index: int) -> Identity:
        """Which sample of the data `global_index` means."""
        source, epoch, position = self._order.locate(global_index)
        return Identity(self.sources[source].name, epoch, position)

    def identities(self, start: int, stop: int) -> np.ndarray:
        """Source number, epoch and position of global samples start..stop-1: int64 [stop - start, 3]."""
        return self._order.locate_range(start, stop)

    def sample(self, global_index: int) -> Sample:
        """The arrays of one sample. Document ids are unique over all sources.

        Raises:
            DataError: it holds a token beyond the vocabulary.
        """
        number, _, position = self._order.locate(global_index)
        source = self.sources[number]
        sample = assemble(
            source.tokens,
            source.layout.pieces(position),
            self.seq_len,
            document_masks=self.document_masks,
            stream_goes_on=source.layout.stream_goes_on,
        )
        largest = max(int(sample.tokens.max()), int(sample.labels.max()))
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise DataError(_beyond_vocabulary(source, largest, self._vocab_size))
        if self._first_document[number]:
            ids = sample.document_ids
            ids[ids != NO_DOCUMENT] += self._first_document[number]
        return sample

    def check_vocab_size(self, vocab_size: int) -> None:
        """Refuse data with tokens that a model of `vocab_size` does not know; from here on every sample is checked.

        Raises:
            DataError: a source was made with a larger vocabulary or holds a larger token.
        """
        problems = _check_vocabularies(self.sources, vocab_size)
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


def open_samples(sources: Sequence[SourceConfig], *, seq_len: int, seed: int, document_masks: bool) -> Samples:
    """Open the training mixture: sources by weight, each shuffled anew every epoch.

    Args:
        sources: at least one.
        seq_len: tokens in a sample.
        seed: seed of the shuffles.
        document_masks: packed documents do not see each other.

    Raises:
        DataError: every complaint about every source.
    """
    opened = _open_all(sources, seq_len, "data.train")
    sizes = [source.layout.num_samples for source in opened]
    weights = [config.weight for config in sources]
    names = [source.name for source in opened]
    order = ShuffledMixture(sizes=sizes, weights=weights, names=names, seed=seed)
    turns = round_to_quotas(weights, BLOCK).tolist()
    fingerprint = _fingerprint(opened, f"shuffled/{seed}/{turns}/{document_masks}")
    return Samples(opened, order, seq_len=seq_len, document_masks=document_masks, fingerprint=fingerprint)


def open_validation_samples(sources: Sequence[SourceConfig], *, seq_len: int, document_masks: bool) -> Samples:
    """Open the validation data: every source from its start, in a fixed order; weights do not matter.

    Past the last sample it begins again, as epoch 1: read `num_samples_per_epoch` samples at most.

    Raises:
        DataError: every complaint about every source.
    """
    opened = _open_all(sources, seq_len, "data.valid")
    order = InTurn(sizes=[source.layout.num_samples for source in opened])
    fingerprint = _fingerprint(opened, f"in turn/{document_masks}")
    return Samples(opened, order, seq_len=seq_len, document_masks=document_masks, fingerprint=fingerprint)


def _open_all(configs: Sequence[SourceConfig], seq_len: int, key: str) -> list[TokenSource]:
    """Open every source, or raise all complaints at once."""
    if not configs:
        raise DataError(f"{key}: no source is given; name a folder made by `megalite data prepare`")
    opened: list[TokenSource] = []
    problems: list[str] = []
    for index, config in enumerate(configs):
        try:
            opened.append(open_source(config, name=config.name or config.path.absolute().name, seq_len=seq_len))
        except DataError as error:
            problems.append(f"{key}.{index}: {error}")
    tokenizers = {source.tokenizer.fingerprint: source for source in opened if source.tokenizer}
    if len(tokenizers) > 1:
        made_with = ", ".join(f"{source.name} with {source.tokenizer.folder}" for source in tokenizers.values())
        problems.append(f"{key}: its sources were tokenized by different tokenizers: {made_with}; tokenize them alike")
    elif tokenizers:
        (source,) = tokenizers.values()
        problems += _check_vocabularies(opened, source.tokenizer.vocab_size)
    if problems:
        raise _data_error(problems)
    return _with_distinct_names(opened)


def _check_vocabularies(sources: Sequence[TokenSource], vocab_size: int) -> list[str]:
    problems = []
    for source in sources:
        made_for = source.tokenizer.vocab_size if source.tokenizer else 0
        largest = largest_token(source.tokens)
        if made_for > vocab_size:
            problems.append(
                f"{source.name}: tokenized with a vocabulary of {made_for}, the model has vocab_size={vocab_size}; "
                "raise model.vocab_size or leave it null"
            )
        elif largest >= vocab_size:
            problems.append(_beyond_vocabulary(source, largest, vocab_size))
    return problems


def _beyond_vocabulary(source: TokenSource, largest: int, vocab_size: int) -> str:
    return (
        f"{source.name} ({source.tokens.prefix}): token id {largest} found, the vocabulary ends at {vocab_size - 1}; "
        "the data was made with another tokenizer"
    )


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
