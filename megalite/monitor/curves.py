"""Curves for people: as a few lines of text in a terminal, and as a figure in a file.

Light, so that a verb that only draws a formula answers at once: no torch, and matplotlib only when a file is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.errors import UserError

FORMATS = (".svg", ".png", ".pdf")
SKETCH_COLUMNS, SKETCH_ROWS = 64, 10
PANEL_INCHES = (8.0, 3.2)


@dataclass(frozen=True)
class Curve:
    """A line: `y` over `x`, both of one length and not empty."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    panel: str = ""
    """Curves of one panel share axes; it names the vertical one. Empty for a panel of its own, named by the label."""
    marks: tuple[float, ...] = ()
    """Places on x to point out."""


def sketch(curve: Curve, *, log_x: bool = False) -> str:
    """A curve as lines of text: a dot for the mean of each column's values, the ends of both axes beside."""
    places = [math.log(x) for x in curve.x] if log_x else list(curve.x)
    left, width = places[0], (places[-1] - places[0]) or 1.0
    columns: list[list[float]] = [[] for _ in range(SKETCH_COLUMNS)]
    for place, y in zip(places, curve.y, strict=True):
        columns[min(SKETCH_COLUMNS - 1, int((place - left) / width * SKETCH_COLUMNS))].append(y)
    means = [sum(column) / len(column) if column else None for column in columns]
    low, high = min(curve.y), max(curve.y)
    grid = [[" "] * SKETCH_COLUMNS for _ in range(SKETCH_ROWS)]
    for column, mean in enumerate(means):
        if mean is not None:
            share = (mean - low) / (high - low) if high > low else 0.5
            grid[SKETCH_ROWS - 1 - round(share * (SKETCH_ROWS - 1))][column] = "•"
    labels = {0: f"{high:.3g}", SKETCH_ROWS - 1: f"{low:.3g}"}
    lines = [f"{labels.get(row, ''):>9} │{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    ends = f"{curve.x[0]:<{SKETCH_COLUMNS - 12}.4g}{curve.x[-1]:>12.4g}"
    return "\n".join([curve.label, *lines, f"{'':>9} └{'─' * SKETCH_COLUMNS}", f"{'':>11}{ends}"])


def require_format(path: Path) -> None:
    """Raises UserError: no figure is written under such a name."""
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: a figure is written as {', '.join(FORMATS)}; give a name with one of these endings")


def draw(path: Path, curves: Sequence[Curve], *, x_label: str, title: str, log: str = "") -> None:
    """Draw curves into a file, one panel below the other.

    Args:
        path: its ending chooses the format.
        log: the axes with a logarithmic scale: `x`, `y`, `xy` or none.

    Raises:
        UserError: the format is unknown, or the file cannot be written.
    """
    require_format(path)
    import matplotlib
    from matplotlib.figure import Figure

    panels: dict[str, list[Curve]] = {}
    for curve in curves:
        panels.setdefault(curve.panel or curve.label, []).append(curve)
    width, height = PANEL_INCHES
    with matplotlib.rc_context({"svg.hashsalt": "megalite"}):  # equal curves, equal bytes
        figure = Figure(figsize=(width, height * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for axis, (name, members) in zip(axes, panels.items(), strict=True):
            for curve in members:
                (line,) = axis.plot(curve.x, curve.y, label=curve.label, linewidth=1.4)
                for mark in curve.marks:
                    axis.axvline(mark, color=line.get_color(), linestyle="--", linewidth=1)
            axis.set(ylabel=name, xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
            axis.grid(alpha=0.3)
            if len(members) > 1:
                axis.legend(fontsize="small")
        axes[-1].set_xlabel(x_label)
        axes[0].set_title(title)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
