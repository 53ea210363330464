"""`megalite schedule`: the learning rate and the batch size of a config, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.paths import named

app = typer.Typer(help="Look at the schedule of a config.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Look at the schedule of a config."""


@app.command()
def plot(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that replace the file's: section.key=value ...", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=named, help="Draw it into this file, .svg or .png.", show_default=False),
    ] = None,
) -> None:
    """Draw the learning rate over the steps, and the batch size where it grows: as text, and into a file if asked."""
    from megalite.config.load import load_config
    from megalite.config.plan import default_world_size
    from megalite.config.validate import validate
    from megalite.monitor.curves import draw, sketch
    from megalite.monitor.schedule_curves import schedule_curves

    loaded = load_config(config, overrides or ())
    validate(loaded, default_world_size(loaded))
    curves = schedule_curves(loaded)
    for curve in curves:
        typer.echo(sketch(curve))
    if out is not None:
        draw(out, curves, x_label="step", title=f"{config.stem}: {loaded.schedule.name}")
        typer.echo(f"drawn into {out}")
