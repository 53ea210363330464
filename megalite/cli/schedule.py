"""`megalite schedule`: what a config makes of its learning rate and of its pipeline, drawn before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.config import ASSUMED_VOCAB_SIZE, ConfigFile, Overrides
from megalite.cli.data.options import report_console
from megalite.cli.paths import Drawing, named_file, not_an_input

MIN_COLUMNS = 40
"""Of a timeline, on the narrowest terminal."""

app = typer.Typer(help="Look at the schedules of a config.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Look at the schedules of a config: of its learning rate, and of its pipeline."""


@app.command()
def plot(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Drawing = None,
) -> None:
    """Draw the learning rate over the steps, and the batch size where it grows: as text, and into a file if asked."""
    from megalite.config.plan import default_world_size
    from megalite.config.validate import validate
    from megalite.data.run_config import load_run
    from megalite.monitor.curves import draw, sketch
    from megalite.monitor.schedule_curves import schedule_curves

    loaded = load_run(config, overrides or ())
    validate(loaded, default_world_size(loaded))
    curves = schedule_curves(loaded)
    for curve in curves:
        typer.echo(sketch(curve))
    if out is not None:
        draw(out, curves, x_label="step", title=f"{config.stem}: {loaded.schedule.name}")
        typer.echo(f"drawn into {out}")


@app.command()
def pipeline(
    config: ConfigFile,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks; pp x dp x cp x tp when not given.", show_default=False)
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Of a step; the run's own when not given.", show_default=False)
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=1, help="Vocabulary, where the config takes the tokenizer's.")
    ] = ASSUMED_VOCAB_SIZE,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=named_file, help="Draw it into this HTML file too.", show_default=False),
    ] = None,
) -> None:
    """Draw what each pipeline stage does when, and prove that every step ends.

    Times are the blocks' work as the config describes it; messages take none.
    """
    from megalite.config.pipeline import prove_pipeline
    from megalite.config.plan import default_world_size, make_plan
    from megalite.config.validate import validate
    from megalite.config.wording import counted
    from megalite.data.run_config import load_run
    from megalite.errors import ConfigError
    from megalite.page.write import write_page
    from megalite.planner.pipeline import describe, report_pipeline
    from megalite.planner.timeline import LEGEND, NAME_COLUMNS, draw_lines, draw_page

    not_an_input(out, config)
    loaded = load_run(config, overrides or ())
    num_ranks = world_size or default_world_size(loaded)
    validate(loaded, num_ranks)
    plan = make_plan(loaded, num_ranks, vocab_size)
    if plan.pp == 1:
        raise ConfigError([f"parallel.pp: {config} has no pipeline to draw; set it to 2 or more"])
    prove_pipeline(loaded, plan)
    count = micro_batches or plan.grad_accum_steps
    found = report_pipeline(loaded, plan, count)
    console = report_console()
    for line in draw_lines(found.timeline, max(MIN_COLUMNS, console.width - NAME_COLUMNS)):
        console.print(line, no_wrap=True, overflow="crop")
    facts = [*describe(found, loaded, plan), LEGEND]
    for fact in facts:
        console.print(fact, highlight=False)
    if out is not None:
        title = f"{config.stem}: {loaded.parallel.schedule}, {counted(count)}"
        write_page(out, draw_page(found.timeline, title, facts[:-1]))
        typer.echo(f"drawn into {out}")
