"""manifest.json: what a data station read, how it was set, what it left behind.

A folder with a manifest is whole (`station.py`), and the next station compares the files with it before it reads
them. Manifests hold no times and no absolute paths, so equal work gives equal bytes and a data folder can be moved as a
whole.

    what is looked at                      when                                     reads
    the manifest's own checksum            always                                   the manifest
    sizes of the files                     before any use                           nothing
    a hash of 64 places of a large file    before training, `data show`             1 MB a file
    the hash of each file                  before a station, `data verify`          everything

Format 2 added the manifest's own checksum, and for large files the hash of some places and of each stretch, so that
many can share the checking of one. Folders of format 1 are read as before, and count as the same work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import xxhash
from pydantic import AfterValidator, Field, NonNegativeInt, ValidationError, model_validator

from megalite import __version__
from megalite.errors import DataError
from megalite.records import NO_CHECKSUM, Record, explain, is_sealed, parse_json, parse_record, seal
from megalite.stations.dataset_card import CARD_FILE
from megalite.stations.facts import FACTS, LEAST_INPUTS
from megalite.stations.hashes import CHUNK_BYTES, hash_all, hash_file, hash_sampled_bytes, is_small

FORMAT = 2
"""Version of the manifest and of the folders it describes."""

READABLE_FORMATS = (1, 2)

WORK_FORMAT = 1
"""Version of what stations make: equal work of readable formats leaves equal files."""

FILE_NAME = "manifest.json"

AGAIN = "run its station again"


@dataclass(frozen=True)
class Input:
    """Something a station read: its URL, or where it lies seen from its folder, and a hash that changes with it."""

    path: str
    fingerprint: str


@dataclass(frozen=True)
class Output:
    """A file a station wrote, with its path inside the station's folder."""

    path: str
    num_bytes: int
    xxh3: str
    spots: str = ""
    """Hash of some places of it; empty where it is small, or of format 1."""
    chunks: tuple[str, ...] = ()
    """Hash of each CHUNK_BYTES of it; empty where it has no more than that, or of format 1."""


@dataclass(frozen=True)
class StationManifest:
    """The record of one finished station."""

    station: str
    inputs: tuple[Input, ...]
    settings: dict[str, Any]
    counts: dict[str, Any]
    outputs: tuple[Output, ...] = ()
    format: int = FORMAT
    version: str = __version__
    """The megalite that made it, for people: folders of one format are the same to every version."""
    folder: Path = field(default=Path(), compare=False)
    """Where it was read from; not written."""

    def dumps(self) -> str:
        """The manifest as JSON text, the same for the same content."""
        plain = asdict(self)
        del plain["folder"]
        plain["outputs"] = [{key: value for key, value in each.items() if value != ()} for each in plain["outputs"]]
        plain["checksum"] = NO_CHECKSUM
        return seal(json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False) + "\n")

    @property
    def fingerprint(self) -> str:
        """A hash of what was left behind: settings and contents. The same work redone elsewhere has the same."""
        files = [
            {"path": output.path, "num_bytes": output.num_bytes, "xxh3": output.xxh3}
            for output in self.outputs
            if output.path != CARD_FILE  # it describes the others, and older folders have none
        ]
        left_behind = [self.station, WORK_FORMAT, self.settings, files]
        return xxhash.xxh3_128_hexdigest(json.dumps(left_behind, sort_keys=True).encode())

    def input_path(self, index: int = 0) -> Path:
        """Where an input lies now."""
        return Path(os.path.normpath(self.folder / self.inputs[index].path))

    def same_work(self, other: StationManifest) -> bool:
        """Whether both would leave the same behind: same station, inputs and settings."""
        return self._work() == other._work()

    def _work(self) -> tuple[str, tuple[str, ...], str]:
        settings = json.dumps(self.settings, sort_keys=True)
        return self.station, tuple(each.fingerprint for each in self.inputs), settings


def _possible(path: str) -> str:
    if not path or "\0" in path or any(len(part.encode()) > 255 for part in path.split("/")) or len(path) > 4096:
        raise ValueError("a path that can be")
    return path


def _inside(path: str) -> str:
    pure = PurePosixPath(_possible(path))
    if pure.is_absolute() or ".." in pure.parts or str(pure) != path or path in (".", FILE_NAME):
        raise ValueError("a file inside of the folder")
    return path


Hash = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class _InputRecord(Record):
    path: Annotated[str, AfterValidator(_possible)]
    fingerprint: str


class _OutputRecord(Record):
    path: Annotated[str, AfterValidator(_inside)]
    num_bytes: NonNegativeInt
    xxh3: Hash
    spots: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")] = ""
    chunks: tuple[Hash, ...] = ()

    @model_validator(mode="after")
    def _chunks_are_all(self) -> _OutputRecord:
        if self.chunks and len(self.chunks) != -(-self.num_bytes // CHUNK_BYTES):
            raise ValueError(f"a hash for each {CHUNK_BYTES} of its {self.num_bytes} bytes")
        return self


class _ManifestRecord(Record):
    """A manifest as it lies on the disk."""

    station: str
    inputs: tuple[_InputRecord, ...]
    settings: dict[str, Any]
    counts: dict[str, Any]
    outputs: tuple[_OutputRecord, ...]
    format: int
    version: str
    checksum: Hash | None = None


def find_manifest(folder: Path) -> StationManifest | None:
    """The manifest of a station's folder, or None where there is none.

    Raises:
        DataError: the file is there and cannot be understood.
    """
    path = folder / FILE_NAME
    advice = f"remove the folder and {AGAIN}"
    try:
        if not path.is_file():
            return None
        content = path.read_bytes()
    except OSError as error:
        what = "open it to the user who runs this" if isinstance(error, PermissionError) else "see to the disk"
        raise DataError(f"{path}: cannot be read ({error.strerror}); {what}") from error
    plain = parse_json(content, path, advice)
    made_by = plain.get("format") if isinstance(plain, dict) else None
    if made_by is not None and made_by not in READABLE_FORMATS:
        raise DataError(f"{path}: format {made_by!r:.40}, made by another version; {AGAIN}")
    record = parse_record(content, _ManifestRecord, path, advice)
    if (record.checksum is None) != (record.format == 1):
        raise DataError(f"{path}: damaged: format {record.format} and checksum {record.checksum}; {advice}")
    if record.checksum is not None and not is_sealed(content.decode()):
        raise DataError(
            f"{path}: damaged: it does not match its own checksum (if it was edited by hand, take the edit back); "
            f"{advice}"
        )
    _check_facts(record, path, advice)
    names = [each.path for each in record.outputs]
    if len(set(names)) != len(names):
        raise DataError(f"{path}: damaged: a file is named twice; {advice}")
    return StationManifest(
        record.station,
        tuple(Input(each.path, each.fingerprint) for each in record.inputs),
        record.settings,
        record.counts,
        tuple(Output(each.path, each.num_bytes, each.xxh3, each.spots, each.chunks) for each in record.outputs),
        record.format,
        record.version,
        folder,
    )


def check_input(folder: Path, station: str, *, contents: bool = True) -> StationManifest:
    """The manifest of a finished station, its files compared with it.

    Args:
        folder: the station's folder.
        station: name the manifest must have.
        contents: compare the hashes too, not only the sizes.

    Raises:
        DataError: no such folder, another station's, or files missing or changed.
    """
    manifest = find_manifest(folder)
    if manifest is None:
        unfinished = folder.with_name(folder.name + ".partial").is_dir()
        why = "its station was interrupted (there is a .partial folder)" if unfinished else "there is no manifest.json"
        raise DataError(f"{folder}: not a folder of station {station!r}: {why}; run `megalite data {station}` first")
    if manifest.station != station:
        raise DataError(f"{folder}: made by station {manifest.station!r}; a folder of {station!r} is needed here")
    problems = missing_outputs(manifest)
    if contents and not problems:
        problems = [problem for each in manifest.outputs if (problem := changed_output(manifest, each))]
    refuse_damage(manifest, problems)
    return manifest


def check_sampled_bytes(manifest: StationManifest, names: Sequence[str]) -> None:
    """Compare some files with the manifest at the places that are looked at before training.

    Raises:
        DataError: one has changed there.
    """
    outputs = [output for output in manifest.outputs if output.path in names]
    refuse_damage(manifest, [problem for each in outputs if (problem := changed_output(manifest, each, spots=True))])


def refuse_damage(manifest: StationManifest, problems: Sequence[str]) -> None:
    """Raise an error that names all that is wrong with a station's folder, if anything is.

    Raises:
        DataError: there are problems.
    """
    if problems:
        complaints = "; ".join(problems)
        raise DataError(f"{manifest.folder}: does not agree with its {FILE_NAME}: {complaints}; {AGAIN}")


def missing_outputs(manifest: StationManifest) -> list[str]:
    """Complaints about files of a manifest that are missing or have another size."""
    problems = []
    for output in manifest.outputs:
        path = manifest.folder / output.path
        if not path.is_file():
            problems.append(f"{output.path}: missing")
        elif path.stat().st_size != output.num_bytes:
            problems.append(f"{output.path}: {path.stat().st_size} bytes found, {output.num_bytes} expected")
    return problems


def changed_output(manifest: StationManifest, output: Output, *, spots: bool = False) -> str:
    """A complaint about the contents of a file; empty when they are what was written.

    Args:
        manifest: of the station.
        output: the file, of the right size.
        spots: look at some places of a large file only, as far as they are known.
    """
    path = manifest.folder / output.path
    try:
        if not spots or is_small(output.num_bytes):
            is_same = hash_file(path) == output.xxh3
        else:
            is_same = not output.spots or hash_sampled_bytes(path) == output.spots
    except OSError as error:
        return f"{output.path}: cannot be read ({error.strerror})"
    return "" if is_same else f"{output.path}: its contents have changed"


def list_outputs(folder: Path, *, leave_out: Path) -> tuple[Output, ...]:
    """The record of every file below a folder, but for those of one folder inside."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(leave_out))
    return tuple(Output(path.relative_to(folder).as_posix(), *hash_all(path)) for path in files)


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.tmp")  # a station clears such names away
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _check_facts(record: _ManifestRecord, path: Path, advice: str) -> None:
    """Refuse a manifest without what other tools read out of it."""
    facts = FACTS.get(record.station)
    if facts is None:
        return
    try:
        found = facts.model_validate({"settings": record.settings, "counts": record.counts}, strict=True)
    except ValidationError as error:
        raise DataError(f"{path}: damaged: {explain(error)}; {advice}") from error
    last = getattr(found.settings, "tokenizer_input", -1)
    if len(record.inputs) < max(LEAST_INPUTS[record.station], last + 1):
        raise DataError(f"{path}: damaged: {len(record.inputs)} inputs; {advice}")
