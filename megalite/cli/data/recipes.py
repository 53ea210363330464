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
from megalite.errors import UserError

if TYPE_CHECKING:
    from megalite.corpus.prepare import FinishedStation
    from megalite.data.mix_plan import MixPlan
    from megalite.data.samples import Samples


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
    from megalite.checkpoint import catalog
    from megalite.config.batch_sizes import batch_sizes
    from megalite.config.length_stages import length_stages
    from megalite.data.mix_plan import render
    from megalite.data.run_config import load_run
    from megalite.data.samples import open_training_samples

    settings = load_run(config, overrides or [])
    sizes = batch_sizes(settings.batch)
    newest, stages = catalog.latest(settings.run.dir), length_stages(settings)
    for stage in stages:
        num_samples = sizes.first_sample(stage.last_step + 1) - sizes.first_sample(stage.first_step)
        samples = open_training_samples(stage.config)
        plan = samples.plan(num_samples)
        if newest is not None and len(stages) == 1:
            plan = _plan_on(newest, samples, num_samples) or plan
        report_console().print(render(plan))
    if newest is not None and len(stages) > 1:
        typer.echo(f"this is a run from its beginning; what the one in {settings.run.dir} has read is not looked at")


def _plan_on(checkpoint: Path, samples: Samples, total_samples: int) -> MixPlan | None:
    """What a run reads that goes on from a checkpoint, and has said so; None where it cannot."""
    from megalite.checkpoint.data_so_far import go_on_with_data
    from megalite.checkpoint.format import read_manifest

    try:
        progress, _ = go_on_with_data(checkpoint, read_manifest(checkpoint), samples)
    except UserError as error:
        typer.echo(f"{error}\nshown is a new run of this config", err=True)
        return None
    typer.echo(f"the run goes on from {checkpoint}; stage 1 is the {progress.num_samples:,} sequences that it has read")
    return samples.following(progress.account).plan(total_samples, progress.consumed)


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
