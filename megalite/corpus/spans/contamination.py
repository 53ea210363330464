"""Documents that quote an evaluation set: they share a run of n words with one of its examples.

The examples are few (a million runs of words make a table of 24 MB), so one table is built from the files and every
batch of documents is matched against it, with no exchange between the tasks. Runs of words are compared by a 64-bit
hash: a corpus of 10^12 runs against 10^7 wanted ones gives about one false match by chance.

An example shorter than n words has no run and cannot be found. `ExampleIndex.num_too_short` says how many there are;
a smaller n finds them, along with common phrases.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from megalite.corpus.spans.reading import slices
from megalite.corpus.spans.settings import DecontaminateConfig
from megalite.errors import DataError
from megalite.texts import Texts

SLICE_BYTES = 2_000_000
"""Text matched at once: its runs of words take about four times the memory, and should stay near the processor."""

FORMS: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD")
"""Of accented letters, in which an example is looked for beside its own: `clean` composes documents, others may not."""

SHOWN_CHARS = 100
"""How much of a bad record an error message shows."""

Example = tuple[str, str]
"""Id and text of an example."""


class ExampleIndex(NamedTuple):
    """The runs of words of all examples."""

    ngram: int
    """Words in a run."""
    ids: tuple[str, ...]
    """Id of each example."""
    is_too_short: np.ndarray
    """Which examples have fewer words than a run, bool [examples]."""
    slot_hashes: np.ndarray
    slot_owners: np.ndarray
    filter_bits: np.ndarray

    @property
    def num_too_short(self) -> int:
        """Examples with fewer words than a run."""
        return int(self.is_too_short.sum())


class Overlaps(NamedTuple):
    """What documents share with the examples."""

    num_matching: np.ndarray
    """Runs of words that match, int64 [texts]."""
    num_ngrams: np.ndarray
    """Runs of words, int64 [texts]."""
    first_example: np.ndarray
    """Position of the example that the first match belongs to, int64 [texts]; -1 for none."""
    spans: np.ndarray
    """The matching words, merged, int64 [n, 3]: text, first byte, byte behind the last."""

    @property
    def share(self) -> np.ndarray:
        """Share of the runs of words that match, float64 [texts]; 0 where a text has none."""
        return self.num_matching / np.maximum(self.num_ngrams, 1)

    def contaminated(self, config: DecontaminateConfig) -> np.ndarray:
        """Which texts share enough to act upon, bool [texts]."""
        return (self.num_matching > 0) & (self.share >= config.min_overlap)


def read_examples(path: Path, text_field: str) -> Iterator[Example]:
    """The examples of one file, named by the file and by their id or line.

    Raises:
        DataError: there is no such file, or a record in it cannot be read.
    """
    from megalite.corpus.documents import BatchBuilder
    from megalite.corpus.reading.files import FilePiece
    from megalite.corpus.reading.readers import read_piece
    from megalite.corpus.source import DocumentSource

    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {what}; decontaminate.paths (--against) names the files of the evaluation sets")
    builder = BatchBuilder(path.name)
    piece = FilePiece(str(path), path.name)
    for batch in (*read_piece(piece, DocumentSource(path=path, text_field=text_field), builder), *builder.take()):
        if batch.rejected:
            record = batch.rejected[0]
            raise DataError(
                f"{path}: {record.id}: {record.reason} ({record.text[:SHOWN_CHARS]!r}); every example needs its text "
                f"in the field {text_field!r}: set text_field, or repair the file"
            )
        for id, text in zip(batch.documents.column("id").to_pylist(), batch.texts, strict=True):
            yield id if id.startswith(path.name) else f"{path.name}:{id}", text


def index_files(
    config: DecontaminateConfig, read: Callable[[Path, str], Iterable[Example]] = read_examples
) -> ExampleIndex:
    """Index the evaluation sets that the settings name.

    Args:
        config: settings.
        read: yields the examples of one file, given its path and `text_field`.

    Raises:
        DataError: a file is missing, broken or empty, or no example of it is long enough to be found.
    """
    sizes: list[int] = []

    def examples_of(path: Path) -> Iterator[Example]:
        sizes.append(0)
        for example in read(path, config.text_field):
            sizes[-1] += 1
            yield example

    index = index_examples((example for path in config.paths for example in examples_of(path)), config.ngram)
    borders = np.cumsum(sizes)
    for path, start, stop in zip(config.paths, borders - sizes, borders, strict=True):
        if start == stop:
            raise DataError(f"{path}: empty: no example is in it; name another file, or leave it out")
        if index.is_too_short[start:stop].all():
            raise DataError(
                f"{path}: none of its {stop - start} examples has {config.ngram} words or more, so nothing of it could "
                "be found; set a smaller ngram or the right text_field, or leave it out"
            )
    return index


def index_examples(examples: Iterable[Example], ngram: int) -> ExampleIndex:
    """Index examples by their runs of `ngram` words."""
    from megalite.corpus.spans.word_ngrams import build_table, list_ngrams

    ids: list[str] = []
    texts: list[str] = []
    examples_of: list[int] = []
    for number, (id, text) in enumerate(examples):
        forms = dict.fromkeys([text, *(unicodedata.normalize(form, text) for form in FORMS)])
        ids.append(id)
        texts += forms
        examples_of += [number] * len(forms)
    joined = Texts.of(texts)
    hashes, _, _, borders = list_ngrams(joined.buffer, joined.offsets, ngram)
    owners = np.repeat(np.array(examples_of, np.int32), np.diff(borders))
    is_too_short = np.ones(len(ids), bool)
    is_too_short[owners] = False
    return ExampleIndex(ngram, tuple(ids), is_too_short, *build_table(hashes, owners))


def find_overlaps(texts: Texts, index: ExampleIndex) -> Overlaps:
    """Match texts against the examples."""
    parts = [_match(part, first, index) for first, part in slices(texts, SLICE_BYTES)]
    return Overlaps(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _match(texts: Texts, first: int, index: ExampleIndex) -> Overlaps:
    """Match a slice that begins with text number `first`."""
    from megalite.corpus.spans.cutting import merge_spans
    from megalite.corpus.spans.word_ngrams import list_ngrams, look_up

    hashes, starts, ends, borders = list_ngrams(texts.buffer, texts.offsets, index.ngram)
    owners = look_up(hashes, index.slot_hashes, index.slot_owners, index.filter_bits)
    matches = np.flatnonzero(owners >= 0)
    documents = np.searchsorted(borders, matches, side="right") - 1
    num_matching = np.bincount(documents, minlength=len(texts))
    first_example = np.full(len(texts), -1, np.int64)
    first_example[documents[::-1]] = owners[matches[::-1]]  # written last: the first match of a document
    spans = merge_spans(np.stack([documents + first, starts[matches], ends[matches]], axis=1))
    return Overlaps(num_matching, np.diff(borders), first_example, spans)
