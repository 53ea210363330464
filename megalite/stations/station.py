"""A data station run into its folder: once, whole or not at all, and by one process at a time.

    run_station: same station, inputs and settings as in the folder's manifest?  yes -> nothing to do
                 no -> OUT.lock (`lease.py`) -> build in OUT.partial -> hash every file -> manifest.json
                    -> rename to OUT -> remove its .work

Whatever stops a station of tasks (`tasks.py`), a signal, kill -9, a full disk or one that does not answer, leaves
OUT.partial, and the next run of the same work goes on there. It is cleared when other work is wanted, and when the data
itself is at fault, which means other work.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.errors import DataError, UserError
from megalite.stations.dataset_card import write_dataset_card
from megalite.stations.lease import Lease, remove_dead
from megalite.stations.manifest import (
    FILE_NAME,
    Input,
    StationManifest,
    find_manifest,
    list_outputs,
    missing_outputs,
    write_text,
)
from megalite.stations.tasks import OWNER_FILE, WORK_FOLDER

PLAN_FILE = "plan.json"
"""In the work folder of an unfinished station: its manifest as far as it is known before the work."""


@dataclass(frozen=True)
class StationResult:
    """What `run_station` did."""

    manifest: StationManifest
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
        DataError: `out` holds something else, lies within what is read or around it, or a path is not UTF-8.
        UserError: another process is at work there, or the disk is full.
    """
    here = out.absolute()
    relative = tuple(Input(_seen_from(here, path), hash_) for path, hash_ in inputs)
    _refuse_odd_names([str(out), *(each.path for each in relative)])
    planned = StationManifest(station, relative, json.loads(json.dumps(settings)), counts={})
    if (found := _find_same(out, planned)) is not None:
        return StationResult(found, reused=True)
    _refuse_foreign_folder(out, station, find_manifest(out))
    _refuse_own_input(out, [path for path, _ in inputs])

    with Lease(_lock(out), out) as lease:
        if (found := _find_same(out, planned)) is not None:  # by another process, until a moment ago
            return StationResult(found, reused=True)
        partial = out.with_name(out.name + ".partial")
        with _kept_or_removed(out, partial, lease, resumable):
            if not (resumable and _same_plan(partial, planned)):
                _remove_tree(partial)
                _make_folder(partial)
                write_text(partial / WORK_FOLDER / PLAN_FILE, planned.dumps())
            write_text(partial / WORK_FOLDER / OWNER_FILE, lease.token)
            counts = build(partial)
            manifest = _complete(partial, planned, counts, out)
            lease.check()
            _replace_folder(partial, out, lease.token)
        shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)
    return StationResult(manifest, reused=False)


def _refuse_odd_names(paths: Sequence[str]) -> None:
    """Manifests are UTF-8, and so are the names that they and Arrow can hold."""
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError as error:
            shown = os.fsencode(path).decode(errors="backslashreplace")
            raise DataError(f"{shown}: a name that is not UTF-8, which a manifest cannot hold; rename it") from error


def _find_same(out: Path, planned: StationManifest) -> StationManifest | None:
    """The manifest of a folder that holds what is planned."""
    found = find_manifest(out)
    if found is None or not found.same_work(planned) or missing_outputs(found):
        return None
    for leftover in (out / WORK_FOLDER, *_former_ones(out)):  # of a run that was killed at its very end
        shutil.rmtree(leftover, ignore_errors=True)
    remove_dead(_lock(out), out)
    return found


def _lock(out: Path) -> Path:
    return out.with_name(out.name + ".lock")


@contextmanager
def _kept_or_removed(out: Path, partial: Path, lease: Lease, resumable: bool) -> Iterator[None]:
    """What is done of a station stays when something stops it from outside; else it is removed."""
    try:
        yield
    except BaseException as error:
        keep = resumable and not isinstance(error, DataError)
        if not keep and not lease.is_lost():
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            what = "what is done is kept: run the same command again to go on" if keep else "nothing is left of it"
            if _is_full_disk(error):
                raise UserError(f"{out}: the disk is full; free some space or choose another; {what}") from error
            print(f"{out}: stopped by {error}; {what}", file=sys.stderr, flush=True)
        raise


def _complete(partial: Path, planned: StationManifest, counts: dict[str, Any], out: Path) -> StationManifest:
    """Write the manifest of a folder whose files are all there. What is known of the tasks stays until the end."""
    for leftover in partial.rglob(".*.tmp"):  # of tasks that were killed
        leftover.unlink(missing_ok=True)
    (partial / FILE_NAME).unlink(missing_ok=True)  # of a run that was stopped just behind this
    write_dataset_card(partial, planned.station)
    outputs = list_outputs(partial, leave_out=partial / WORK_FOLDER)
    manifest = StationManifest(planned.station, planned.inputs, planned.settings, counts, outputs, folder=out)
    write_text(partial / FILE_NAME, manifest.dumps())
    return manifest


def _seen_from(here: Path, path: Path | str) -> str:
    """A path relative to a folder; a URL as it is."""
    return str(path) if "://" in str(path) else os.path.relpath(Path(path).absolute(), here)


def _same_plan(partial: Path, planned: StationManifest) -> bool:
    """Whether an interrupted run in this folder was about the same work."""
    path = partial / WORK_FOLDER / PLAN_FILE
    return path.is_file() and path.read_bytes() == planned.dumps().encode()


def _make_folder(folder: Path) -> None:
    try:
        (folder / WORK_FOLDER).mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made: {error.strerror}; choose another folder") from error


def _is_full_disk(error: OSError) -> bool:
    """Also as numpy reports it: np.save reserves the space first and says so without a number."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or "Not enough free space" in str(error)


def _refuse_foreign_folder(out: Path, station: str, found: StationManifest | None) -> None:
    """Only a folder that this station made may be replaced."""
    if found is not None and found.station != station:
        raise DataError(f"{out}: made by station {found.station!r}; choose another folder for {station!r}")
    if found is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: already there and not made by megalite; choose another folder or remove it yourself")


def _refuse_own_input(out: Path, inputs: Sequence[Path | str]) -> None:
    """A folder that is read can hold no result: the next run would read that too, and replacing it would remove it."""
    place = out.resolve()
    for path in inputs:
        if "://" in str(path):
            continue
        read = Path(path).resolve()
        if read.is_dir() and place.is_relative_to(read):
            where = "is" if place == read else "lies within"
            raise DataError(f"{out}: {where} {path}, which is read; choose a folder beside it")
        if read.is_relative_to(place):
            raise DataError(f"{out}: has in it {path}, which is read, and would be replaced; choose another folder")


def _replace_folder(new: Path, out: Path, token: str) -> None:
    """Put `new` in the place of `out`, which steps aside under a name that nobody else has given to anything. A kill in
    between leaves no `out`, never a mixed one."""
    old = out.with_name(f".{out.name}-{token}.old")
    if out.exists():
        os.replace(out, old)
    try:
        os.replace(new, out)
    except OSError:
        if old.exists():
            os.replace(old, out)
        raise
    for each in _former_ones(out):
        shutil.rmtree(each, ignore_errors=True)


def _former_ones(out: Path) -> list[Path]:
    """What `_replace_folder` has put aside and not removed."""
    pattern = re.compile(rf"\.{re.escape(out.name)}-[0-9a-f]{{32}}\.old")
    try:
        return [path for path in out.parent.iterdir() if pattern.fullmatch(path.name)]
    except OSError:  # whoever may not list a folder may still write into it
        return []


def _remove_tree(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
