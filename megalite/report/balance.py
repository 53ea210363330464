"""How tokens went to the experts of each block, as a picture: experts below one another, steps from left to right."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from megalite.page.markup import Markup, details, join, tag
from megalite.page.numbers import count
from megalite.report.run_data import RunData
from megalite.report.sections import section

LEAST_HEIGHT, ROW_HEIGHT = 48, 6
MAX_COLUMNS = 120
"""Of a picture: what is more is averaged."""
MAX_FIELDS = 150_000
"""Of all pictures of a page, which make two megabytes; many experts leave fewer columns to each."""

EMPTY, EVEN, FULL = (178, 24, 43), (247, 247, 247), (33, 102, 172)
"""No tokens, as many as on the mean, and `MANY` times as many or more."""
MANY = 3.0
SHADES = 6
"""On either side of even."""


def expert_balance(runs: Sequence[RunData]) -> Markup | None:
    """A picture for each block of each run that has recorded its experts' loads."""
    with_loads = [run for run in runs if run.expert_loads]
    blocks = {run.name: _by_block(run) for run in with_loads}
    num_rows = sum(loads.shape[1] for each in blocks.values() for loads in each.values())
    columns = max(1, min(MAX_COLUMNS, MAX_FIELDS // max(1, num_rows)))
    parts = [join(*_of_run(run, blocks[run.name], columns, len(runs) > 1)) for run in with_loads]
    if not parts:
        return None
    said = (
        "Each row is an expert, each column a step, or some: white is as many tokens as the mean expert had, red "
        f"fewer, down to none, blue more, up to {MANY:g} times as many."
    )
    return section("Balance of experts", tag("p", said), *parts, class_="balance")


def _of_run(run: RunData, blocks: dict[str, np.ndarray], columns: int, with_name: bool) -> list[Markup]:
    steps = [record["step"] for record in run.expert_loads]
    span = f"steps {count(steps[0])} to {count(steps[-1])}"
    found = []
    for block, loads in blocks.items():
        title = f"{run.name}: {block}" if with_name else block
        at_end = f"at the end the fullest has {loads[-1].max():.2f} times the mean, the emptiest {loads[-1].min():.2f}"
        picture = _picture(loads, columns, f"{title}, {span}")
        found.append(details(f"{title}: {at_end}", picture))
    return found


def _by_block(run: RunData) -> dict[str, np.ndarray]:
    """Loads over their mean, `[steps, experts]`; a block is left out of which a record says something else."""
    blocks: dict[str, list[np.ndarray]] = {}
    for record in run.expert_loads:
        for block, loads in record["loads"].items():
            blocks.setdefault(block, []).append(np.asarray(loads, np.float64))
    return {
        block: np.stack([row / max(row.mean(), 1e-30) for row in rows])
        for block, rows in blocks.items()
        if len({row.shape for row in rows}) == 1 and rows[0].size
    }


def _picture(loads: np.ndarray, most: int, title: str) -> Markup:
    """An SVG of coloured fields, those of one colour as one path."""
    edges = np.linspace(0, len(loads), min(len(loads), most) + 1).astype(int)
    columns = np.stack([loads[a:b].mean(0) for a, b in itertools.pairwise(edges)])
    shades = _shades(columns)
    paths = []
    for shade in np.unique(shades):
        places = np.argwhere(shades == shade)
        paths.append(tag("path", d="".join(f"M{x} {y}h1v1h-1z" for x, y in places), fill=_colour(int(shade))))
    num_columns, num_experts = columns.shape
    return tag(
        "svg",
        tag("title", title),
        *paths,
        viewBox=f"0 0 {num_columns} {num_experts}",
        width="100%",
        height=max(LEAST_HEIGHT, ROW_HEIGHT * num_experts),
        preserveAspectRatio="none",
        shape_rendering="crispEdges",
        role="img",
    )


def _shades(loads: np.ndarray) -> np.ndarray:
    """Whole numbers from -SHADES, no tokens, over 0, even, to SHADES."""
    below, above = np.minimum(loads, 1.0) - 1.0, np.clip(loads - 1.0, 0.0, MANY - 1.0) / (MANY - 1.0)
    return np.rint((below + above) * SHADES).astype(int)


def _colour(shade: int) -> str:
    end, share = (EMPTY if shade < 0 else FULL), abs(shade) / SHADES
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(EVEN, end, strict=True))
