"""`megalite mup`: rates that hold at any width."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.paths import Drawing

if TYPE_CHECKING:
    from megalite.studies.mup_check import Check

app = typer.Typer(help="Check the maximal update parametrization (model.mup).", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Check the maximal update parametrization (model.mup)."""


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that replace the file's: section.key=value ...", show_default=False),
    ] = None,
    widths: Annotated[str, typer.Option(help="Hidden sizes, separated by commas.")] = "64,128,256,512",
    steps: Annotated[int, typer.Option(min=1, help="Updates on one batch.")] = 6,
    lr: Annotated[float, typer.Option(min=0.0, help="Rate of these updates.")] = 1e-3,
    vocab_size: Annotated[int, typer.Option(min=2, help="Vocabulary of the models.")] = 128,
    out: Drawing = None,
) -> int:
    """Coordinate check: train the model at several widths for a few steps, with muP and without, and compare how far
    each layer's output moves.

    Exit code 1 when muP is not flat.
    """
    from megalite.data.run_config import load_run
    from megalite.monitor.curves import draw
    from megalite.studies.mup_check import check_mup, parse_widths

    found = check_mup(
        load_run(config, overrides or ()), parse_widths(widths), num_steps=steps, lr=lr, vocab_size=vocab_size
    )
    _print(found)
    if out is not None:
        draw(out, found.curves(), x_label="hidden_size", title=f"{config.stem}: {steps} steps", log="xy")
        typer.echo(f"drawn into {out}")
    return 0 if found.is_flat else 1


def _print(found: Check) -> None:
    from rich import box
    from rich.console import Console

    from megalite.page.terminal import FittingTable

    widths = [str(run.width) for run in found.with_mup]
    for title, runs in (("with muP", found.with_mup), ("without", found.without)):
        table = FittingTable(title=f"mean change of an output, {title}", title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("layer", *widths, "slope"):
            table.add_column(column, justify="left" if column == "layer" else "right")
        for layer, slope in found.slopes(runs).items():
            table.add_row(layer, *(f"{run.changes[layer]:.2e}" for run in runs), f"{slope:+.2f}")
        Console().print(table)
    typer.echo("flat across widths with muP" if found.is_flat else "not flat across widths with muP")
