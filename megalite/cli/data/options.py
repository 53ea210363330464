"""What the verbs of `megalite data` share: options, settings from the command line, where tasks run, what is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from megalite.cli.paths import named
from megalite.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

    from megalite.config.schema import Section
    from megalite.corpus.corpus import Corpus
    from megalite.progress import ProgressReporter
    from megalite.stations.runners.slurm import SlurmArray
    from megalite.stations.station import StationResult
    from megalite.stations.tasks import Runner

REPORT_WIDTH = 160
"""Columns of a report that does not go to a terminal."""

SectionT = TypeVar("SectionT", bound="Section")

Documents = Annotated[
    list[str],
    typer.Argument(help="Files, folders or URLs: jsonl, parquet, csv, warc, text (.gz, .zst), or a station's folder."),
]
StationFolders = Annotated[list[str], typer.Argument(help="Folders of earlier stations, as `clean` leaves them.")]
Out = Annotated[Path, typer.Option("--out", callback=named, help="Folder to make.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes. (default: all cores)", show_default=False)]
TextField = Annotated[str, typer.Option(help="Field or column that holds the text.")]
Include = Annotated[list[str] | None, typer.Option(help="File-name pattern to read from folders; may be repeated.")]
KeepFields = Annotated[
    list[str] | None,
    typer.Option("--keep-field", help="Field to carry along as metadata, as url or a score; may be repeated."),
]
ValidFraction = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of documents held out for validation.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any setting of the station; may be repeated."),
]

SlurmJobs = Annotated[int, typer.Option(min=1, help="Workers on a Slurm cluster at most: elements of array jobs.")]
SlurmCommand = Annotated[
    str | None,
    typer.Option(
        help='Starts megalite on a node, as "apptainer exec image.sif megalite". (default: this Python)',
        show_default=False,
    ),
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option(metavar="OPTION", help="Option of sbatch, as --sbatch=--time=4:00:00; may be repeated."),
]


class SlurmOptions(NamedTuple):
    """What was said about workers on a Slurm cluster."""

    jobs: int
    command: str | None
    sbatch: list[str] | None
    home: Path

    def runner(self) -> SlurmArray:
        """The workers, to be used as a context manager."""
        from megalite.slurm_quoting import split_command
        from megalite.stations.runners.slurm import SlurmArray

        command = split_command(self.command or "", "--slurm-command")
        return SlurmArray(self.jobs, self.home, self.sbatch or (), command)


class Working(NamedTuple):
    """What a station is run with."""

    progress: ProgressReporter
    runner: Runner


@contextmanager
def working(workers: int | None) -> Iterator[Working]:
    """Progress on this terminal, and a pool of processes."""
    from megalite.progress import progress_on
    from megalite.stations.runners import LocalPool, default_workers
    from megalite.stations.runners.signals import stopping_in_order

    with progress_on() as progress, stopping_in_order(), LocalPool(workers or default_workers()) as runner:
        yield Working(progress, runner)


def make_settings(kind: type[SectionT], assignments: list[str] | None, /, **given: Any) -> SectionT:
    """Settings from `--set` and from the options that were given; the others keep their defaults.

    Raises:
        ConfigError: everything that is wrong with them.
    """
    from megalite.config.load import build
    from megalite.config.yaml_source import command_line_source

    options = {name: value for name, value in given.items() if value is not None}
    source = command_line_source(assignments or ())
    source.places |= {(name,): f"--{name.replace('_', '-')}" for name in options}
    source.data = {**options, **source.data}
    return build(kind, source)


def open_corpus(
    inputs: Sequence[str | Path],
    text_field: str = "text",
    include: list[str] | None = None,
    keep_fields: list[str] | None = None,
) -> Corpus:
    """The documents of some files and folders."""
    from megalite.corpus.corpus import Corpus
    from megalite.corpus.source import DocumentSource

    if "" in inputs:
        raise DataError("found an empty path among the inputs; name a file or folder, as . for the current one")
    given = {"text_field": text_field, "include": tuple(include or ()), "keep_fields": tuple(keep_fields or ())}
    return Corpus([DocumentSource.model_validate({"path": path, **given}) for path in inputs])


def run_station(
    station: Callable[..., StationResult],
    corpus: Corpus,
    out: Path,
    config: Section,
    workers: int | None,
    **options: Any,
) -> None:
    """Run a station of documents over a pool of processes, and say what came of it."""
    with working(workers) as (progress, runner):
        result = station(corpus, out, config, runner=runner, progress=progress, **options)
    print_result(out, result)


def report_console() -> Console:
    """Where wide tables go: as wide as the terminal, or REPORT_WIDTH in a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else REPORT_WIDTH)


def print_result(out: Path, result: StationResult) -> None:
    """One line of counts.

    Raises:
        DataError: no document is left.
    """
    state = "already there" if result.reused else "done"
    is_empty = result.manifest.counts.get("documents") == 0
    if is_empty:
        state = "nothing is left"
    counts = ", ".join(f"{name} {value}" for name, value in result.manifest.counts.items() if value not in ({}, []))
    typer.echo(f"{out}: {state}: {counts}")
    if is_empty:
        raise DataError(
            f"{out}: no document came out of this station, so there is nothing for the next one; its counts say why: "
            "change its settings or its input"
        )
