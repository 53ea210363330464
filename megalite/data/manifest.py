"""manifest.json: what a data station read, how it was set, what it left behind.

    run_station: same station, inputs and settings as in the folder's manifest?  yes -> nothing to do
                 no -> build in OUT.partial -> hash every file -> manifest.json -> rename to OUT

A folder with a manifest is therefore whole: a killed station leaves only OUT.partial, which the next run clears. The
next station checks the files against the manifest before it reads them. Manifests hold no times and no absolute
paths, so equal work gives equal bytes and a data folder can be moved as a whole.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from megalite import __version__
from megalite.data.tasks import WORK_FOLDER
from megalite.errors import DataError

FORMAT = 1
"""Version of the manifest and of the folders it describes."""

FILE_NAME = "manifest.json"

PLAN_FILE = "plan.json"
"""In the work folder of an unfinished station: its manifest as far as it is known before the work."""

HASH_CHUNK_BYTES = 1 << 22


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


@dataclass(frozen=True)
class Manifest:
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
        return json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @property
    def fingerprint(self) -> str:
        """A hash of what was left behind: settings and contents. The same work redone elsewhere has the same."""
        left_behind = [self.station, self.format, self.settings, [asdict(output) for output in self.outputs]]
        return xxhash.xxh3_128_hexdigest(json.dumps(left_behind, sort_keys=True).encode())

    def input_path(self, index: int = 0) -> Path:
        """Where an input lies now."""
        return Path(os.path.normpath(self.folder / self.inputs[index].path))

    def same_work(self, other: Manifest) -> bool:
        """Whether both would leave the same behind: same station, inputs and settings."""
        return self._work() == other._work()

    def _work(self) -> tuple[str, int, tuple[str, ...], str]:
        settings = json.dumps(self.settings, sort_keys=True)
        return self.station, self.format, tuple(each.fingerprint for each in self.inputs), settings


@dataclass(frozen=True)
class StationResult:
    """What `run_station` did."""

    manifest: Manifest
    reused: bool
    """The folder already held this very work."""


def run_station(
    station: str,
    out: Path,
    *,
    inputs: Sequence[tuple[Path | str, str]],
    settings: dict[str, Any],
    build: Callable[[Path], dict[str, Any]],
    resumable: bool = False,
) -> StationResult:
    """Run one station into its folder, or find that it has been run.

    Args:
        station: name of the station.
        out: folder to make. An older result of the same station there is replaced; anything else is refused.
        inputs: (path or URL, fingerprint) of what is read.
        settings: JSON-ready settings that decide the result. The number of workers is none of them.
        build: writes the files into the folder it is given and returns the counts.
        resumable: `build` goes on with what it finds in the folder (`tasks.py`), so an interrupted one is kept.

    Raises:
        DataError: `out` holds something else, lies within what is read, or the disk is full; what was half written is
            removed.
    """
    here = out.absolute()
    relative = tuple(Input(_seen_from(here, path), hash_) for path, hash_ in inputs)
    planned = Manifest(station, relative, json.loads(json.dumps(settings)), counts={})
    found = find_manifest(out)
    if found is not None and found.same_work(planned) and not missing_outputs(found):
        return StationResult(found, reused=True)
    _refuse_foreign_folder(out, station, found)
    _refuse_own_input(out, [path for path, _ in inputs])

    partial = out.with_name(out.name + ".partial")
    if not (resumable and _same_plan(partial, planned)):
        _remove_tree(partial)
        _make_folder(partial)
        _write_plan(partial, planned)
    try:
        counts = build(partial)
        _remove_tree(partial / WORK_FOLDER)
        for leftover in partial.rglob(".*.tmp"):  # of tasks that were killed
            leftover.unlink()
        manifest = Manifest(station, relative, planned.settings, counts, _list_outputs(partial), folder=out)
        write_text(partial / FILE_NAME, manifest.dumps())
        _replace_folder(partial, out)
    except OSError as error:
        _remove_tree(partial)
        if _is_full_disk(error):
            raise DataError(
                f"{out}: the disk is full (station {station}); what was half written has been removed. "
                "Free some space or choose another folder"
            ) from error
        raise
    except BaseException as error:
        if not resumable or isinstance(error, DataError):
            _remove_tree(partial)
        raise
    return StationResult(manifest, reused=False)


def find_manifest(folder: Path) -> Manifest | None:
    """The manifest of a station's folder, or None where there is none.

    Raises:
        DataError: the file is there and cannot be understood.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        plain["inputs"] = tuple(Input(**each) for each in plain["inputs"])
        plain["outputs"] = tuple(Output(**each) for each in plain["outputs"])
        manifest = Manifest(**plain, folder=folder)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: damaged manifest ({error}); remove the folder and run its station again") from error
    if manifest.format != FORMAT:
        raise DataError(f"{path}: format {manifest.format}, made by another version; run its station again")
    return manifest


def check_input(folder: Path, station: str, *, contents: bool = True) -> Manifest:
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
        problems = [
            f"{each.path}: its contents have changed"
            for each in manifest.outputs
            if hash_file(folder / each.path) != each.xxh3
        ]
    if problems:
        raise DataError(
            f"{folder}: does not agree with its manifest.json: {'; '.join(problems)}; run its station again"
        )
    return manifest


def missing_outputs(manifest: Manifest) -> list[str]:
    """Complaints about files of a manifest that are missing or have another size."""
    problems = []
    for output in manifest.outputs:
        path = manifest.folder / output.path
        if not path.is_file():
            problems.append(f"{output.path}: missing")
        elif path.stat().st_size != output.num_bytes:
            problems.append(f"{output.path}: {path.stat().st_size} bytes found, {output.num_bytes} expected")
    return problems


def hash_file(path: Path) -> str:
    """xxh3_128 of a file's bytes."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never half of it."""
    partial = path.with_name(path.name + ".tmp")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _seen_from(here: Path, path: Path | str) -> str:
    """A path relative to a folder; a URL as it is."""
    return str(path) if "://" in str(path) else os.path.relpath(Path(path).absolute(), here)


def _same_plan(partial: Path, planned: Manifest) -> bool:
    """Whether an interrupted run in this folder was about the same work."""
    path = partial / WORK_FOLDER / PLAN_FILE
    return path.is_file() and path.read_text(encoding="utf-8") == planned.dumps()


def _write_plan(partial: Path, planned: Manifest) -> None:
    (partial / WORK_FOLDER).mkdir()
    write_text(partial / WORK_FOLDER / PLAN_FILE, planned.dumps())


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made: {error.strerror}; choose another folder") from error


def _is_full_disk(error: OSError) -> bool:
    """Also as numpy reports it: np.save reserves the space first and says so without a number."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or "Not enough free space" in str(error)


def _list_outputs(folder: Path) -> tuple[Output, ...]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple(Output(path.relative_to(folder).as_posix(), path.stat().st_size, hash_file(path)) for path in files)


def _refuse_foreign_folder(out: Path, station: str, found: Manifest | None) -> None:
    """Only a folder that this station made may be replaced."""
    if found is not None and found.station != station:
        raise DataError(f"{out}: made by station {found.station!r}; choose another folder for {station!r}")
    if found is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: already there and not made by megalite; choose another folder or remove it yourself")


def _refuse_own_input(out: Path, inputs: Sequence[Path | str]) -> None:
    """A folder that is read can hold no result: the next run would read that too, and replacing it would remove it."""
    for path in inputs:
        if "://" not in str(path) and Path(path).is_dir() and out.resolve().is_relative_to(Path(path).resolve()):
            where = "is" if out.resolve() == Path(path).resolve() else "lies within"
            raise DataError(f"{out}: {where} {path}, which is read; choose a folder beside it")


def _replace_folder(new: Path, out: Path) -> None:
    """Put `new` in the place of `out`. A kill in between leaves no `out`, never a mixed one."""
    if out.exists():
        old = out.with_name(out.name + ".old")
        _remove_tree(old)
        os.replace(out, old)
        os.replace(new, out)
        _remove_tree(old)
    else:
        os.replace(new, out)


def _remove_tree(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
