"""The documents of several sources: which files there are, in which order, and how they are cut into shards.

The order is that of the recipe, then of the sorted file names, so equal files give an equal stream anywhere.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megalite.data.documents import Document, Rejected
from megalite.data.manifest import check_input, find_manifest
from megalite.data.python_library import list_python_files
from megalite.data.readers import READERS, Piece, data_suffix
from megalite.data.recipe import DocumentSource
from megalite.data.shards import (
    Shard,
    ShardReading,
    cut_in_shards,
    refuse_unreadable,
    shard_size,
    station_shard,
    text_bytes,
)
from megalite.errors import DataError

PLAIN_TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")

DOCUMENT_STATIONS = (
    "clean",
    "url-dedup",
    "dedup",
    "near-dedup",
    "line-dedup",
    "substring-dedup",
    "decontaminate",
    "perplexity",
    "classifier",
)
"""Stations that leave documents behind."""


NOT_CONTENT = {"path", "description", "license", "url"}
"""Settings of a source that do not change its documents."""


@dataclass(frozen=True)
class _Source:
    config: DocumentSource
    name: str
    root: Path
    pieces: tuple[Piece, ...]
    fingerprint: str
    text_mb: float
    """Million bytes of text; estimated where files are compressed."""
    is_station: bool = False

    def shards(self, size: int) -> list[Shard]:
        if self.is_station:
            return [station_shard(Path(piece.path)) for piece in self.pieces]
        return cut_in_shards(self.pieces, self.name, self.config, self.root, size)


class Corpus:
    """Documents of several sources.

    Args:
        sources: at least one.

    Raises:
        DataError: every source that is missing or has nothing to read.
    """

    def __init__(self, sources: Sequence[DocumentSource]):
        problems: list[str] = []
        self._sources: list[_Source] = []
        for config in sources:
            try:
                self._sources.append(_find_files(config))
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError("\n".join(problems))

    @property
    def inputs(self) -> list[tuple[Path, str]]:
        """Path and fingerprint of each source, for the manifest."""
        return [(source.root, source.fingerprint) for source in self._sources]

    @property
    def text_mb(self) -> float:
        """About how many million bytes of text there are."""
        return sum(source.text_mb for source in self._sources)

    def shards(self) -> list[Shard]:
        """The corpus in parts of about equal size, in order. One shard holds documents of one source."""
        size = shard_size(self.text_mb * 1e6)
        return [shard for source in self._sources for shard in source.shards(size)]

    def read(self) -> Iterator[Document | Rejected]:
        """Yield every record, one by one: for small work and for people.

        Raises:
            DataError: nothing in a source could be read.
        """
        size = shard_size(self.text_mb * 1e6)
        for source in self._sources:
            readings = [ShardReading(shard) for shard in source.shards(size)]
            for reading in readings:
                for batch in reading:
                    yield from batch.records()
            refuse_unreadable([(reading.shard, reading.report()) for reading in readings])

    def documents(self) -> Iterator[Document]:
        """Yield the records that could be read, and leave out the others."""
        return (record for record in self.read() if isinstance(record, Document))


def _find_files(config: DocumentSource) -> _Source:
    if config.kind == "python":
        root, found = list_python_files(config.max_mb)
        return _plain_source(config, root, found)
    root = config.path
    if root.is_file():
        return _plain_source(config, root, [(root, root.name)])
    if not root.is_dir():
        raise DataError(f"{root}: no such file or folder")
    if find_manifest(root) is not None:
        return _station_source(config, root)
    paths = _dataset_files(root) or _matching_files(root, config.include)
    if not paths:
        patterns = ", ".join(config.include or [f"*{suffix}" for suffix in (*READERS, *PLAIN_TEXT_SUFFIXES)])
        raise DataError(f"{root}: no file to read; looked for {patterns}, also with .gz and .zst: set include")
    return _plain_source(config, root, [(path, path.relative_to(root).as_posix()) for path in paths])


def _station_source(config: DocumentSource, root: Path) -> _Source:
    """What a station of documents left behind."""
    manifest = find_manifest(root)
    if manifest.station not in DOCUMENT_STATIONS:
        raise DataError(f"{root}: made by station {manifest.station!r}; documents are needed here")
    check_input(root, manifest.station)
    shards = [output.path for output in manifest.outputs if output.path.startswith("part-")]
    pieces = tuple(Piece(str(root / shard), shard) for shard in shards)
    text_mb = manifest.counts["text_bytes"] / 1e6
    return _Source(config, _name(config, root), root, pieces, manifest.fingerprint, text_mb, is_station=True)


def _plain_source(config: DocumentSource, root: Path, files: Sequence[tuple[Path, str]]) -> _Source:
    """A source of files with their names in ids."""
    text_mb = sum(text_bytes(path) for path, _ in files) / 1e6
    text_mb = min(text_mb, config.max_mb or text_mb)
    pieces = tuple(Piece(str(path.absolute()), id) for path, id in files)
    return _Source(config, _name(config, root), root, pieces, _fingerprint(pieces, config), text_mb)


def _name(config: DocumentSource, root: Path) -> str:
    return config.name or ("python" if config.kind == "python" else root.absolute().name)


def _matching_files(root: Path, include: Sequence[str]) -> list[Path]:
    """Files below `root` that match a pattern or, without patterns, have a known suffix; hidden ones are left out."""
    known = {*READERS, *PLAIN_TEXT_SUFFIXES}
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            wanted = any(fnmatch.fnmatch(name, pattern) for pattern in include)
            if wanted or (not include and not name.startswith(".") and data_suffix(Path(name)) in known):
                found.append(Path(folder, name))
    return sorted(found)


def _dataset_files(root: Path) -> list[Path]:
    """The Arrow files of a folder saved by Hugging Face `datasets`: a Dataset, or all splits of a DatasetDict."""
    if (root / "dataset_dict.json").is_file():
        splits = json.loads((root / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        return [path for split in splits for path in _dataset_files(root / split)]
    if not (root / "state.json").is_file():
        return []
    state = json.loads((root / "state.json").read_text(encoding="utf-8"))
    return [root / file["filename"] for file in state["_data_files"]]


def _fingerprint(pieces: Sequence[Piece], config: DocumentSource) -> str:
    """A hash over names, sizes and times of change: cheap, and different whenever the contents may be."""
    digest = xxhash.xxh3_128(config.model_dump_json(exclude=NOT_CONTENT).encode())
    for piece in pieces:
        stat = os.stat(piece.path)
        digest.update(f"{piece.id}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
