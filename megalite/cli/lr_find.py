"""`megalite lr-find`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.paths import named


def lr_find(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that replace the file's: section.key=value ...", show_default=False),
    ] = None,
    first: Annotated[float, typer.Option("--from", help="The lowest rate.")] = 1e-6,
    last: Annotated[float, typer.Option("--to", help="The highest rate.")] = 1.0,
    steps: Annotated[int, typer.Option(min=2, help="Updates between them.")] = 100,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=named, help="Draw it into this file, .svg or .png.", show_default=False),
    ] = None,
) -> None:
    """Raise the learning rate step by step until the loss blows up, and suggest a peak rate.

    Trains on the run's own ranks from where the run stands, and leaves the run as it was.
    """
    from megalite.config.load import load_config
    from megalite.config.plan import default_world_size
    from megalite.monitor.curves import Curve, draw, sketch
    from megalite.train.lr_finder import Sweep, find_rate

    loaded = load_config(config, overrides or ())
    found = find_rate(loaded, default_world_size(loaded), Sweep(first, last, steps))
    if found is None:
        return
    curve = Curve("smoothed loss over the learning rate", found.rates, found.losses, marks=(found.suggestion,))
    typer.echo(f"{len(found.rates)} updates from {found.origin}")
    typer.echo(sketch(curve, log_x=True))
    typer.echo(f"lowest loss at {found.lowest:.2g}, steepest fall at {found.steepest:.2g}")
    low, high = found.around
    typer.echo(f"suggestion: optimizer.lr={found.suggestion:g}; the best lies between {low:.2g} and {high:.2g}")
    if out is not None:
        draw(out, [curve], x_label="learning rate", title=f"{config.stem}: {found.suggestion:g} suggested", log="x")
        typer.echo(f"drawn into {out}")
