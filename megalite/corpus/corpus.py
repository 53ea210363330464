"""The documents of several sources: which files there are, in which order, and how they are cut into shards.

The order is that of the recipe, then of the sorted file names, so equal files give an equal stream anywhere.
"""

from __future__ import annotations

import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import xxhash

from megalite.corpus.conversations import EDITION
from megalite.corpus.documents import Document, Rejected
from megalite.corpus.reading.brought import brought_fingerprint, brought_pieces
from megalite.corpus.reading.decompression import DECODERS
from megalite.corpus.reading.files import FilePiece
from megalite.corpus.reading.folders import (
    KNOWN_SUFFIXES,
    UNFINISHED,
    is_manifest,
    is_wanted,
    list_files,
    note_unknown,
    refuse_work,
)
from megalite.corpus.reading.hub import local_files, located, num_parts, plan_dataset
from megalite.corpus.reading.python_library import list_python_files
from megalite.corpus.reading.remote import FoundFile, list_remote, open_remote, spelt_out
from megalite.corpus.shards import (
    Shard,
    ShardReading,
    cut_in_shards,
    refuse_unreadable,
    shard_size,
    station_shard,
    text_bytes,
)
from megalite.corpus.source import DATASET_SETTINGS, LATER, UNREAD_IN_STATIONS, DocumentSource
from megalite.errors import DataError
from megalite.stations.facts import DOCUMENT_STATIONS
from megalite.stations.manifest import FILE_NAME, StationManifest, check_input, find_manifest

NOT_CONTENT = {"path", "description", "license", "url"}
"""Settings of a source that do not change its documents."""


@dataclass(frozen=True)
class _OpenSource:
    config: DocumentSource
    name: str
    root: Path | str
    pieces: tuple[FilePiece, ...]
    fingerprint: str
    text_mb: float
    """Million bytes of text; estimated where files are compressed."""
    is_station: bool = False
    passed_over: Counter[str] = field(default_factory=Counter)
    """Files of kinds that are not read, by suffix."""

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
        self._sources: list[_OpenSource] = []
        for config in sources:
            try:
                self._sources.append(_find_source(config))
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError("\n".join(problems))

    @property
    def inputs(self) -> list[tuple[Path | str, str]]:
        """Path or URL of each source with its fingerprint, for the manifest."""
        return [(source.root, source.fingerprint) for source in self._sources]

    @property
    def text_mb(self) -> float:
        """About how many million bytes of text there are."""
        return sum(source.text_mb for source in self._sources)

    @property
    def passed_over(self) -> Counter[str]:
        """Files in its folders of kinds that are not read, by suffix."""
        return sum((source.passed_over for source in self._sources), Counter())

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


def _find_source(config: DocumentSource) -> _OpenSource:
    if config.kind == "datasets":
        return _dataset_source(config)
    if config.is_brought:
        pieces = brought_pieces(config)
        return _OpenSource(config, config.label, config.root, pieces, brought_fingerprint(config), config.max_mb or 0.0)
    if config.kind == "python":
        library, found = list_python_files(config.max_mb)
        return _plain_source(config, library, [_local_file(path, id) for path, id in found])
    root = config.path
    assert root is not None, config.kind
    if isinstance(root, str):
        return _plain_source(config, root, *_remote_files(config, root))
    if not root.exists():
        raise DataError(f"{root}: no such file or folder")
    if not root.is_dir():
        return _plain_source(config, root, [_local_file(root, root.name)])
    if (manifest := find_manifest(root)) is not None:
        return _station_source(config, root, manifest)
    passed_over = Counter[str]()
    paths = list_files(root, config.include, passed_over)
    if not paths:
        raise _nothing_to_read(config)
    files = [_local_file(path, path.relative_to(root).as_posix()) for path in paths]
    return _plain_source(config, root, files, passed_over)


def _remote_files(config: DocumentSource, url: str) -> tuple[list[FoundFile], Counter[str]]:
    """The files of a URL that are wanted, as a single file always is, and how many are of kinds that are not read."""
    files, passed_over = list_remote(url), Counter[str]()
    if [file.path for file in files] == [url]:
        return files, passed_over
    if any(file.id == FILE_NAME for file in files):
        raise DataError(f"{url}: the folder of a station, which is read from this machine's disks: copy it here first")
    refuse_work(url, [file.path for file in files if _is_remote_work(file)])
    note_unknown((PurePosixPath(file.id).name for file in files), config.include, passed_over)
    files = [file for file in files if is_wanted(PurePosixPath(file.id).name, config.include)]
    if not files:
        raise _nothing_to_read(config)
    return files, passed_over


def _is_remote_work(file: FoundFile) -> bool:
    """Whether a file behind a URL was written by a station that is done, or is not."""
    path = PurePosixPath(file.id)
    if path.name != FILE_NAME:
        return any(part.endswith(UNFINISHED) for part in path.parts[:-1])
    with open_remote(file.path) as content:
        return is_manifest(content.read())


def _local_file(path: Path, id: str) -> FoundFile:
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; remove it from the source, or mend it") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: not a file; a pipe, socket or device cannot be read twice, as a task may need to")
    return FoundFile(str(path.absolute()), spelt_out(id), found.st_size, str(found.st_mtime_ns))


def _nothing_to_read(config: DocumentSource) -> DataError:
    patterns = ", ".join(config.include or [f"*{suffix}" for suffix in KNOWN_SUFFIXES])
    return DataError(f"{config.root}: no file to read; looked for {patterns}, also with {', '.join(DECODERS)}")


def _dataset_source(config: DocumentSource) -> _OpenSource:
    """What Hugging Face `datasets` loads, a piece for each of its shards."""
    found = located(config)
    assert found.dataset is not None, config.kind
    plan = plan_dataset(found)
    files = local_files(found)
    num_bytes = plan.num_bytes or sum(text_bytes(file.path, file.num_bytes) for file in files)
    count = num_parts(plan, shard_size(num_bytes))
    pieces = tuple(FilePiece(found.dataset, f"{config.split}-{index:05d}", index, count) for index in range(count))
    return _OpenSource(
        found, config.label, config.root, pieces, _fingerprint(files, config), _capped_mb(num_bytes, config)
    )


def _station_source(config: DocumentSource, root: Path, manifest: StationManifest) -> _OpenSource:
    """What a station of documents left behind."""
    if manifest.station not in DOCUMENT_STATIONS:
        raise DataError(f"{root}: made by station {manifest.station!r}; documents are needed here")
    if unread := config.changed(UNREAD_IN_STATIONS):
        raise DataError(
            f"{root}: found {', '.join(unread)}, which the folder of a station does not read: its documents are as "
            f"{manifest.station!r} has left them; leave it out, or set it where they are read from files"
        )
    if not manifest.counts["documents"]:
        raise DataError(
            f"{root}: empty: station {manifest.station!r} kept none of {manifest.counts['documents_in']:,} documents; "
            f"`megalite data inspect {root}` shows why"
        )
    check_input(root, manifest.station)
    shards = [output.path for output in manifest.outputs if output.path.startswith("part-")]
    pieces = tuple(FilePiece(str(root / shard), shard) for shard in shards)
    text_mb = manifest.counts["text_bytes"] / 1e6
    return _OpenSource(config, config.label, root, pieces, manifest.fingerprint, text_mb, is_station=True)


def _plain_source(
    config: DocumentSource, root: Path | str, files: Sequence[FoundFile], passed_over: Counter[str] | None = None
) -> _OpenSource:
    """A source of files, beside which others were passed over."""
    pieces = tuple(FilePiece(file.path, file.id, num_bytes=file.num_bytes) for file in files)
    text_mb = _capped_mb(sum(text_bytes(file.path, file.num_bytes) for file in files), config)
    fingerprint = _fingerprint(files, config)
    return _OpenSource(config, config.label, root, pieces, fingerprint, text_mb, passed_over=passed_over or Counter())


def _capped_mb(num_bytes: float, config: DocumentSource) -> float:
    """Million bytes of text that will be read: of as many bytes, or of nobody knows how many (0)."""
    if not num_bytes:
        return config.max_mb or 0.0
    return min(num_bytes / 1e6, config.max_mb or math.inf)


def _fingerprint(files: Sequence[FoundFile], config: DocumentSource) -> str:
    """A hash over names, sizes and versions (times of change, ETags): cheap, and another one if contents may differ.

    What only belongs to data sets stays out for files, whose fingerprints are older than these settings.
    """
    left_out = NOT_CONTENT if config.kind == "datasets" else NOT_CONTENT.union(DATASET_SETTINGS)
    left_out = left_out.union(
        name
        for name in LATER
        if getattr(config, name) == DocumentSource.model_fields[name].get_default(call_default_factory=True)
    )
    digest = xxhash.xxh3_128(config.model_dump_json(exclude=left_out).encode())
    digest.update(EDITION if config.conversations is not None else b"")
    for file in files:
        digest.update(f"{file.id}\0{file.num_bytes}\0{file.version}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
