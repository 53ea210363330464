"""How a stream of tokens is cut into samples of one sequence each: which pieces of which documents a sample holds.

    ConcatLayout   sample i is tokens [i x seq_len, (i + 1) x seq_len) of the stream; its documents are found by
                   bisection, so nothing is stored
    PackedLayout   sample i is the list of pieces that `megalite data pack` chose for it, mapped from disk

Under both, every token is the input of exactly one sample; only the last sample (concat) or the free space that packing
reports is padding.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from megalite.data.index_checks import cut_damage
from megalite.data.indexed import IndexedTokens
from megalite.data.sample import Cut, DocumentPieces, SampleRows
from megalite.errors import DataError
from megalite.stations.manifest import StationManifest

BORDERS_FILE = "sample_borders.npy"
STARTS_FILE = "piece_starts.npy"
LENGTHS_FILE = "piece_lengths.npy"
DOCUMENTS_FILE = "piece_documents.npy"

COLUMNS = {BORDERS_FILE: np.int64, STARTS_FILE: np.int64, LENGTHS_FILE: np.int32, DOCUMENTS_FILE: np.int64}
"""The files of a packed folder, in the order of `Cut`."""


class Layout(Protocol):
    """A cut of a stream into samples."""

    num_samples: int

    def pieces(self, sample: int) -> DocumentPieces:
        """What sample number `sample` is made of; at most seq_len tokens."""
        ...

    def stretch(self, first: int, stop: int) -> Cut:
        """What samples first..stop-1 are made of; the borders begin at 0."""
        ...

    def fill(
        self, tokens: IndexedTokens, samples: np.ndarray, places: np.ndarray, rows: SampleRows, *, document_masks: bool
    ) -> int:
        """Fill row places[n] with sample samples[n], for all n.

        Returns:
            The largest token among them.

        Raises:
            DataError: the pieces do not fit the tokens.
        """
        ...


class ConcatLayout:
    """All documents end to end, cut every seq_len tokens.

    Args:
        tokens: the stream.
        seq_len: tokens in a sample.
    """

    def __init__(self, tokens: IndexedTokens, seq_len: int):
        self._tokens = tokens
        self._seq_len = seq_len
        self.num_samples = -(-tokens.num_tokens // seq_len)

    def pieces(self, sample: int) -> DocumentPieces:
        return DocumentPieces(*self.stretch(sample, sample + 1)[1:])

    def stretch(self, first: int, stop: int) -> Cut:
        begin, end = first * self._seq_len, min(stop * self._seq_len, self._tokens.num_tokens)
        document = self._tokens.document_at(begin)
        inside = self._tokens.document_starts(document, self._tokens.document_at(end - 1) + 1)
        cuts = np.arange(begin, end, self._seq_len)
        starts = np.unique(np.concatenate([cuts, inside[1:]]))
        borders = np.append(np.searchsorted(starts, cuts), starts.size)
        documents = document + np.searchsorted(inside, starts, side="right") - 1
        return Cut(borders, starts, np.diff(np.append(starts, end)), documents)

    def fill(
        self, tokens: IndexedTokens, samples: np.ndarray, places: np.ndarray, rows: SampleRows, *, document_masks: bool
    ) -> int:
        largest = _kernels().fill_concat(tokens.stream, samples, places, rows, document_masks)
        return _refuse_damage(largest, tokens, samples)


class PackedLayout:
    """The cut that a pack station wrote.

    Args:
        folder: the station's folder.
    """

    def __init__(self, folder: Path):
        again = "run `megalite data pack` again"
        self._cut = Cut(*(map_column(folder / name, dtype, again) for name, dtype in COLUMNS.items()))
        self.num_samples = self._cut.borders.size - 1

    def damage(self, tokens: IndexedTokens, manifest: StationManifest, *, everything: bool = True) -> str:
        """What cannot be in the cut; empty when nothing is wrong. See `index_checks.cut_damage`."""
        return cut_damage(
            self._cut,
            seq_len=manifest.settings["seq_len"],
            num_tokens=tokens.num_tokens,
            num_held=manifest.counts.get("tokens_with_repeats", tokens.num_tokens),
            num_documents=tokens.num_documents,
            everything=everything,
        )

    def pieces(self, sample: int) -> DocumentPieces:
        return DocumentPieces(*self.stretch(sample, sample + 1)[1:])

    def stretch(self, first: int, stop: int) -> Cut:
        borders = self._cut.borders[first : stop + 1]
        chosen = slice(borders[0], borders[-1])
        lengths = self._cut.lengths[chosen].astype(np.int64)
        return Cut(borders - borders[0], self._cut.starts[chosen], lengths, self._cut.documents[chosen])

    def fill(
        self, tokens: IndexedTokens, samples: np.ndarray, places: np.ndarray, rows: SampleRows, *, document_masks: bool
    ) -> int:
        largest = _kernels().fill_packed(tokens.stream, self._cut, samples, places, rows, document_masks)
        return _refuse_damage(largest, tokens, samples)


@cache
def _kernels() -> ModuleType:
    """The compiled readers; importing numba takes a second, which opening data should not."""
    from megalite.data import gather

    return gather


def _refuse_damage(largest: int, tokens: IndexedTokens, samples: np.ndarray) -> int:
    """The kernel's answer, or what it means when it found the index damaged."""
    if largest == _kernels().NEGATIVE:
        raise DataError(
            f"{tokens.prefix}: a token of sample {samples.tolist()} is below 0; its .bin file is damaged: copy or make "
            "it again"
        )
    if largest == _kernels().DAMAGED:
        raise DataError(
            f"{tokens.prefix}: damaged index: a piece of sample {samples.tolist()} lies outside its "
            f"{tokens.num_tokens} tokens and {tokens.num_documents} documents, or is longer than a sequence; make the "
            "data again"
        )
    return largest


MAGIC = b"\x93NUMPY\x01\x00"

_HEADER = re.compile(rb"\{'descr': '([^']{2,8})', 'fortran_order': False, 'shape': \((\d{1,19}),\), \} *\n")


def map_column(path: Path, dtype: np.dtype | type, advice: str) -> np.ndarray:
    """The numbers in a .npy file, mapped and not to be written to.

    Args:
        path: the file.
        dtype: of the numbers.
        advice: what to do when it holds something else.

    Raises:
        DataError: it is missing, cannot be read or holds something else.
    """
    dtype = np.dtype(dtype)
    try:
        num_bytes = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(len(MAGIC) + 2)
            header = file.read(int.from_bytes(start[len(MAGIC) :], "little"))
        size, problem = _size(start, header, num_bytes, dtype)
        if problem:
            raise DataError(f"{path}: {problem}; {advice}")
        if size == 0:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, "r", len(start) + len(header), (size,)).view(np.ndarray)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {advice}") from error


def _size(start: bytes, header: bytes, num_bytes: int, dtype: np.dtype) -> tuple[int, str]:
    """How many numbers there are, or what is wrong with the file."""
    found = _HEADER.fullmatch(header)
    if not start.startswith(MAGIC) or found is None:
        return 0, f"damaged: not a .npy file of a row of {dtype}"
    if found[1].decode("latin-1") != dtype.str:
        return 0, f"damaged: {found[1].decode('latin-1')} found, {dtype.str} ({dtype}) expected"
    size = int(found[2])
    expected = len(start) + len(header) + size * dtype.itemsize
    if num_bytes != expected:
        return 0, f"damaged: {num_bytes} bytes found, {expected} expected for {size} numbers"
    return size, ""
