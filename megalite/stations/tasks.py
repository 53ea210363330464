"""A station's work as many small tasks, each of which leaves its files and one report behind.

    run_tasks(function, tasks)                    in STATION.partial/
        .work/owner                               whose turn it is (`station.py`, `lease.py`)
        .work/PHASE/tasks.jsonl                   what is to do, one JSON object a task
        part-00000.parquet ...                    what task 0 wrote
        .work/PHASE/00000.json                    its report: written last, so a task with a report is done

Who runs a task does not matter: this process, a pool of processes, workers on a cluster, Ray (`runners/`). All of
them call `perform`, which needs no more than the folder and the number of the task, and finds a task that has its
report done. So a station that was killed goes on where it was, and a task that was lost is given out again; nothing is
done twice, and the bytes are the same however the tasks were shared out.

A report has its own checksum: one that a broken disk left is no report, and its task is done again. When another
process has taken the folder over, the owner's name in it has changed: a driver then ends at the next task, and a worker
leaves no report of what it was doing.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from pydantic import NonNegativeInt

from megalite.errors import DataError, UserError
from megalite.plugins import load_plugins, named_plugins
from megalite.progress import ProgressReporter
from megalite.records import NO_CHECKSUM, Record, is_sealed, parse_record, seal

WORK_FOLDER = ".work"

OWNER_FILE = "owner"
"""In the work folder: names the process that has the folder now."""

TASKS_FILE = "tasks.jsonl"

Task = dict[str, Any]
"""JSON-ready settings of one task. Paths are strings."""

Report = dict[str, Any]
"""JSON-ready outcome of one task: counts, and under `megabytes` how far it brought the progress."""


class _Header(Record):
    """First line of the list of tasks."""

    function: str
    count: NonNegativeInt
    plugins: tuple[str, ...] = ()
    """What whoever does a task must load first."""


TaskFunction = Callable[[Task, int, Path], Report]
"""Does one task: its settings, its number, the station's folder. It may be called again after it was killed, and then
writes the same files; two calls at once must not harm each other (`replacing`)."""


class Runner(Protocol):
    """Where tasks run."""

    def run(self, folder: Path, phase: str, numbers: Sequence[int]) -> Iterator[int]:
        """Perform the given tasks of a phase, in any order; yield each one's number when its report is there."""
        ...


def run_tasks(
    folder: Path,
    phase: str,
    function: TaskFunction,
    tasks: Sequence[Task],
    *,
    runner: Runner,
    progress: ProgressReporter,
) -> list[Report]:
    """Perform all tasks of a phase that have no report yet.

    Args:
        folder: the station's folder, on a disk that all workers see.
        phase: name of this part of the station's work.
        function: a function of a module of ours.
        tasks: settings of each; the same ones as before when this goes on after an interruption.
        runner: where they run.
        progress: told of the megabytes in each report.

    Returns:
        The reports, in the order of the tasks.

    Raises:
        DataError: a task raised it.
    """
    work, owner = folder / WORK_FOLDER / phase, _owner(folder)
    work.mkdir(parents=True, exist_ok=True)
    name = f"{function.__module__}:{function.__qualname__}"
    header = _Header(function=name, count=len(tasks), plugins=tuple(named_plugins()))
    lines = [header.model_dump_json(), *(json.dumps(task) for task in tasks)]
    with replacing(work / TASKS_FILE) as path:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    missing = []
    for number in range(len(tasks)):
        report = _read_report(work, number)
        if report is None:
            _report_path(work, number).unlink(missing_ok=True)
            missing.append(number)
        else:
            progress.advance(report.get("megabytes", 0.0))
    for number in runner.run(folder, phase, missing) if missing else ():
        progress.advance(_finished_report(work, number).get("megabytes", 0.0))
        _refuse_other_owner(folder, owner)
    return [_finished_report(work, number) for number in range(len(tasks))]


def perform(folder: Path, phase: str, number: int) -> None:
    """Do one task, unless its report is there.

    Raises:
        UserError: the folder has been taken over meanwhile.
    """
    work, owner = folder / WORK_FOLDER / phase, _owner(folder)
    if _report_path(work, number).is_file():
        return
    path = work / TASKS_FILE
    header, *tasks = _read_lines(path, path.stat().st_mtime_ns)
    known = _read_header(header, path)
    load_plugins(known.plugins)
    report = _find_function(known.function)(json.loads(tasks[number]), number, folder)
    _refuse_other_owner(folder, owner)
    with replacing(_report_path(work, number)) as path:
        path.write_text(seal(json.dumps({"checksum": NO_CHECKSUM, **report})) + "\n", encoding="utf-8")


def missing_tasks(folder: Path, phase: str) -> list[int]:
    """Numbers of the tasks of a phase that have no report.

    Raises:
        DataError: there is no such phase.
    """
    path = folder / WORK_FOLDER / phase / TASKS_FILE
    if not path.is_file():
        raise DataError(f"{path.parent}: no tasks here; the station that plans them makes this folder")
    with open(path, encoding="utf-8") as file:
        count = _read_header(file.readline(), path).count
    return [number for number in range(count) if not _report_path(path.parent, number).is_file()]


def add_counts(reports: Sequence[Report], name: str) -> Any:
    """One count summed over reports: a number, or numbers by key, sorted."""
    values = [report[name] for report in reports]
    if not values or not isinstance(values[0], dict):
        return sum(values)
    total: dict[str, Any] = {}
    for value in values:
        for key, number in value.items():
            total[key] = total.get(key, 0) + number
    return dict(sorted(total.items()))


class replacing:
    """Write a file under a name of one's own, and put it in its place when the block ends well.

        with replacing(folder / "part-00000.parquet") as path: ...

    A reader sees the old file, the new one or none; two processes that write the same file do not meet. Its folder is
    made, unless that is to be there already.
    """

    def __init__(self, path: Path, *, make_folder: bool = True):
        self._path, self._make_folder = path, make_folder
        self._partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        if self._make_folder:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._partial

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                os.replace(self._partial, self._path)
        finally:
            self._partial.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _read_lines(path: Path, _changed: int) -> list[str]:
    """The list of tasks, read once for all tasks of a phase that one worker does."""
    return path.read_text(encoding="utf-8").splitlines()


def _read_header(line: str, path: Path) -> _Header:
    return parse_record(line, _Header, path, "run the same command again, which writes it anew")


def _report_path(work: Path, number: int) -> Path:
    return work / f"{number:05d}.json"


def _read_report(work: Path, number: int) -> Report | None:
    """What a task reported; None if it is not done, or its report is not what was written."""
    try:
        text = _report_path(work, number).read_bytes().decode().rstrip("\n")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    if not is_sealed(text):
        return None
    report = json.loads(text)
    del report["checksum"]
    return report


def _finished_report(work: Path, number: int) -> Report:
    """The report of a task that is said to be done."""
    report = _read_report(work, number)
    if report is None:
        path = _report_path(work, number)
        raise UserError(f"{path}: not what was written; see to the disk, and run the same command again to go on")
    return report


def _owner(folder: Path) -> str | None:
    """Who has the folder of a station; None where nobody said so."""
    try:
        return (folder / WORK_FOLDER / OWNER_FILE).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return None


def _refuse_other_owner(folder: Path, owner: str | None) -> None:
    if _owner(folder) != owner:
        raise UserError(f"{folder}: another process has taken over here; what was finished before is kept for it")


def _find_function(name: str) -> TaskFunction:
    module, _, function = name.partition(":")
    assert module.startswith("megalite."), module
    return getattr(importlib.import_module(module), function)
