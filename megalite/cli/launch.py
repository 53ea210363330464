"""`megalite launch`: a run as Slurm jobs that go on until it is done; and looking after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from typer._click import Context  # older Typers have none, and take that of click

    from megalite.slurm.cluster import ClusterConfig
    from megalite.slurm.placement import Placement

DEFAULT_COMMAND = "run"

NODES_SHOWN = 8


class _Group(TyperGroup):
    """Takes `megalite launch CONFIG.yaml` for `megalite launch run CONFIG.yaml`."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group, help="Run a config on a Slurm cluster: `launch CONFIG --cluster PROFILE`.", no_args_is_help=True
)

RunFolder = Annotated[Path, typer.Argument(help="The run's folder.", show_default=False)]


@app.command(DEFAULT_COMMAND)
def run(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that replace the file's: section.key=value ...", show_default=False),
    ] = None,
    cluster: Annotated[str, typer.Option(help="A cluster profile (configs/clusters/), or auto[:PARTITION].")] = "auto",
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes for ranks; dp follows.", show_default=False)] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Replace a key of the profile: time_limit=4:00:00")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show placement and script, submit nothing.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show the job's log until the run ends.")] = False,
) -> None:
    """Check, write down and submit a run; it goes on over as many jobs as it takes."""
    from megalite.data.run_config import load_run
    from megalite.slurm import launch as launching

    loaded = load_run(config, overrides or ())
    profile = read_profile(cluster, settings or [])
    if dry_run:
        planned = launching.plan_launch(loaded, profile, nodes)
        _print_placement(planned.placement, profile)
        typer.echo(planned.script)
        return
    planned, job = launching.launch(loaded, profile, nodes)
    _print_placement(planned.placement, profile)
    run_dir = planned.folder.run_dir
    typer.echo(f"job {job} submitted; `megalite launch status {run_dir}` tells how it goes")
    if follow:
        _follow(run_dir)


@app.command()
def status(folder: RunFolder) -> None:
    """Say where a run stands: jobs, nodes, step, speed, last checkpoint, and where its time went."""
    from megalite.slurm.status import describe

    for line in describe(folder):
        typer.echo(line)


@app.command()
def logs(
    folder: RunFolder,
    rank: Annotated[int | None, typer.Option(min=0, help="A rank's output; the supervisor's when left out.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="From the end.")] = 40,
) -> None:
    """Show the end of the supervisor's log, or of a rank's in the last attempt."""
    from megalite.slurm.status import log_path, read_tail

    path = log_path(folder, rank)
    typer.echo(f"==> {path}")
    typer.echo(read_tail(path, lines))


@app.command()
def stop(
    folder: RunFolder,
    now: Annotated[bool, typer.Option("--now", help="Cancel its jobs instead of letting it save.")] = False,
) -> None:
    """Ask a run to save and stop, and its chain of jobs to end."""
    from megalite.slurm.status import ask_to_stop

    typer.echo(ask_to_stop(folder, at_once=now))


def read_profile(cluster: str, settings: list[str]) -> ClusterConfig:
    """A cluster's profile from its file, or as Slurm describes it (`auto[:PARTITION]`)."""
    from megalite.config.load import build
    from megalite.config.yaml_source import command_line_source
    from megalite.slurm.cluster import ClusterConfig, load_cluster
    from megalite.slurm.detect import detect_cluster

    name, _, partition = cluster.partition(":")
    if name != "auto":
        return load_cluster(Path(cluster), settings)
    source = command_line_source(settings)
    source.data = {**detect_cluster(partition or None).model_dump(mode="json"), **source.data}
    return build(ClusterConfig, source)


def _print_placement(placement: Placement, cluster: ClusterConfig) -> None:
    from rich.console import Console
    from rich.markup import escape

    from megalite.page.terminal import figures

    mesh, console = placement.mesh, Console()
    spares = f" and {cluster.spares} spare" if cluster.spares else ""
    console.print(
        f"[bold]{mesh.world_size} ranks on {placement.num_nodes} nodes{spares}[/bold] of {escape(cluster.name)}: "
        f"pp {mesh.pp} x dp {mesh.dp} x cp {mesh.cp} x tp {mesh.tp}, {cluster.time_limit} a job"
    )
    table = figures("node", "ranks", "stage", "dp", "tp")
    shown: Sequence[int] = range(placement.num_nodes)
    if placement.num_nodes > NODES_SHOWN:
        shown = [*range(NODES_SHOWN - 1), placement.num_nodes - 1]
    for node in shown:
        if node == placement.num_nodes - 1 and placement.num_nodes > NODES_SHOWN:
            table.add_row("...")
        ranks, spans = placement.ranks_of(node), placement.spans(node)
        cells = [
            f"{first}" if first == last else f"{first}-{last}" for first, last in (spans[a] for a in ("pp", "dp", "tp"))
        ]
        table.add_row(str(node), f"{ranks.start}-{ranks.stop - 1}", *cells)
    console.print(table)


def _follow(run_dir: Path) -> None:
    """Print the supervisor's log as it grows, until the run has ended; Ctrl-C leaves the run alone."""
    from megalite.slurm.status import follow_log

    try:
        for line in follow_log(run_dir):
            typer.echo(line)
    except KeyboardInterrupt:
        typer.echo(f"the run goes on; `megalite launch status {run_dir}`, `megalite launch stop {run_dir}`")
