"""`megalite plan`: which layout for this model on that machine, before a GPU-hour is spent."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from megalite.cli.config import ASSUMED_VOCAB_SIZE, ConfigFile, Overrides, known_vocabulary
from megalite.cli.data.options import report_console
from megalite.cli.failure_options import DetectSeconds, Failures, RestartSeconds, SaveSeconds, given_faults, risks_of
from megalite.cli.paths import named_drawing, named_file, not_an_input
from megalite.cli.plan_tables import layouts_table, parts_table, scaling_table
from megalite.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from megalite.config.schema import Config
    from megalite.planner.backtest import Backtest
    from megalite.planner.estimate import Estimate
    from megalite.planner.machines import Machine
    from megalite.planner.scaling import Point

LAYOUTS = "layouts"
SHOWN_LAYOUTS = 10


Ranks = Annotated[
    int | None, typer.Option(min=1, max=10**6, help="Ranks; pp x dp x cp x tp when not given.", show_default=False)
]
MachineName = Annotated[str, typer.Option(help="A machine by its name in configs/machines, or a file of one's own.")]
VocabSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Vocabulary, where the config takes the tokenizer's; {ASSUMED_VOCAB_SIZE:,} otherwise.",
        show_default=False,
    ),
]
Top = Annotated[int | None, typer.Option(min=1, max=1000, help="Layouts to show.", show_default=str(SHOWN_LAYOUTS))]
Explain = Annotated[bool, typer.Option("--explain", help="Show what the seconds of each go into; JSON does always.")]
Price = Annotated[
    float | None,
    typer.Option(min=0.0, max=1e9, help="Of an hour of a rank, for what a run costs.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")]
TraceFile = Annotated[
    Path | None, typer.Option(callback=named_file, help="Write the first's timeline for Perfetto.", show_default=False)
]


class ConfigOrVerb(TyperGroup):
    """`megalite plan FILE ...` stands for `megalite plan layouts FILE ...`, with options before FILE or behind it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [LAYOUTS, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ConfigOrVerb,
    help="megalite plan CONFIG: the best layouts of a model on a machine, with seconds and memory (docs/plan.md).",
    no_args_is_help=True,
)


@app.command(LAYOUTS)
def layouts(
    config: ConfigFile,
    overrides: Overrides = None,
    machine: MachineName = "h100-sxm",
    world_size: Ranks = None,
    top: Top = None,
    as_is: Annotated[bool, typer.Option("--as-is", help="Judge the config's own layout alone.")] = False,
    explain: Explain = False,
    trace: TraceFile = None,
    failures: Failures = None,
    save_seconds: SaveSeconds = None,
    detect_seconds: DetectSeconds = None,
    restart_seconds: RestartSeconds = None,
    price: Price = None,
    vocab_size: VocabSize = None,
    as_json: AsJson = False,
) -> None:
    """Search the legal layouts of a config on so many ranks of a machine, and show the quickest that fit.

    Changed are tp, cp, ep, pp with its schedule, dp, ZeRO stage 1 or 3 (over all or over groups of nodes), micro-batch
    and recomputation, and where nothing fits optimizer.offload; the global batch and all else stay.
    """
    from megalite.config.plan import default_world_size
    from megalite.config.validate import validate
    from megalite.config.wording import counted
    from megalite.data.run_config import load_run
    from megalite.planner.estimate import estimate
    from megalite.planner.left_out import left_out_of_run, left_out_of_steps
    from megalite.planner.machines import load_machine
    from megalite.planner.memory import on_device
    from megalite.planner.nearest import what_helps
    from megalite.planner.whole_run import whole_run

    if as_is and top is not None:
        raise UserError("--top has no effect with --as-is, which judges one layout; leave one of them out")
    not_an_input(trace, config, Path(machine))
    loaded, known = load_run(config, overrides or ()), load_machine(machine)
    given = given_faults(loaded, failures, save_seconds, detect_seconds, restart_seconds)
    vocab_size, assumed = known_vocabulary(loaded, vocab_size)
    ranks = world_size or default_world_size(loaded)
    if as_is:
        validate(on_device(loaded, known.device_type), ranks)
        found, looked_at, notes = [estimate(loaded, ranks, known, vocab_size=vocab_size)], 1, list[str]()
    else:
        found, looked_at, notes = _searched(loaded, ranks, known, top or SHOWN_LAYOUTS, vocab_size)
    chosen = load_run(config, [*(overrides or ()), *found[0].overrides]) if found[0].overrides else loaded
    if trace is not None:
        _write_trace(trace, on_device(chosen, known.device_type), ranks, known, vocab_size)
    run = whole_run(chosen, ranks, known, vocab_size=vocab_size, price=price)
    notes += [*assumed, *left_out_of_run(loaded), *left_out_of_steps(chosen, known)]
    if not found[0].fits:
        notes.insert(0, what_helps(loaded, ranks, known, vocab_size))
    risks, said = risks_of(given, run, chosen, ranks, known, vocab_size)
    if as_json:
        others = {"run": run.to_dict(), "failures": None if risks is None else risks.to_dict()}
        typer.echo(json.dumps({"layouts": [each.to_dict() for each in found], **others, "notes": [*notes, *said]}))
        return
    title = f"{config} on {ranks:,} x {machine}: {counted(looked_at, 'layout', 'layouts')} looked at"
    tables = [layouts_table(title, found, ranks), *([parts_table(found)] if explain else [])]
    _print(tables, [str(run), *notes, *said, *([] if risks is None else [str(risks)])], found[0])


def _searched(
    config: Config, ranks: int, machine: Machine, top: int, vocab_size: int | None
) -> tuple[list[Estimate], int, list[str]]:
    """The best layouts, how many were looked at, and what there is to say of them; none are where a run's length is
    wrong, which no layout mends."""
    from megalite.config.validate import validate
    from megalite.errors import ConfigError
    from megalite.planner.nearest import best_or_offloaded
    from megalite.planner.search import search

    try:
        validate(config, ranks)
    except ConfigError as error:
        if found := [problem for problem in error.problems if problem.startswith("schedule.")]:
            raise ConfigError(found) from None
    result = search(config, ranks, machine, top=top, vocab_size=vocab_size)
    best, why = best_or_offloaded(result, config, ranks, machine, vocab_size, top=top)
    return best, result.num_layouts, why


def _write_trace(path: Path, config: Config, ranks: int, machine: Machine, vocab_size: int | None) -> None:
    from megalite.config.plan import make_plan
    from megalite.page.write import write_page
    from megalite.planner.seconds import step_timeline
    from megalite.planner.trace import trace_events

    timeline = step_timeline(config, make_plan(config, ranks, vocab_size), machine)
    write_page(path, json.dumps(trace_events(timeline)), "--trace")


def _print(tables: list[Table], notes: list[str], first: Estimate) -> None:
    console = report_console()
    console.print(*tables)
    for note in notes:
        console.print(note, style="dim", soft_wrap=True)
    if first.overrides:
        console.print("the first: " + shlex.join(first.overrides), soft_wrap=True)


@app.command()
def scaling(
    config: ConfigFile,
    overrides: Overrides = None,
    machine: MachineName = "h100-sxm",
    to: Annotated[int, typer.Option(min=1, max=10**6, help="Ranks at most.")] = 16_384,
    plot: Annotated[
        Path | None,
        typer.Option(callback=named_drawing, help="Draw both curves: .svg, .png or .pdf.", show_default=False),
    ] = None,
    vocab_size: VocabSize = None,
    as_json: AsJson = False,
) -> None:
    """Show the best layout from one node to so many ranks, with the batch as it is (strong scaling) and with one that
    grows with the ranks (weak)."""
    from megalite.data.run_config import load_run
    from megalite.planner.left_out import left_out_of_steps
    from megalite.planner.machines import load_machine
    from megalite.planner.scaling import KINDS, rank_counts, without_layout
    from megalite.planner.scaling import scaling as scale

    not_an_input(plot, config, Path(machine))
    loaded, known = load_run(config, overrides or ()), load_machine(machine)
    vocab_size, notes = known_vocabulary(loaded, vocab_size)
    counts = rank_counts(known, to)
    points = scale(loaded, known, counts, vocab_size=vocab_size)
    notes += [*without_layout(points, counts), *left_out_of_steps(loaded, known)]
    if plot is not None:
        _draw_scaling(plot, points, f"{config} on {machine}")
    if as_json:
        typer.echo(json.dumps({"points": [point.to_dict() for point in points], "notes": notes}))
        return
    for kind in KINDS:
        title = f"{kind} scaling: {'one global batch' if kind == 'strong' else 'a batch that grows with the ranks'}"
        report_console().print(scaling_table(title, [point for point in points if point.kind == kind]))
    for note in notes:
        report_console().print(note, style="dim", soft_wrap=True)


def _draw_scaling(path: Path, points: list[Point], title: str) -> None:
    from megalite.monitor.curves import Curve, draw
    from megalite.planner.scaling import KINDS

    curves = []
    for panel in ("tokens a second", "share of the first point's, a rank"):
        for kind in KINDS:
            own = [point for point in points if point.kind == kind]
            rates, shares = [point.best.tokens_per_second for point in own], [point.efficiency for point in own]
            if own:
                y = rates if panel == "tokens a second" else shares
                curves.append(Curve(kind, [point.ranks for point in own], y, panel))
    draw(path, curves, x_label="ranks", title=title, log="x")


@app.command()
def calibrate(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", "-o", callback=named_file, help="The machine's file to write.")] = Path(
        "machine.yaml"
    ),
    ranks: Annotated[int, typer.Option(min=1, max=64, help="That this machine has for training.")] = 1,
    vocab_size: VocabSize = None,
) -> None:
    """Measure this machine with a config's model, and write it as a file for `megalite plan --machine`. A minute."""
    from megalite.config.yaml_source import dump_yaml
    from megalite.data.run_config import load_run
    from megalite.page.write import check_writable, write_page
    from megalite.planner.machines import load_machine
    from megalite.studies.calibrate import calibrate as measure
    from megalite.studies.calibrate import is_plausible
    from megalite.train.device import find_device

    not_an_input(out, config)
    check_writable(out)
    loaded = load_run(config, overrides or ())
    vocab_size, notes = known_vocabulary(loaded, vocab_size)
    device = find_device(loaded.train.device, ranks - 1).type
    found = measure(loaded, device, num_ranks=ranks, vocab_size=vocab_size)
    write_page(out, dump_yaml(found))
    known = load_machine(str(out))
    constants, shown = known.constants, {**known.constants.model_dump(), "attention": known.attention}
    said = ", ".join(f"{name} {value:.3g}" for name, value in shown.items())
    typer.echo("\n".join([f"{out}: {said}", *notes]))
    if not is_plausible(constants, device):
        typer.echo("passes is at its bound: other work was going on, or the model is too small; measure again, quiet")


@app.command()
def backtest(
    fit: Annotated[bool, typer.Option("--fit", help="Show the constants that fit each software best.")] = False,
    as_json: AsJson = False,
) -> None:
    """Hold the planner's clock against published runs: with constants of all runs of a software, and of all others."""
    from megalite.planner.backtest import backtest as run_backtest
    from megalite.planner.backtest import fit_all, median_error

    found = run_backtest()
    fitted = {" on ".join(reversed(key)): each.model_dump() for key, each in fit_all().items()} if fit else {}
    if as_json:
        rows = [{"run": each.run.name, **_row(each)} for tests in found.values() for each in tests]
        typer.echo(json.dumps({"runs": rows, "constants": fitted}))
        return
    console = report_console()
    for (machine, software), tests in found.items():
        console.print(_backtest_table(f"{software} on {machine}", tests))
    every = [each for tests in found.values() for each in tests]
    worst = max(every, key=lambda each: abs(each.error_left_out))
    console.print(
        f"{len(every)} runs, left out of what predicts them: median error {100 * median_error(every):.1f} %, the worst "
        f"{100 * worst.error_left_out:+.1f} % ({worst.run.name}, {worst.run.software})"
    )
    for name, constants in fitted.items():
        console.print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in constants.items()))


def _row(each: Backtest) -> dict[str, Any]:
    run = each.run
    return {
        "machine": run.machine,
        "software": run.software,
        "ranks": run.world_size,
        "seconds": run.seconds,
        "predicted": each.fitted,
        "error": each.error,
        "error_left_out": each.error_left_out,
    }


def _backtest_table(title: str, tests: list[Backtest]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("run", "ranks", "seconds", "predicted", "error", "left out"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for each in tests:
        errors = f"{100 * each.error:+.1f} %", f"{100 * each.error_left_out:+.1f} %"
        table.add_row(
            each.run.name, f"{each.run.world_size:,}", f"{each.run.seconds:.2f}", f"{each.fitted:.2f}", *errors
        )
    return table
