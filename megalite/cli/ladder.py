"""`megalite ladder`: a scaling law from small runs of one config, and what it says of larger ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megalite.cli.config import ConfigFile, Overrides
from megalite.cli.data.options import report_console
from megalite.cli.paths import named
from megalite.cli.sweep import make_runner

if TYPE_CHECKING:
    from megalite.ladder.budget import Best
    from megalite.ladder.ladder import Foretold, Plan, RungRun
    from megalite.ladder.law import Law
    from megalite.ladder.rule import SizeFamily
    from megalite.page.terminal import FittingTable
    from megalite.sweeps.record import SweepBook
    from megalite.sweeps.settings import SweepConfig
    from megalite.sweeps.sweep import Prepared


def ladder(
    config: ConfigFile,
    overrides: Overrides = None,
    widths: Annotated[str, typer.Option(help="Hidden sizes of the rungs, separated by commas.")] = "64,96,128,192",
    ratios: Annotated[str, typer.Option(help="Tokens a parameter, separated by commas.")] = "5,10,20",
    depth: Annotated[Literal["scaled", "fixed"], typer.Option(help="Layers grow with the width, or stay.")] = "scaled",
    folder: Annotated[
        Path | None, typer.Option("--dir", callback=named, help="Folder of the runs. (default: runs/ladder-NAME)")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="WIDTH:RATIO of a run to predict, train and compare.", show_default=False)
    ] = None,
    predict: Annotated[
        list[str] | None, typer.Option(help="WIDTH:RATIO of a run to predict alone.", show_default=False)
    ] = None,
    flops: Annotated[
        float | None, typer.Option(min=1.0, max=1e40, help="A budget: the best size and length.", show_default=False)
    ] = None,
    hours: Annotated[
        float | None, typer.Option(min=1e-6, max=1e9, help="The same in hours on a machine.", show_default=False)
    ] = None,
    machine: Annotated[str, typer.Option(help="For --hours: a name in configs/machines, or a file.")] = "h100-sxm",
    world_size: Annotated[int, typer.Option(min=1, max=10**6, help="For --hours: ranks.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=1000, help="Runs at a time.")] = 1,
    cluster: Annotated[
        str | None, typer.Option(help="Train as Slurm jobs: a cluster profile, or auto.", show_default=False)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Show the rungs and start none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> int:
    """Train a config at a few sizes and lengths, fit L(N, D) = E + A/N^alpha + B/D^beta, and predict larger runs.

    Given again, it goes on where it was. ladder.json and ladder.html in the folder have the result.
    """
    from megalite.errors import EXIT_DONE, EXIT_REQUEUE, UserError
    from megalite.ladder.ladder import read_target

    if flops is not None and hours is not None:
        raise UserError("--hours: found beside --flops; give one budget")
    plan = _plan(config, overrides or [], _whole_numbers(widths), _numbers(ratios, "--ratios"), depth, folder)
    wanted = [read_target(each, plan.family, "--predict") for each in predict or ()]
    aim = None if target is None else read_target(target, plan.family, "--target")
    budget = Budget(flops, hours, machine, world_size)
    budget.check(plan.family)
    if check or not as_json:
        report_console().print(_plan_table(plan))
    if check:
        _prepare(plan.sweep(), cluster)
        return EXIT_DONE
    train = partial(_train, jobs=jobs, cluster=cluster, is_quiet=as_json)
    return EXIT_DONE if _climb(plan, wanted, aim, train, budget, as_json=as_json) else EXIT_REQUEUE


@dataclass(frozen=True)
class Budget:
    """What `--flops`, `--hours` and their like ask for; nothing, if neither is given."""

    flops: float | None
    hours: float | None
    machine: str
    world_size: int

    def check(self, family: SizeFamily) -> None:
        """Raises UserError: the machine is unknown, or the config is none for so many ranks."""
        from megalite.ladder.budget import open_machine

        if self.hours is not None:
            open_machine(family, self.machine, self.world_size)

    def best(self, family: SizeFamily, law: Law) -> Best | None:
        """The size and length that it is best spent on."""
        from megalite.ladder.budget import best_for_flops, best_for_hours

        if self.flops is not None:
            return best_for_flops(family, law, self.flops)
        if self.hours is not None:
            return best_for_hours(family, law, self.hours, self.machine, self.world_size)
        return None


def _plan(
    config: Path,
    overrides: list[str],
    widths: tuple[int, ...],
    ratios: tuple[float, ...],
    depth: Literal["scaled", "fixed"],
    folder: Path | None,
) -> Plan:
    from megalite.errors import ConfigError
    from megalite.ladder.ladder import Plan
    from megalite.ladder.rule import load_family

    family = load_family(config, overrides, widths, depth)
    plan = Plan(family, config, tuple(overrides), folder or Path(f"runs/ladder-{config.stem}"), widths, ratios)
    problems = list(plan.problems())
    if problems:
        raise ConfigError(problems)
    return plan


def _climb(
    plan: Plan,
    wanted: list[tuple[int, float]],
    aim: tuple[int, float] | None,
    train: Callable[[SweepConfig], SweepBook | None],
    budget: Budget,
    *,
    as_json: bool,
) -> bool:
    """Train, fit, foretell, and write down; False where somebody asked to stop."""
    from megalite.files import write_atomically
    from megalite.ladder.ladder import compare, foretell, law_of, runs_of, to_json
    from megalite.ladder.page import write_ladder_page

    book = train(plan.sweep())
    if book is None:
        return False
    runs = runs_of(plan.family, [book.trials[number] for number in range(1, plan.num_runs + 1)])
    law = law_of(runs)
    foretold = [foretell(plan.family, law, *each) for each in wanted]
    if aim is not None:
        told = foretell(plan.family, law, *aim)
        if not as_json:
            _say_foretold(told)
        came = train(plan.target(*aim))
        if came is None:
            return False
        foretold.insert(0, compare(told, came))
    written = plan.folder / "ladder.json"  # already before a budget that buys nothing is refused
    write_atomically(written, json.dumps(to_json(runs, law, foretold, None), indent=1) + "\n")
    best = budget.best(plan.family, law)
    result = to_json(runs, law, foretold, best)
    write_atomically(written, json.dumps(result, indent=1) + "\n")
    page = write_ladder_page(plan, runs, law, foretold, best)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(runs, law, foretold, best)
        typer.echo(f"{page} ({page.stat().st_size / 1000:,.0f} kB)")
    return True


def _prepare(settings: SweepConfig, cluster: str | None) -> Prepared:
    from megalite.sweeps.sweep import prepare

    return prepare(settings, has_device=cluster is None)


def _train(settings: SweepConfig, *, jobs: int, cluster: str | None, is_quiet: bool) -> SweepBook | None:
    """What came of its runs; None where somebody asked to stop."""
    from megalite.sweeps.sweep import SweepRun

    prepared = _prepare(settings, cluster)
    runner = make_runner(prepared, jobs, cluster, None, [])
    work = SweepRun(prepared, runner, lambda line: typer.echo(line, err=is_quiet), may_grow=True)
    book = work.run()
    return None if work.was_stopped else book


def _whole_numbers(text: str) -> tuple[int, ...]:
    from megalite.errors import UserError

    found = _numbers(text, "--widths")
    if any(each != round(each) for each in found):
        raise UserError(f"--widths: found {text!r}, expected whole numbers")
    return tuple(round(each) for each in found)


def _numbers(text: str, option: str) -> tuple[float, ...]:
    from megalite.errors import UserError

    try:
        found = tuple(float(each) for each in text.split(","))
    except ValueError:
        found = ()
    if not found or any(not 0 < each < 1e6 for each in found):
        raise UserError(f"{option}: found {text!r}, expected numbers above 0 and below 1e6, separated by commas")
    return found


def _plan_table(plan: Plan) -> FittingTable:
    from megalite.page.numbers import short
    from megalite.page.terminal import figures

    table = figures("width", "layers", "parameters", *(f"{each:g} a parameter" for each in plan.ratios))
    for width in plan.widths:
        size = plan.family.size(width)
        lengths = [plan.family.run(size, ratio)["train.steps"] for ratio in plan.ratios]
        steps = [f"{each:,} steps" for each in lengths]
        table.add_row(str(width), str(size.layers), short(size.num_parameters), *steps)
    return table


def _say_foretold(each: Foretold) -> None:
    from megalite.page.numbers import short

    loss = each.loss
    said = f"width {each.size.width}, {short(each.size.num_parameters)} parameters, {short(each.num_tokens)} tokens"
    typer.echo(f"{said}: predicted {loss.value:.4f}, 95 % between {loss.low:.4f} and {loss.high:.4f}")


def _print(runs: list[RungRun], law: Law, foretold: list[Foretold], best: Best | None) -> None:
    from megalite.ladder.budget import far_off
    from megalite.page.numbers import short
    from megalite.page.terminal import figures
    from megalite.sweeps.space import overrides_of

    table = figures("width", "layers", "parameters", "tokens", "FLOPs", "loss", "law", "off")
    for each in runs:
        said = law.loss(each.size.num_parameters, each.num_tokens)
        numbers = short(each.size.num_parameters), short(each.num_tokens), f"{each.flops:.2e}"
        losses = f"{each.loss:.4f}", f"{said:.4f}", f"{100 * (said / each.loss - 1):+.2f} %"
        table.add_row(str(each.size.width), str(each.size.layers), *numbers, *losses)
    report_console().print(table)
    for name, number in law.numbers().items():
        typer.echo(f"{name:6} {number.value:.4g}  (95 %: {number.low:.4g} to {number.high:.4g})")
    for doubt in law.doubts():
        typer.echo(f"do not rely on this law: {doubt}")
    for target in foretold:
        _say_foretold(target)
        if target.measured is not None and target.error is not None:
            typer.echo(f"  measured {target.measured:.4f}: the prediction is off by {100 * target.error:+.2f} %")
    if best is None:
        return
    size = best.chosen.size
    typer.echo(
        f"best for {best.budget}: width {size.width}, {size.layers} layers, {short(size.num_parameters)} parameters, "
        f"{short(round(best.chosen.num_tokens))} tokens: loss {best.interval.value:.4f} "
        f"(95 %: {best.interval.low:.4f} to {best.interval.high:.4f})"
    )
    typer.echo(f"  {shlex.join(overrides_of({**size.settings, 'train.steps': best.steps}))}")
    for name, number in best.closed_form.items():
        typer.echo(f"  by 6 N D: {name} {number.value:.3g}  (95 %: {number.low:.3g} to {number.high:.3g})")
    warning = far_off(best, max(each.size.num_parameters for each in runs), max(each.num_tokens for each in runs))
    if warning:
        typer.echo(f"  {warning}")
