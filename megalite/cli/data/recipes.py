"""The verbs that run whole recipes: here, on a Slurm cluster or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.data.options import (
    Sbatch,
    SlurmCommand,
    SlurmJobs,
    SlurmOptions,
    Workers,
    Working,
    report_console,
    working,
)

if TYPE_CHECKING:
    from megalite.corpus.prepare import FinishedStation


class RunnerKind(str, Enum):
    """Where the tasks of the stations run."""

    local = "local"
    ray = "ray"
    slurm = "slurm"


def prepare(
    recipe: Annotated[Path, typer.Argument(help="A YAML file as in configs/data/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value or section.key=value ...")] = None,
    workers: Workers = None,
    runner: Annotated[RunnerKind, typer.Option(help="Where the tasks run.")] = RunnerKind.local,
    ray_address: Annotated[str, typer.Option(help="Of a running Ray cluster; `local` starts one here.")] = "auto",
    slurm_jobs: SlurmJobs = 16,
    slurm_command: SlurmCommand = None,
    sbatch: Sbatch = None,
) -> None:
    """Run all stations of a recipe; finished ones are kept."""
    from megalite.corpus import prepare as stations
    from megalite.corpus.compile_ahead import compiling_ahead
    from megalite.stations.runners import default_workers

    settings = stations.load_recipe(recipe, overrides or ())
    slurm = SlurmOptions(slurm_jobs, slurm_command, sbatch, settings.out / "slurm")
    several_here = runner is RunnerKind.local and (workers or default_workers()) > 1
    with (
        _running(runner, workers, ray_address, slurm) as (progress, chosen),
        compiling_ahead(settings) if several_here else nullcontext(),
    ):
        done = stations.prepare(settings, runner=chosen, progress=progress)
    _print_table(settings.out, done)


def work(
    home: Annotated[Path, typer.Argument(help="Folder in which the driver says what is to do: OUT/slurm.")],
    name: Annotated[str, typer.Option(help="Of this worker; never used before in this folder.")],
    processes: Annotated[int, typer.Option(min=1, help="Tasks to do at a time.")] = 1,
) -> None:
    """Do tasks for a driver elsewhere: what each element of a Slurm array runs."""
    from megalite.stations.runners.worker import work

    work(home, name, processes)


def mix_plan(
    config: Annotated[Path, typer.Argument(help="A training config.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
) -> None:
    """Show how many tokens of each source a run will read, stage by stage, and how often each source is repeated."""
    from megalite.config.batch_sizes import batch_sizes
    from megalite.config.length_stages import length_stages
    from megalite.data.mix_plan import render
    from megalite.data.run_config import load_run
    from megalite.data.samples import open_training_samples

    settings = load_run(config, overrides or [])
    sizes = batch_sizes(settings.batch)
    for stage in length_stages(settings):
        num_samples = sizes.first_sample(stage.last_step + 1) - sizes.first_sample(stage.first_step)
        report_console().print(render(open_training_samples(stage.config).plan(num_samples)))


@contextmanager
def _running(kind: RunnerKind, workers: int | None, ray_address: str, slurm: SlurmOptions) -> Iterator[Working]:
    """Progress on this terminal, and the runner that was asked for."""
    from megalite.progress import progress_on

    if kind is RunnerKind.local:
        with working(workers) as chosen:
            yield chosen
    elif kind is RunnerKind.ray:
        from megalite.stations.runners.ray import RayCluster

        with RayCluster(ray_address, num_cpus=workers) as cluster, progress_on() as progress:
            yield Working(progress, cluster)
    else:
        with slurm.runner() as array, progress_on() as progress:
            yield Working(progress, array)


def _print_table(folder: Path, done: list[FinishedStation]) -> None:
    from megalite.page.terminal import FittingTable

    table = FittingTable(
        "station", "documents", "text MB", "tokens", "sequences", "", title=f"{folder}", title_justify="left"
    )
    for station in done:
        counts = station.result.manifest.counts
        documents, tokens, samples = (
            f"{counts[n]:,}" if n in counts else "" for n in ("documents", "tokens", "samples")
        )
        megabytes = f"{counts['text_bytes'] / 1e6:,.1f}" if "text_bytes" in counts else ""
        state = "kept" if station.result.reused else "made"
        table.add_row(station.name, documents, megabytes, tokens, samples, state)
    report_console().print(table)
