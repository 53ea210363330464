"""`megalite train`, and what trains besides: `lr-find` and `verify-resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.paths import Drawing


def train(
    config: Path = typer.Argument(..., help="The run's YAML file."),
    overrides: list[str] = typer.Argument(None, help="Settings that replace the file's: section.key=value ..."),
    max_failures: int = typer.Option(
        0,
        "--max-failures",
        min=0,
        help="Watch the ranks and start again after a fault or a hang, until so many have happened in a row without a "
        "new checkpoint.",
    ),
    force: bool = typer.Option(False, "--force", help="Start also what does not fit this machine's memory and cores."),
    no_verify: bool = typer.Option(
        False,
        "--no-verify",
        help="Do not compare the Hugging Face folder of train.init_from with transformers before the first step.",
    ),
) -> int:
    """Train a model, or go on with a run that was stopped.

    Starts pp x dp x cp x tp ranks on this machine; under srun, torchrun or mpirun it is one of the ranks given.
    """
    from megalite.train.fork_server import ForkServer
    from megalite.train.place import given_place

    overrides = [*(overrides or ()), *(["train.verify_init_from=false"] if no_verify else [])]
    place = given_place()
    if place is None:
        with ForkServer() as server:  # imports while we check
            from megalite.config.plan import default_world_size
            from megalite.data.run_config import load_run
            from megalite.train.local import train_locally

            loaded = load_run(config, overrides)
            world_size = default_world_size(loaded)
            return train_locally(loaded, world_size, max_failures=max_failures, is_forced=force, server=server)

    from megalite.data.run_config import load_run
    from megalite.train.worker import leave, run_rank

    code = run_rank(load_run(config, overrides), place, is_forced=force)
    leave(code)  # Python's own exit takes torch's threads apart, and may abort over it


def lr_find(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that replace the file's: section.key=value ...", show_default=False),
    ] = None,
    first: Annotated[float, typer.Option("--from", help="The lowest rate.")] = 1e-6,
    last: Annotated[float, typer.Option("--to", help="The highest rate.")] = 1.0,
    steps: Annotated[int, typer.Option(min=2, help="Updates between them.")] = 100,
    out: Drawing = None,
) -> None:
    """Raise the learning rate step by step until the loss blows up, and suggest a peak rate.

    Trains on the run's own ranks from where the run stands, and leaves the run as it was.
    """
    from megalite.config.plan import default_world_size
    from megalite.data.run_config import load_run
    from megalite.errors import UserError
    from megalite.monitor.curves import Curve, draw, sketch
    from megalite.studies.lr_finder import Sweep, find_rate

    loaded = load_run(config, overrides or ())
    found = find_rate(loaded, default_world_size(loaded), Sweep(first, last, steps))
    if found is None:
        return
    curve = Curve("smoothed loss over the learning rate", found.rates, found.losses, marks=(found.suggestion,))
    typer.echo(f"{len(found.rates)} updates from {found.origin}")
    typer.echo(sketch(curve, log_x=True))
    if not found.fell:
        raise UserError(f"the loss never fell: it is lowest at the first rate, {found.rates[0]:g}; lower --from")
    typer.echo(f"lowest loss at {found.lowest:.2g}, steepest fall at {found.steepest:.2g}")
    low, high = found.around
    typer.echo(f"suggestion: optimizer.lr={found.suggestion:g}; the best lies between {low:.2g} and {high:.2g}")
    if out is not None:
        draw(out, [curve], x_label="learning rate", title=f"{config.stem}: {found.suggestion:g} suggested", log="x")
        typer.echo(f"drawn into {out}")


def verify_resume(
    config: Path = typer.Argument(..., help="The run's YAML file."),
    overrides: list[str] = typer.Argument(None, help="Settings that replace the file's: section.key=value ..."),
    steps: int = typer.Option(3, "--steps", min=1, help="Steps before and after the restart."),
) -> int:
    """Prove that a restart changes nothing: train 2 N steps, and N + restart + N, and compare bit for bit.

    Runs in temporary folders; the run's own folder is not touched. Exit code 0 when all is equal, 1 when not.
    """
    import tempfile

    from rich.console import Console

    from megalite.errors import EXIT_DONE, EXIT_FAULT, UserError
    from megalite.page.terminal import FittingTable
    from megalite.studies.verify_resume import verify_resume
    from megalite.train.place import given_place

    if given_place() is not None:
        raise UserError("verify-resume starts its own ranks; run it by itself, not under srun or torchrun")
    with tempfile.TemporaryDirectory(prefix="megalite-resume-") as folder:
        report = verify_resume(config, overrides or (), steps, Path(folder))
    table = FittingTable("compared", f"steps 1-{steps}", f"after the restart, {steps + 1}-{2 * steps}", box=None)
    for finding in report.findings:
        cells = (finding.until_restart, finding.after_restart)
        table.add_row(finding.what, *(f"[red]differs[/]: {cell}" if cell else "[green]equal[/]" for cell in cells))
    Console().print(table)
    typer.echo(report.verdict)
    return EXIT_DONE if report.is_equal else EXIT_FAULT
