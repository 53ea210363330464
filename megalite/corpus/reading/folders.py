"""The files of a folder that are a source: by their names, or, where Hugging Face `datasets` has saved something, by
what its own files say. What stations have made is no raw data: documents stand in it twice, and rejects again.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from megalite.corpus.reading.files import data_suffix, is_machine_fault, walk
from megalite.corpus.reading.readers import READERS
from megalite.errors import DataError
from megalite.stations.manifest import FILE_NAME
from megalite.stations.station import PLAN_FILE
from megalite.stations.tasks import WORK_FOLDER

PLAIN_TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")

KNOWN_SUFFIXES = (*READERS, *PLAIN_TEXT_SUFFIXES)

SPLITS_FILE = "dataset_dict.json"
STATE_FILE = "state.json"
"""What `datasets` writes beside what it saves."""

UNFINISHED = ".partial"
"""How the folder of a station that is not done is called at the end."""

SHOWN_FOLDERS = 5
"""How many of many an error message names."""


def list_files(root: Path, include: Sequence[str], passed_over: Counter[str]) -> list[Path]:
    """Files below `root` that match a pattern or, without patterns, have a known suffix; hidden ones are left out.

    Links to folders are followed last, and each folder is read once, so that no link leads round in a circle.

    Args:
        root: a folder.
        include: patterns of names; empty for all of known kinds.
        passed_over: gets what `note_unknown` notes.

    Raises:
        DataError: a folder cannot be listed, or stations have worked in one.
    """
    saved = _saved_files(root)
    if saved is not None:
        return _chosen(saved, include)
    found: list[Path] = []
    made: list[Path] = []
    seen: set[str] = set()
    starts = [root]
    for start in starts:  # gets longer on the way
        for folder, subfolders, names in walk(start):
            real = os.path.realpath(folder)
            if real in seen:
                subfolders.clear()
                continue
            seen.add(real)
            if _is_of_station(Path(folder), names, subfolders):
                made.append(Path(folder))
            saved = _saved_files(Path(folder))
            if saved is not None:
                found += _chosen(saved, include)
                subfolders.clear()
                continue
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            found += [Path(folder, name) for name in names if is_wanted(name, include)]
            note_unknown(names, include, passed_over)
            starts += [path for name in subfolders if (path := Path(folder, name)).is_symlink()]
    refuse_work(root, made)
    return sorted(found)


def _saved_files(folder: Path) -> list[Path] | None:
    """The files of a folder that Hugging Face `datasets` has saved, a Dataset or all splits of a DatasetDict, in its
    order; None where it has not. What else lies there (caches, descriptions) is no data.

    Raises:
        DataError: a split is missing.
    """
    splits = _list_in(folder / SPLITS_FILE, "splits")
    if not (splits and all(isinstance(split, str) for split in splits)):
        return _saved_split(folder)
    found: list[Path] = []
    for split in splits:
        files = _saved_split(folder / split)
        if files is None:
            raise DataError(
                f"{folder}: {SPLITS_FILE} names the split {split!r}, and no {STATE_FILE} of a saved dataset is in "
                f"{folder / split}; put it back, or take the split out of {SPLITS_FILE}"
            )
        found += files
    return found


def _saved_split(folder: Path) -> list[Path] | None:
    """The same of a Dataset alone. Others call files `state.json`, too."""
    files = _list_in(folder / STATE_FILE, "_data_files")
    names = [file.get("filename") if isinstance(file, dict) else None for file in files or ()]
    if files is None or not all(isinstance(name, str) for name in names):
        return None
    return [folder / str(name) for name in names]


def _list_in(path: Path, key: str) -> list[Any] | None:
    """A list in a file of JSON that others may have written; None where it is not there."""
    if not _is_there(path):
        return None
    found = _json_object(_content_of(path)).get(key)
    return found if isinstance(found, list) else None


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise _refused(path, error) from error


def is_wanted(name: str, include: Sequence[str]) -> bool:
    """Whether a file of a folder is read, by its name."""
    if include:
        return any(fnmatch.fnmatch(name, pattern) for pattern in include)
    return not name.startswith(".") and data_suffix(name) in KNOWN_SUFFIXES


def note_unknown(names: Iterable[str], include: Sequence[str], passed_over: Counter[str]) -> None:
    """Count, by suffix, files of kinds that are not read; not where patterns say which are wanted."""
    if not include:
        unknown = (name for name in names if not name.startswith(".") and not is_wanted(name, ()))
        passed_over.update(PurePosixPath(name).suffix or "no suffix" for name in unknown)


def refuse_work(root: Path | str, made: Sequence[Path | str]) -> None:
    """Raise an error if there are folders in a source that stations have made.

    Raises:
        DataError: naming some.
    """
    if made:
        more = f" and {len(made) - SHOWN_FOLDERS} more" if len(made) > SHOWN_FOLDERS else ""
        raise DataError(
            f"{root}: raw data is needed here, and stations have worked in {', '.join(map(str, made[:SHOWN_FOLDERS]))}"
            f"{more}; name the folder of one finished station, or move what is raw into a folder of its own"
        )


def _chosen(saved: Sequence[Path], include: Sequence[str]) -> list[Path]:
    """Of a saved dataset the files that match a pattern; without patterns all."""
    return [path for path in saved if not include or is_wanted(path.name, include)]


def _is_of_station(folder: Path, names: Iterable[str], subfolders: Iterable[str]) -> bool:
    """Whether a station has made a folder, or was about to."""
    if folder.name.endswith(UNFINISHED) or (FILE_NAME in names and is_manifest(_content_of(folder / FILE_NAME))):
        return True
    return WORK_FOLDER in subfolders and (folder / WORK_FOLDER / PLAN_FILE).is_file()


def is_manifest(content: bytes) -> bool:
    """Whether a `manifest.json` is a station's; others call files so, too."""
    return {"station", "outputs"} <= _json_object(content).keys()


def _json_object(content: bytes) -> dict[str, Any]:
    """The object in a file of JSON that others may have written; an empty one where there is none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _content_of(path: Path) -> bytes:
    """Of a small file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> Exception:
    """What to raise over a file that cannot be read."""
    if is_machine_fault(error):
        return error
    return DataError(f"{path}: cannot be read ({error.strerror}); open it to the user who runs this")
