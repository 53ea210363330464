"""Shards: parts of a corpus of about equal size, each of which one task reads.

The cut depends on the files alone, not on who will work: many small files make one shard, a large file of JSON lines or
Parquet makes several. A shard is JSON-ready, so it travels in a task (`tasks.py`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import pyarrow.compute as pc

from megalite.corpus.documents import REJECTED_FOLDER, BatchBuilder, DocumentBatch, Rejected, as_utf8
from megalite.corpus.reading.columns import open_parquet
from megalite.corpus.reading.files import READ_ERRORS, FilePiece, data_suffix, is_compressed, is_machine_fault
from megalite.corpus.reading.readers import is_json_array, read_piece, read_station_shard
from megalite.corpus.reading.remote import open_remote
from megalite.corpus.source import DocumentSource, is_url
from megalite.errors import DataError

SMALLEST_SHARD = 4_000_000
LARGEST_SHARD = 256_000_000
"""Bytes of text in a shard: small enough that a lost one is soon redone, large enough that a file is worth its name."""

SHARDS_OF_A_CORPUS = 64
"""How many shards a corpus between these sizes has: enough to keep many workers evenly busy."""

COMPRESSION = 4
"""About how many times as large a compressed text is when unpacked."""

SCAN_BYTES = 1 << 24

SHOWN_CHARS = 200
"""How much of a bad record an error message shows."""

Shard = dict[str, Any]
"""JSON-ready: what to read, and how."""


def shard_size(text_bytes: float) -> int:
    """Bytes of text that one shard of a corpus should hold."""
    return int(min(max(text_bytes / SHARDS_OF_A_CORPUS, SMALLEST_SHARD), LARGEST_SHARD))


def text_bytes(path: str, num_bytes: int) -> int:
    """About how many bytes of text a file of `num_bytes` holds."""
    return num_bytes * COMPRESSION if is_compressed(path) or data_suffix(path) == ".parquet" else num_bytes


def cut_in_shards(
    pieces: Sequence[FilePiece], source: str, config: DocumentSource, root: str | Path, size: int
) -> list[Shard]:
    """Group the files of one source into shards of about `size` bytes of text, in their order.

    Args:
        pieces: the files.
        source: name of the source.
        config: its settings.
        root: where it lies, for messages.
        size: from `shard_size`.
    """
    common = {"source": source, "root": str(root), "config": config.model_dump(mode="json")}
    if config.max_mb is not None and config.kind != "python":
        return [_shard(pieces, common)]  # the cap counts documents in order, so one task reads them
    if config.kind == "datasets" or config.is_brought:
        return [_shard([piece], common) for piece in pieces]
    shards: list[Shard] = []
    group: list[FilePiece] = []
    held = 0
    for piece in pieces:
        for part in _cut_file(piece, size):
            group.append(part)
            held += size if part.stop is not None else text_bytes(part.path, part.num_bytes)
            if held >= size:
                shards.append(_shard(group, common))
                group, held = [], 0
    if group:
        shards.append(_shard(group, common))
    return shards


def station_shard(path: Path) -> Shard:
    """One file that a station wrote."""
    return {"station": str(path)}


class ShardReading:
    """The documents of a shard, batch by batch, and an account of how many records could be read.

    Args:
        shard: what to read.

    Raises:
        DataError: while iterating: a table without the column that is to hold the text.
    """

    def __init__(self, shard: Shard):
        self.shard = shard
        self._num_readable = 0
        self._num_unreadable = 0
        self._first_unreadable: Rejected | None = None
        self._lost: Counter[str] = Counter()
        self._fields: dict[str, bool] = dict.fromkeys(shard.get("config", {}).get("keep_fields", ()), False)
        """Those to be kept, and whether a document has had them."""

    def __iter__(self) -> Iterator[DocumentBatch]:
        for batch in _read(self.shard):
            self._num_readable += len(batch.documents)
            self._num_unreadable += len(batch.rejected)
            self._lost.update(batch.lost)
            if batch.rejected and self._first_unreadable is None:
                self._first_unreadable = batch.rejected[0]
            for name in [name for name, is_seen in self._fields.items() if not is_seen]:
                self._fields[name] = _has_field(batch, name)
            yield batch

    def report(self) -> dict[str, Any]:
        """JSON-ready account, for `refuse_unreadable`."""
        first = self._first_unreadable
        return {
            "readable": self._num_readable,
            "unreadable": self._num_unreadable,
            "first_unreadable": first and [first.id, first.reason, first.text[:SHOWN_CHARS]],
            "lost": dict(self._lost),
            **({"fields": self._fields} if self._fields else {}),
        }


def refuse_unreadable(read: Sequence[tuple[Shard, dict[str, Any]]]) -> None:
    """A source of which nothing can be read is a mistake, not bad luck; so is one without any document.

    Args:
        read: shards with the reports of their `ShardReading`.

    Raises:
        DataError: naming the first such source and its first record, if it has one.
    """
    by_source: dict[str, list[tuple[Shard, dict[str, Any]]]] = {}
    for shard, report in read:
        by_source.setdefault(shard.get("root", ""), []).append((shard, report))
    for root, reports in by_source.items():
        if any(report["readable"] for _, report in reports):
            continue
        unreadable = [(shard, report) for shard, report in reports if report["unreadable"]]
        if not unreadable and root:
            raise DataError(f"{root}: empty: no document is in it; name files with text, or leave this source out")
        if unreadable:
            shard, report = unreadable[0]
            id, reason, text = report["first_unreadable"]
            raise DataError(
                f"{root}: no document could be read; the first record, {id}, was refused ({reason}): {text!r}; "
                f"is text_field={shard['config']['text_field']!r} right?"
            )


def lost_counts(
    reports: Sequence[dict[str, Any]], passed_over: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Any]:
    """For the counts of a station: what was lost of its sources, and passed over in them, and how many documents are
    without a field to be kept that none has; nothing where nothing was.

    Args:
        reports: of its tasks, each with that of its `ShardReading` under `reading`.
        passed_over: files of kinds that are not read, by suffix.
    """
    lost: Counter[str] = Counter()
    without: Counter[str] = Counter()
    seen: set[str] = set()
    for reading in (report["reading"] for report in reports):
        lost.update(reading.get("lost", {}))
        for name, is_seen in reading.get("fields", {}).items():
            without[name] += reading["readable"]
            seen |= {name} if is_seen else set()
    absent = {name: number for name, number in without.items() if number and name not in seen}
    found = {"lost": +lost, "passed_over": passed_over, "absent_fields": absent}
    return {name: dict(sorted(counts.items())) for name, counts in found.items() if counts}


def lost_in_words(counts: dict[str, Any]) -> str:
    """What was lost or passed over, for the line that sums a station up; empty where nothing was."""
    lost = [f"{count:,} {name.replace('_', ' ')}" for name, count in counts.get("lost", {}).items() if count]
    others = [f"{count:,} with {suffix}" for suffix, count in counts.get("passed_over", {}).items()]
    words = f"; lost: {', '.join(lost)} (see {REJECTED_FOLDER}/)" if lost else ""
    words += f"; files of kinds that are not read: {', '.join(others)}" if others else ""
    absent = [f"{name!r} (of {number:,})" for name, number in counts.get("absent_fields", {}).items()]
    return words + (f"; no document has the field to be kept {', '.join(absent)}: is it spelled so?" if absent else "")


def _has_field(batch: DocumentBatch, name: str) -> bool:
    """Whether the metadata of a document name a field, at any depth."""
    quoted = json.dumps(as_utf8(name), ensure_ascii=False)
    found = pc.match_substring(batch.documents.column("metadata"), f"{quoted}: ")
    return bool(pc.any(found).as_py())


def _read(shard: Shard) -> Iterator[DocumentBatch]:
    if "station" in shard:
        yield from read_station_shard(Path(shard["station"]))
        return
    config = DocumentSource.model_validate(shard["config"])
    batches = _read_pieces(shard, config)
    yield from batches if config.max_mb is None else _capped(batches, config.max_mb * 1e6)


def _read_pieces(shard: Shard, config: DocumentSource) -> Iterator[DocumentBatch]:
    builder = BatchBuilder(shard["source"])
    for piece in shard["pieces"]:
        yield from read_piece(FilePiece(**piece), config, builder)
    yield from builder.take()


def _shard(pieces: Sequence[FilePiece], common: dict[str, Any]) -> Shard:
    return {**common, "pieces": [asdict(piece) for piece in pieces]}


def _capped(batches: Iterator[DocumentBatch], max_bytes: float) -> Iterator[DocumentBatch]:
    """Whole documents up to a number of bytes of text."""
    left = max_bytes
    for batch in batches:
        fitting = int(np.searchsorted(np.cumsum(batch.texts.lengths), left, side="right"))
        left -= batch.texts.num_bytes
        yield DocumentBatch(batch.documents.slice(0, fitting), batch.rejected, batch.lost)
        if fitting < len(batch.texts):
            return


def _cut_file(piece: FilePiece, size: int) -> Iterator[FilePiece]:
    """The parts of a file that is much larger than a shard, or the file."""
    suffix = data_suffix(piece.path)
    if (
        is_compressed(piece.path)
        or text_bytes(piece.path, piece.num_bytes) < 2 * size
        or (suffix == ".json" and _is_array(piece.path))
    ):
        yield piece
    elif suffix == ".parquet":
        yield from _cut_parquet(piece, size)
    elif suffix in (".jsonl", ".ndjson", ".json"):
        yield from (_cut_remote_lines if is_url(piece.path) else _cut_lines)(piece, size)
    else:
        yield piece


def _is_array(path: str) -> bool:
    """Whether a file of JSON is one array, which has no lines of its own."""
    file = _opened(path)
    if file is None:
        return False
    with file:
        return is_json_array(file.read(1024))


def _opened(path: str) -> BinaryIO | None:
    """A file; None of one that cannot be opened, of which the reader says what is wrong with it."""
    try:
        return open_remote(path) if is_url(path) else open(path, "rb")
    except OSError as error:
        if is_machine_fault(error):
            raise
        return None


def _cut_parquet(piece: FilePiece, size: int) -> Iterator[FilePiece]:
    try:
        with open_parquet(piece.path) as file:
            metadata = file.metadata
    except READ_ERRORS as error:
        if is_machine_fault(error):
            raise
        yield piece  # the reader says what is wrong with it
        return
    start, row, held = 0, 1, 0
    first = row
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        row += metadata.row_group(group).num_rows
        if held >= size or group == metadata.num_row_groups - 1:
            yield FilePiece(piece.path, piece.id, start, group + 1, first)
            start, first, held = group + 1, row, 0


def _cut_lines(piece: FilePiece, size: int) -> Iterator[FilePiece]:
    """Parts that begin after a line end, with the number of their first line: the file is looked through once."""
    start, first, line = 0, 1, 1
    position = 0
    file = _opened(piece.path)
    if file is None:
        yield piece
        return
    with file:
        while chunk := file.read(SCAN_BYTES):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            begins = position + ends + 1
            while (after := int(np.searchsorted(begins, start + size))) < begins.size:
                stop = int(begins[after])
                yield FilePiece(piece.path, piece.id, start, stop, first)
                start, first = stop, line + after + 1
            line += ends.size
            position += len(chunk)
    if start < position:
        yield FilePiece(piece.path, piece.id, start, position, first)


def _cut_remote_lines(piece: FilePiece, size: int) -> Iterator[FilePiece]:
    """Parts that begin after a line end, found by looking only around the cuts.

    Nobody has counted the lines before a part, so its ids say at which byte it begins: `a.jsonl@256000117:1`.
    """
    with open_remote(piece.path) as file:
        start, id = 0, piece.id
        while file.seekable() and start + size < piece.num_bytes:
            file.seek(start + size)
            stop = start + size + len(file.readline())
            yield replace(piece, id=id, start=start, stop=stop)
            start, id = stop, f"{piece.id}@{stop}"
    if start < piece.num_bytes:
        yield replace(piece, id=id, start=start, stop=piece.num_bytes if start else None)
