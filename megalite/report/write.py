"""Writing a report: runs in, one file out."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from megalite.errors import UserError
from megalite.page.numbers import count
from megalite.progress import NoProgress, ProgressReporter
from megalite.report.page import render
from megalite.report.run_data import METRICS, RunData, read_runs

FILE_NAME = "report.html"

MB = 1e6


def metrics_bytes(folders: Sequence[Path]) -> int:
    """How much there is to read, of runs that are there."""
    files = (folder / METRICS for folder in folders)
    return sum(file.stat().st_size for file in files if file.is_file())


def write_report(
    folders: Sequence[Path], out: Path | None = None, *, progress: ProgressReporter | None = None
) -> tuple[Path, list[RunData]]:
    """Write the report of some runs.

    Args:
        folders: of the runs, at least one.
        out: the file; None for `report.html` in the folder of a single run, or here for several.
        progress: is told what is being done; None for nobody.

    Returns:
        The file, and the runs that are in it.

    Raises:
        UserError: a folder is no run's or has no step yet, or the file cannot be written.
    """
    progress = progress or NoProgress()
    progress.start("reading", metrics_bytes(folders) / MB, "MB")
    runs = read_runs(folders, lambda num_bytes: progress.advance(num_bytes / MB))
    num_steps = sum(len(run.columns["step"]) for run in runs)
    progress.finish(f"{count(num_steps)} steps of {len(runs)} run{'s' if len(runs) > 1 else ''}")
    out = out or (folders[0] / FILE_NAME if len(folders) == 1 else Path(FILE_NAME))
    progress.start("drawing", None, "charts")
    page = render(runs, time.time())
    progress.finish(f"{len(page) / 1000:,.0f} kB")
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error}); name another file with -o") from error
    return out, runs
