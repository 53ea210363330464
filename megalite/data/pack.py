"""Station 5: fit documents into sequences of seq_len tokens.

    concat     the stream is cut every seq_len tokens: no padding, but documents are cut wherever that falls. The cut
               follows from the document offsets, so the folder holds nothing but its manifest
    best_fit   only documents longer than a sequence are cut; some hundredths of a percent are padding. The folder
               holds the list of pieces of each sequence, 20 bytes a piece

Both drop nothing; best_fit may repeat long documents (`repeats`). No tokens are copied: the folder refers to the
tokenized one, and another seq_len means another folder, not other tokens.

best_fit looks at all documents at once, which takes about 70 bytes of memory for each. With windows it takes that for
one window only: every window fills its own sequences, so each may leave some room at its end, which the report counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.indexed import IndexedTokens
from megalite.data.layout import BORDERS_FILE, DOCUMENTS_FILE, LENGTHS_FILE, STARTS_FILE, ConcatLayout
from megalite.data.pack_report import PackStatistics
from megalite.data.settings import PackConfig, RepeatConfig
from megalite.data.sources import open_tokens
from megalite.errors import DataError
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.station import StationResult, run_station

WALK_DOCUMENTS = 1 << 18
"""Documents, or sequences, counted at a time where nothing else sets a window: some tens of megabytes."""


def pack(
    tokens_path: Path, out: Path, config: PackConfig, *, progress: ProgressReporter | None = None
) -> StationResult:
    """Run the station.

    Args:
        tokens_path: a tokenized folder, or the prefix of a Megatron pair.
        out: folder to make.
        config: sequence length, method, and how many documents are packed together.
        progress: told of the result.

    Raises:
        DataError: the tokens are missing, damaged or empty.
    """
    progress = progress or NoProgress()
    opened = open_tokens(tokens_path, contents=True)
    tokens = opened.tokens
    if tokens.num_tokens == 0:
        raise DataError(f"{tokens_path}: empty: there is no token to pack")

    if opened.is_paired and config.method != "best_fit":
        raise DataError(f"{tokens_path}: pairs of answers, which {config.method} would cut; use method: best_fit")

    def build(folder: Path) -> dict[str, Any]:
        progress.start("pack", tokens.num_tokens / 1e6, "M tokens")
        statistics = PackStatistics(config.seq_len)
        if config.method == "best_fit":
            windowing = _pack_best_fit(tokens, config, statistics, folder, together=2 if opened.is_paired else 1)
        else:
            windowing = {}
            _count_concat(tokens, statistics)
        counts = _counts(tokens, statistics, config)
        if opened.is_paired:
            counts["pairs"] = tokens.num_documents // 2
        counts["report"].update(windowing)
        progress.advance(tokens.num_tokens / 1e6)
        inside = counts.get("cuts_in_learnt", 0)
        progress.finish(
            f"{counts['samples']:,} sequences of {config.seq_len}, {counts['padding_percent']:.3f} % padding, "
            f"{counts['documents_split']:,} of {tokens.num_documents:,} documents cut"
            + (f", {inside:,} times inside an answer or a text that is learnt" if inside else "")
        )
        return counts

    settings = config.model_dump(mode="json", exclude_none=True)  # a field that is null leaves old folders as they are
    if not config.repeats:
        del settings["repeats"]
    return run_station("pack", out, inputs=[(opened.path, opened.fingerprint)], settings=settings, build=build)


class _Column:
    """A one-dimensional .npy file that grows; the bytes are those of np.save."""

    def __init__(self, path: Path, dtype: type):
        self._file = open(path, "wb")  # noqa: SIM115  closed by __exit__
        self._descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
        self._dtype = dtype
        self._size = 0
        self._begin = self._write_header()

    def __enter__(self) -> _Column:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        assert self._write_header() == self._begin  # numpy leaves room for the number to grow
        self._file.close()

    def add(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self._size += values.size

    def _write_header(self) -> int:
        header = {"descr": self._descr, "fortran_order": False, "shape": (self._size,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()


def _pack_best_fit(
    tokens: IndexedTokens, config: PackConfig, statistics: PackStatistics, folder: Path, *, together: int
) -> dict[str, int]:
    """Write the pieces; returns what the report says of the windows.

    Args:
        together: so many documents in a row stay whole and in one sequence.
    """
    from megalite.data.best_fit import assign_pieces, cut_documents, group_pieces  # numba takes a second to import

    seq_len, window_documents, num_windows, num_pieces = config.seq_len, config.window_documents, 0, 0
    with (
        _Column(folder / BORDERS_FILE, np.int64) as all_borders,
        _Column(folder / STARTS_FILE, np.int64) as all_starts,
        _Column(folder / LENGTHS_FILE, np.int32) as all_lengths,
        _Column(folder / DOCUMENTS_FILE, np.int64) as all_documents,
    ):
        all_borders.add(np.zeros(1, np.int64))
        window = -(-(window_documents or tokens.num_documents) // together) * together
        for first, begins in _windows(tokens, window):
            units = np.diff(begins[::together])
            if together > 1:
                _require_whole(units, tokens, seq_len)
            starts, sizes, documents = cut_documents(units, seq_len)
            if config.repeats:
                pieces = repeated(documents, times_of(units, first, config.repeats))
                starts, sizes, documents = starts[pieces], sizes[pieces], documents[pieces]
            sequence_of, num_sequences = assign_pieces(sizes, seq_len)
            order, borders = group_pieces(sequence_of, num_sequences)
            starts, sizes, documents = starts[order] + begins[0], sizes[order], documents[order]
            if together > 1:
                documents = (together * documents[:, None] + np.arange(together)).ravel()
                starts, sizes, borders = begins[documents], np.diff(begins)[documents], together * borders
            statistics.add(sizes, borders)
            all_borders.add(borders[1:] + num_pieces)
            all_starts.add(starts)
            all_lengths.add(sizes)
            all_documents.add(documents + first)
            num_windows, num_pieces = num_windows + 1, num_pieces + sizes.size
    return {} if window_documents is None else {"windows": num_windows, "window_documents": window_documents}


def _require_whole(lengths: np.ndarray, tokens: IndexedTokens, seq_len: int) -> None:
    """Raises DataError: a pair fits into no sequence."""
    if (num_longer := int((lengths > seq_len).sum())) > 0:
        raise DataError(
            f"{tokens.prefix}: {num_longer:,} of its pairs of answers are longer than seq_len={seq_len}, and none is "
            f"cut; tokenize with chat.max_tokens={seq_len}, which leaves them out, or pack to {int(lengths.max())}"
        )


def _count_concat(tokens: IndexedTokens, statistics: PackStatistics) -> None:
    """Add up the sequences of the stream; nothing is written, for where they begin follows from seq_len."""
    layout = ConcatLayout(tokens, statistics.seq_len)
    for first in range(0, layout.num_samples, WALK_DOCUMENTS):
        cut = layout.stretch(first, first + WALK_DOCUMENTS)
        statistics.add(cut.lengths, cut.borders)


def times_of(lengths: np.ndarray, first: int, repeats: Sequence[RepeatConfig]) -> np.ndarray:
    """How often each document comes: int64 [documents], the same whatever the windows.

    Args:
        lengths: tokens of some documents.
        first: the number of the first of them.
        repeats: see `PackConfig`.
    """
    rising = sorted(repeats, key=lambda each: each.from_tokens)
    borders = np.array([each.from_tokens for each in rising], np.int64)
    wanted = np.array([1.0, *(each.times for each in rising)])[np.searchsorted(borders, lengths, side="right")]
    whole = np.floor(wanted)
    # Multiples of the golden ratio, of which any regular choice is evenly spread: no random number has to be kept
    drawn = np.arange(first, first + lengths.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (whole + (drawn / 2.0**64 < wanted - whole)).astype(np.int64)


def repeated(documents: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The pieces, by number and in order, each as often as its document comes."""
    return np.repeat(np.arange(documents.size), times[documents])


def _counts(tokens: IndexedTokens, statistics: PackStatistics, config: PackConfig) -> dict[str, Any]:
    """What the manifest says."""
    seq_len, method = config.seq_len, config.method
    num_split, num_longer, num_filled, num_inside = 0, 0, 0, 0
    for first, begins in _windows(tokens, WALK_DOCUMENTS):
        lengths = np.diff(begins)
        longer = lengths > seq_len
        across = (begins[:-1] // seq_len != (begins[1:] - 1) // seq_len) & (lengths > 0)
        num_split += int((longer if method == "best_fit" else across).sum())
        num_longer += int(longer.sum())
        num_filled += int((lengths > 0).sum())
        if tokens.is_weighted:
            num_inside += _cuts_in_learnt(tokens, begins, config)
        if config.repeats:
            num_filled += int((times_of(lengths, first, config.repeats) - 1)[lengths > 0].sum())
    counts = {"samples": statistics.num_sequences, "documents_split": num_split, "tokens": tokens.num_tokens}
    if method == "best_fit":
        counts["pieces"] = statistics.num_pieces
    if tokens.is_weighted:
        counts["cuts_in_learnt"] = num_inside
    if config.repeats:
        counts["tokens_with_repeats"] = statistics.num_tokens
    return {
        **counts,
        "documents": tokens.num_documents,
        "padding_percent": round(statistics.padding_percent, 4),
        "documents_longer_than_seq_len": num_longer,
        "report": statistics.report(num_filled),
    }


def _cuts_in_learnt(tokens: IndexedTokens, begins: np.ndarray, config: PackConfig) -> int:
    """Borders of sequences with a learnt token on both sides, in one of some documents."""
    seq_len = config.seq_len
    if config.method == "concat":
        cuts = np.setdiff1d(np.arange(-(-int(begins[0]) // seq_len) * seq_len, int(begins[-1]), seq_len), begins)
    else:
        long = np.flatnonzero(np.diff(begins) > seq_len)
        found = [np.arange(begins[each] + seq_len, begins[each + 1], seq_len) for each in long]
        cuts = np.concatenate([np.zeros(0, np.int64), *found])
    weights = tokens.stream.weights
    return int(((weights[cuts - 1] > 0) & (weights[cuts] > 0)).sum())


def _windows(tokens: IndexedTokens, num_documents: int) -> Iterator[tuple[int, np.ndarray]]:
    """First document of each window, and where its documents begin and the last one ends: int64 [documents + 1]."""
    for first in range(0, tokens.num_documents, num_documents):
        stop = min(first + num_documents, tokens.num_documents)
        yield first, tokens.document_starts(first, stop + 1)
