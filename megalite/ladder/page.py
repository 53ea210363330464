"""ladder.html: the runs of a ladder, their law and what it says, in the report's style; one file without a script."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalite.ladder.budget import Best, far_off
from megalite.ladder.ladder import Foretold, Plan, RungRun
from megalite.ladder.law import Interval, Law
from megalite.page.markup import Child, Markup, join, soft, table, tag
from megalite.page.numbers import short
from megalite.page.plot import Plot, Series, picture
from megalite.page.write import write_page
from megalite.sweeps.page import part, tile, whole_page
from megalite.sweeps.space import overrides_of

FILE_NAME = "ladder.html"
CURVE_POINTS = 40


def write_ladder_page(
    plan: Plan, runs: Sequence[RungRun], law: Law, foretold: Sequence[Foretold], best: Best | None
) -> Path:
    """Write the page of a ladder.

    Raises:
        UserError: it cannot be written.
    """
    path = plan.folder / FILE_NAME
    parts = [
        _tiles(runs, law, foretold),
        part("The runs and their law", picture(law_plots(runs, law, foretold), stands_alone=False), _numbers(law)),
        _targets(foretold),
        _budget(runs, law, best),
        _table(runs, law),
    ]
    write_page(path, whole_page(plan.folder.name, "ladder", time.time(), parts))
    return path


def law_plots(runs: Sequence[RungRun], law: Law, foretold: Sequence[Foretold]) -> list[Plot]:
    """Losses over tokens, a line for each size; and what the law says over what came."""
    sizes = {each.size.num_parameters: each.size for each in runs}
    longest = max([*(each.num_tokens for each in runs), *(each.num_tokens for each in foretold)])
    series = []
    for colour, (number, _) in enumerate(sorted(sizes.items())):
        own = sorted((each.num_tokens, each.loss) for each in runs if each.size.num_parameters == number)
        xs = np.geomspace(own[0][0], max(longest, own[-1][0]), CURVE_POINTS).tolist()
        label = f"{short(number)} parameters"
        series.append(Series("", xs, [law.loss(number, x) for x in xs], colour, "line"))
        series.append(Series(label, [x for x, _ in own], [y for _, y in own], colour, "dots"))
    for place, each in enumerate(foretold):
        colour, at = len(sizes) + place, [float(each.num_tokens)]
        label = f"predicted, {short(each.size.num_parameters)} parameters"
        series.append(Series(label, at, [each.loss.value], colour, "dots", [each.loss.low], [each.loss.high]))
        if each.measured is not None:
            series.append(Series("measured", at, [each.measured], colour + 1, "dots"))
    said = [law.loss(each.size.num_parameters, each.num_tokens) for each in runs]
    came = [each.loss for each in runs]
    ends = [min(came), max(came)]
    fit = [Series("", ends, ends, 5, "line", dashed=True), Series("", came, said, 0, "dots")]
    return [
        Plot("loss over tokens", "tokens", "validation loss", tuple(series), log_x=True),
        Plot("what the law says of its runs", "measured", "by the law", tuple(fit)),
    ]


def budget_plot(law: Law, best: Best) -> Plot:
    """The loss over the size, for one budget."""
    shown = [each for each in best.others if each.loss < best.chosen.loss * 1.25]
    xs, ys = [each.size.num_parameters for each in shown], [each.loss for each in shown]
    intervals = [law.interval(each.size.num_parameters, each.num_tokens, of_a_run=False) for each in shown]
    lows, highs = [each.low for each in intervals], [each.high for each in intervals]
    line = Series(best.budget, xs, ys, 0, "line", lows, highs)
    dot = Series("best", [best.chosen.size.num_parameters], [best.chosen.loss], 1, "dots")
    return Plot(f"loss for {best.budget}", "parameters", "loss by the law", (line, dot), log_x=True)


def _tiles(runs: Sequence[RungRun], law: Law, foretold: Sequence[Foretold]) -> Markup:
    off = [abs(law.loss(each.size.num_parameters, each.num_tokens) / each.loss - 1.0) for each in runs]
    largest = max(each.size.num_parameters for each in runs)
    tiles = [
        tile("runs", str(len(runs)), f"up to {short(largest)} parameters"),
        tile("the law is off by", f"{100 * sum(off) / len(off):.2f} %", f"in the mean; at most {100 * max(off):.2f} %"),
        tile("FLOPs of all runs", f"{sum(each.flops for each in runs):.2e}", "forward and backward"),
    ]
    for each in foretold:
        if each.error is not None:
            times = each.size.num_parameters / largest
            tiles.append(
                tile("the target is off by", f"{100 * each.error:+.2f} %", f"{times:.1f} times the largest run")
            )
    return tag("div", *tiles, class_="tiles")


def _numbers(law: Law) -> Markup:
    rows: list[list[Child]] = [[name, *_cells(each)] for name, each in law.numbers().items()]
    doubts = [tag("p", tag("b", "Do not rely on this law: "), doubt) for doubt in law.doubts()]
    said = tag("p", "L(N, D) = E + A / N^alpha + B / D^beta; the ends are those of 95 % of the draws of residuals.")
    return join(*doubts, said, table(["", "best", "low", "high"], rows, stacked=False))


def _targets(foretold: Sequence[Foretold]) -> Markup | None:
    if not foretold:
        return None
    rows: list[list[Child]] = []
    for each in foretold:
        came = "–" if each.measured is None else f"{each.measured:.4f}"
        off = "–" if each.error is None else f"{100 * each.error:+.2f} %"
        size = [str(each.size.width), short(each.size.num_parameters), short(each.num_tokens)]
        rows.append([*size, *(f"{end:.4f}" for end in vars(each.loss).values()), came, off])
    head = ["width", "parameters", "tokens", "predicted", "low", "high", "measured", "off by"]
    return part("Larger runs", table(head, rows))


def _budget(runs: Sequence[RungRun], law: Law, best: Best | None) -> Markup | None:
    if best is None:
        return None
    size = best.chosen.size
    rows: list[list[Child]] = [
        ["width, layers", f"{size.width}, {size.layers}"],
        ["parameters", short(size.num_parameters)],
        ["tokens", f"{short(round(best.chosen.num_tokens))}, {best.steps:,} steps"],
        ["FLOPs", f"{best.flops:.3g}"],
        ["loss", f"{best.interval.value:.4f}, 95 % between {best.interval.low:.4f} and {best.interval.high:.4f}"],
    ]
    rows += [
        [f"{name}, by 6 N D", f"{each.value:.3g}, 95 % between {each.low:.3g} and {each.high:.3g}"]
        for name, each in best.closed_form.items()
    ]
    warning = far_off(best, max(each.size.num_parameters for each in runs), max(each.num_tokens for each in runs))
    return part(
        f"Best for {best.budget}",
        tag("p", warning) if warning else None,
        picture([budget_plot(law, best)], stands_alone=False),
        table(["", ""], rows, numbers_from=9, stacked=False),
        tag("p", tag("code", soft(shlex.join(overrides_of({**size.settings, "train.steps": best.steps}))))),
    )


def _table(runs: Sequence[RungRun], law: Law) -> Markup:
    rows: list[list[Child]] = []
    for each in runs:
        said = law.loss(each.size.num_parameters, each.num_tokens)
        size = [str(each.size.width), str(each.size.layers), short(each.size.num_parameters), short(each.num_tokens)]
        off = f"{100 * (said / each.loss - 1):+.2f} %"
        rows.append([*size, f"{each.flops:.2e}", f"{each.loss:.4f}", f"{said:.4f}", off])
    head = ["width", "layers", "parameters", "tokens", "FLOPs", "loss", "by the law", "off by"]
    return part("Runs", table(head, rows))


def _cells(each: Interval) -> list[Child]:
    return [f"{number:.4g}" for number in vars(each).values()]
