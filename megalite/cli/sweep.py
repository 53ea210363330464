"""`megalite sweep`: many runs of one config, to find out which settings are best."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megalite.cli.data.options import report_console
from megalite.cli.launch import read_profile
from megalite.cli.paths import named

if TYPE_CHECKING:
    from megalite.sweeps.record import SweepBook
    from megalite.sweeps.settings import SweepConfig
    from megalite.sweeps.sweep import Prepared, TrialRunner

BEST_SHOWN = 20
POINTS_SHOWN = 100


def sweep(
    file: Annotated[
        Path, typer.Argument(help="A sweep file (docs/sweep.md), or a run's YAML file.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings of all trials: section.key=value ...", show_default=False),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(help="Vary a key: 'optimizer.lr=[1e-3, 3e-3]', or a range {low: , high: }.", show_default=False),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", callback=named, help="Folder of the sweep. (default: the file's, or runs/sweep-NAME)"),
    ] = None,
    method: Annotated[
        Literal["grid", "random", "tpe"] | None, typer.Option(help="(default: the file's, or grid)", show_default=False)
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="For random and tpe.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the points drawn.", show_default=False)] = None,
    metric: Annotated[
        str | None, typer.Option(help="validation, validation/SET, task/NAME, loss ...", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=1000, help="Trials at a time.")] = 1,
    cluster: Annotated[
        str | None, typer.Option(help="Run trials as Slurm jobs: a cluster profile, or auto.", show_default=False)
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Of each job.", show_default=False)] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="Replace a key of the cluster's profile.", show_default=False),
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try again what failed before.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check every trial and start none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Train a config with many settings, and show which are best. Given again, it goes on where it was.

    Every trial is an ordinary run folder below the sweep's; sweep.json and sweep.html there have the result.
    """
    from megalite.errors import EXIT_DONE, EXIT_REQUEUE
    from megalite.sweeps.settings import load_sweep
    from megalite.sweeps.sweep import SweepRun, prepare

    given = {"dir": folder and str(folder), "method": method, "trials": trials, "seed": seed, "metric": metric}
    loaded = load_sweep(file, overrides or (), over or (), given)
    prepared = prepare(loaded, has_device=cluster is None)
    runner = make_runner(prepared, jobs, cluster, nodes, settings or [])
    if not as_json:
        typer.echo(_plan_in_words(prepared))
    if check:
        typer.echo(_plan_as_json(prepared) if as_json else _points_in_words(prepared))
        return EXIT_DONE
    work = SweepRun(prepared, runner, lambda line: typer.echo(line, err=as_json), retry_failed=retry_failed)
    book = work.run()
    _show(loaded, book, as_json=as_json)
    return EXIT_REQUEUE if work.was_stopped else EXIT_DONE


def make_runner(
    prepared: Prepared, jobs: int, cluster: str | None, nodes: int | None, settings: list[str]
) -> TrialRunner:
    """Where trials run: here, or on a cluster on which all of them have been placed.

    Raises:
        UserError: the cluster's profile is wrong, or a trial does not fit it.
    """
    from megalite.errors import UserError
    from megalite.sweeps.cluster import ClusterRunner
    from megalite.sweeps.local import LocalRunner

    loaded = prepared.settings
    if cluster is None:
        for name, value in (("--nodes", nodes), ("--set", settings)):
            if value:
                raise UserError(f"{name}: it says how Slurm jobs are made; give --cluster too")
        return LocalRunner(loaded.dir, loaded.metric, jobs)
    runner = ClusterRunner(read_profile(cluster, settings), loaded.metric, jobs, nodes)
    runner.check(list(prepared.trials))
    return runner


def _show(loaded: SweepConfig, book: SweepBook, *, as_json: bool) -> None:
    """Write the page, and print the result."""
    from megalite.sweeps.page import write_sweep_page

    page = write_sweep_page(loaded, book)
    if as_json:
        typer.echo(_json(loaded, book))
    else:
        _print(loaded, book)
        typer.echo(f"{page} ({page.stat().st_size / 1000:,.0f} kB)")


def _plan_in_words(prepared: Prepared) -> str:
    loaded = prepared.settings
    if loaded.method == "tpe":
        return f"{loaded.trials} trials drawn by TPE in {loaded.dir}; the ends of the space are sound"
    said = f"{len(prepared.trials)} trials in {loaded.dir}"
    if prepared.rungs:
        said += f", halved at steps {', '.join(f'{each:,}' for each in prepared.rungs[:-1])} of {prepared.rungs[-1]:,}"
    return said


def _points_in_words(prepared: Prepared) -> str:
    """A line for each trial that was checked, for the first of many."""
    told = [f"{each.name}: {each.about}" for each in prepared.trials[:POINTS_SHOWN]]
    left = len(prepared.trials) - len(told)
    return "\n".join(told + ([f"and {left} more; --json prints all"] if left else []))


def _plan_as_json(prepared: Prepared) -> str:
    import json

    loaded = prepared.settings
    return json.dumps(
        {
            "dir": str(loaded.dir),
            "method": loaded.method,
            "rungs": list(prepared.rungs),
            "checked": [{"name": each.name, "point": each.about} for each in prepared.trials],
        }
    )


def _print(loaded: SweepConfig, book: SweepBook) -> None:
    from megalite.page.terminal import figures
    from megalite.sweeps.space import label_of, overrides_of
    from megalite.sweeps.table import in_order

    records = in_order(loaded, book)
    names = [each.name for each in loaded.dimensions()]
    table = figures("trial", *names, loaded.metric, "state", "step", "minutes")
    for each in records[:BEST_SHOWN]:
        value = "–" if each.value is None else f"{each.value:.4f}"
        cells = (*(label_of(each.point[name]) for name in names), value, each.state, f"{each.steps:,}")
        table.add_row(str(each.number), *cells, f"{each.seconds / 60:.1f}")
    report_console().print(table)
    if len(records) > BEST_SHOWN:
        typer.echo(f"the best {BEST_SHOWN} of {len(records)}; all are in {loaded.dir / 'sweep.json'}")
    if records and records[0].state == "done":
        typer.echo(f"best: {shlex.join(overrides_of(records[0].point))}")


def _json(loaded: SweepConfig, book: SweepBook) -> str:
    import json

    from megalite.sweeps.space import overrides_of
    from megalite.sweeps.table import in_order

    records = in_order(loaded, book)
    best = records[0] if records and records[0].state == "done" else None
    return json.dumps(
        {
            "metric": loaded.metric,
            "goal": loaded.goal,
            "best": None if best is None else {**best.model_dump(), "overrides": list(overrides_of(best.point))},
            "trials": [each.model_dump() for each in records],
        }
    )
