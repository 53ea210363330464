"""Writing a report: runs in, one file out."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from megalite.errors import UserError
from megalite.report.page import render
from megalite.report.run_data import RunData, read_runs

FILE_NAME = "report.html"


def write_report(folders: Sequence[Path], out: Path | None = None) -> tuple[Path, list[RunData]]:
    """Write the report of some runs.

    Args:
        folders: of the runs, at least one.
        out: the file; None for `report.html` in the folder of a single run, or here for several.

    Returns:
        The file, and the runs that are in it.

    Raises:
        UserError: a folder is no run's or has no step yet, or the file cannot be written.
    """
    runs = read_runs(folders)
    out = out or (folders[0] / FILE_NAME if len(folders) == 1 else Path(FILE_NAME))
    page = render(runs, time.time())
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error}); name another file with -o") from error
    return out, runs
