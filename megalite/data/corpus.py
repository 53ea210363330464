"""The documents of several sources as one stream: which files there are, in which order, and what is in them.

The order is that of the recipe, then of the sorted file names, so equal files give an equal stream anywhere.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import xxhash

from megalite.data.documents import Document, Record, Rejected
from megalite.data.manifest import check_input, find_manifest
from megalite.data.python_library import list_python_files
from megalite.data.readers import READERS, data_suffix, read_file
from megalite.data.recipe import DocumentSource
from megalite.errors import DataError

PLAIN_TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")

SHOWN_CHARS = 200
"""How much of a bad record an error message shows."""


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, and what it is called in ids."""

    path: Path
    id: str


@dataclass(frozen=True)
class _Source:
    config: DocumentSource
    name: str
    root: Path
    files: tuple[SourceFile, ...]
    fingerprint: str
    text_mb: float | None
    is_station: bool = False


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
    def text_mb(self) -> float | None:
        """About how many million bytes of text there are; None where only reading could tell."""
        known = [source.text_mb for source in self._sources]
        return None if None in known else sum(known)

    def read(self) -> Iterator[Record]:
        """Yield every record.

        Raises:
            DataError: nothing in a source could be read.
        """
        for source in self._sources:
            yield from _capped(_checked(_read_source(source), source), source.config.max_mb)

    def documents(self) -> Iterator[Document]:
        """Yield the records that could be read, and leave out the others."""
        return (record for record in self.read() if isinstance(record, Document))


def _read_source(source: _Source) -> Iterator[Record]:
    for file in source.files:
        if source.is_station:
            yield from _read_shard(file.path)
        else:
            yield from read_file(file.path, file.id, source.name, source.config)


def _read_shard(path: Path) -> Iterator[Document]:
    """The documents of one file that a station wrote, row group by row group."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=list(Document._fields))
            yield from map(Document, *(column.to_pylist() for column in table.columns))


def _checked(records: Iterator[Record], source: _Source) -> Iterator[Record]:
    """Pass records on; a source of which nothing can be read is a mistake, not bad luck."""
    first_bad: Rejected | None = None
    any_good = False
    for record in records:
        if isinstance(record, Document):
            any_good = True
        elif first_bad is None:
            first_bad = record
        yield record
    if first_bad is not None and not any_good:
        raise DataError(
            f"{source.root}: no document could be read; the first record, {first_bad.id}, was refused "
            f"({first_bad.reason}): {first_bad.text[:SHOWN_CHARS]!r}; is text_field={source.config.text_field!r} right?"
        )


def _capped(records: Iterator[Record], max_mb: float | None) -> Iterator[Record]:
    if max_mb is None:
        yield from records
        return
    left = max_mb * 1e6
    for record in records:
        left -= len(record.text.encode())
        if left < 0:
            return
        yield record


def _find_files(config: DocumentSource) -> _Source:
    if config.kind == "python":
        root, found = list_python_files(config.max_mb)
        return _plain_source(config, root, tuple(SourceFile(path, id) for path, id in found))
    root = config.path
    if root.is_file():
        return _plain_source(config, root, (SourceFile(root, root.name),))
    if not root.is_dir():
        raise DataError(f"{root}: no such file or folder")
    if find_manifest(root) is not None:
        return _station_source(config, root)
    paths = _dataset_files(root) or _matching_files(root, config.include)
    if not paths:
        patterns = ", ".join(config.include or [f"*{suffix}" for suffix in (*READERS, *PLAIN_TEXT_SUFFIXES)])
        raise DataError(f"{root}: no file to read; looked for {patterns}, also with .gz and .zst: set include")
    return _plain_source(config, root, tuple(SourceFile(path, path.relative_to(root).as_posix()) for path in paths))


def _station_source(config: DocumentSource, root: Path) -> _Source:
    """What a station of documents left behind."""
    manifest = find_manifest(root)
    if manifest.station not in ("clean", "dedup"):
        raise DataError(f"{root}: made by station {manifest.station!r}; documents are needed here")
    check_input(root, manifest.station)
    shards = [output.path for output in manifest.outputs if output.path.startswith("part-")]
    files = tuple(SourceFile(root / shard, shard) for shard in shards)
    text_mb = manifest.counts["text_bytes"] / 1e6
    return _Source(config, _name(config, root), root, files, manifest.fingerprint, text_mb, is_station=True)


def _plain_source(config: DocumentSource, root: Path, files: tuple[SourceFile, ...]) -> _Source:
    text_mb = None
    if all(file.path.suffix not in (".gz", ".zst", ".parquet", ".arrow") for file in files):
        text_mb = sum(file.path.stat().st_size for file in files) / 1e6
        text_mb = min(text_mb, config.max_mb or text_mb)
    return _Source(config, _name(config, root), root, files, _fingerprint(files, config), text_mb)


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


def _fingerprint(files: Sequence[SourceFile], config: DocumentSource) -> str:
    """A hash over names, sizes and times of change: cheap, and different whenever the contents may be."""
    digest = xxhash.xxh3_128(config.model_dump_json(exclude={"path"}).encode())
    for file in files:
        stat = file.path.stat()
        digest.update(f"{file.id}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
