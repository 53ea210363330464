"""A report as one HTML file: it needs no network, and no script but its own.

numbers of the runs (JSON)  --charts.js-->  curves, redrawn at every change of the controls
everything else is written here, and shows without the script too
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from megalite import __version__
from megalite.page.markup import Markup, tag
from megalite.page.numbers import count
from megalite.page.style import CSS
from megalite.page.write import write_page
from megalite.progress import NoProgress, ProgressReporter
from megalite.report import sections
from megalite.report.balance import expert_balance
from megalite.report.curves import Chart, charts_of, numbers_of
from megalite.report.run_data import METRICS, RunData, read_runs

SCRIPT = Path(__file__).with_name("charts.js")
MAX_BANDS = 4
"""From so many runs on there are no shades behind lines; charts.js draws none either."""

STYLE = Path(__file__).with_name("report.css")


def render(runs: Sequence[RunData], now: float) -> str:
    """The page.

    Args:
        runs: at least one.
        now: seconds since 1970.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    script = Markup(SCRIPT.read_text(encoding="utf-8"))
    charts = charts_of(runs)
    numbers = {"runs": [numbers_of(run) for run in runs], "charts": [chart.numbers() for chart in charts]}
    body = tag(
        "body",
        tag(
            "main",
            tag("h1", title),
            _status_line(runs, now),
            sections.tiles(runs[0]) if len(runs) == 1 else sections.summary(runs, now),
            _controls(),
            tag("div", *(_figure(number, chart) for number, chart in enumerate(charts)), class_="charts"),
            _thinning(numbers["runs"]),
            Markup("<noscript><p>A script in this page draws the curves; it is switched off here.</p></noscript>"),
            expert_balance(runs),
            sections.time_bars(runs),
            sections.settings(runs),
            sections.layout(runs),
            sections.sources(runs),
            sections.attempts(runs),
            sections.events_table(runs),
            sections.problems(runs),
            class_="report",
        ),
        tag("script", _data(numbers), type="application/json", id="numbers"),
        tag("script", script),
    )
    style = tag("style", Markup(CSS), Markup(STYLE.read_text(encoding="utf-8")))
    head = tag("head", _head(script), tag("title", f"{title}: training report"), style)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _head(script: str) -> Markup:
    """Only this very script may run, and nothing may be fetched."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return Markup(
        '<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    )


def _data(numbers: dict) -> Markup:
    """JSON inside a script element: nothing in it can end the element."""
    return Markup(json.dumps(numbers, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _status_line(runs: Sequence[RunData], now: float) -> Markup:
    written = f"{datetime.datetime.fromtimestamp(now, datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"
    said = f"Report of {written} by megalite {__version__}."
    if len(runs) > 1:
        return tag("p", said, class_="faint")
    state, how = sections.status(runs[0], now)
    return tag("p", tag("span", state, class_=f"status {how}"), tag("span", f" · {said}", class_="faint"))


def _controls() -> Markup:
    axes = (("step", "steps"), ("tokens", "tokens"), ("hours", "hours"))
    spans = (("1", "all"), ("0.5", "last half"), ("0.1", "last tenth"))
    return tag(
        "div",
        _choice("across", "axis", axes),
        _choice("show", "span", spans),
        tag("label", "smoothing", Markup('<input type="range" id="smoothing" min="0" max="99" value="0">')),
        tag("label", Markup('<input type="checkbox" id="marks" checked>'), "events and spikes"),
        tag("span", "drag across a chart to look closer, double-click to go back", class_="mouse"),
        tag("span", "slide a finger along a chart to read it", class_="finger"),
        class_="controls",
    )


def _choice(title: str, name: str, values: Sequence[tuple[str, str]]) -> Markup:
    """Buttons of which one is pressed, the first at the start."""

    def button(number: int, value: str, said: str) -> Markup:
        checked = "" if number else " checked"
        return tag("label", Markup(f'<input type="radio" name="{name}" value="{value}"{checked}>'), tag("span", said))

    return tag("fieldset", tag("legend", title), *(button(n, *each) for n, each in enumerate(values)))


def _figure(number: int, chart: Chart) -> Markup:
    unit = tag("small", chart.note or chart.unit) if chart.note or chart.unit else None
    log = Markup('<button type="button" class="log" aria-pressed="false">log scale</button>')
    parts = (tag("figcaption", chart.title, unit, log), tag("div", class_="legend"), tag("div", class_="plot"))
    return tag("figure", *parts, data_chart=number, class_="main" if chart.main else None)


def _thinning(runs: Sequence[dict]) -> Markup | None:
    most = max(run["steps_a_point"] for run in runs)
    if most == 1:
        return None
    said = f"A point is the mean of up to {most} steps; "
    said += "the shade behind a line reaches from the least to the largest, and " if len(runs) < MAX_BANDS else ""
    said += "a triangle marks a spike of the loss where it was."
    return tag("p", said, class_="faint")


FILE_NAME = "report.html"

MB = 1e6


def metrics_bytes(folders: Sequence[Path]) -> int:
    """How much there is to read, of runs that are there."""
    files = (folder / METRICS for folder in folders)
    return sum(file.stat().st_size for file in files if file.is_file())


def write_report(
    folders: Sequence[Path], out: Path | None = None, *, progress: ProgressReporter | None = None
) -> tuple[Path, list[RunData]]:
    """Write the report of some runs.

    Args:
        folders: of the runs, at least one.
        out: the file; None for `report.html` in the folder of a single run, or here for several.
        progress: is told what is being done; None for nobody.

    Returns:
        The file, and the runs that are in it.

    Raises:
        UserError: a folder is no run's or has no step yet, or the file cannot be written.
    """
    progress = progress or NoProgress()
    progress.start("reading", metrics_bytes(folders) / MB, "MB")
    runs = read_runs(folders, lambda num_bytes: progress.advance(num_bytes / MB))
    num_steps = sum(len(run.columns["step"]) for run in runs)
    progress.finish(f"{count(num_steps)} steps of {len(runs)} run{'s' if len(runs) > 1 else ''}")
    out = out or (folders[0] / FILE_NAME if len(folders) == 1 else Path(FILE_NAME))
    progress.start("drawing", None, "charts")
    page = render(runs, time.time())
    progress.finish(f"{len(page) / 1000:,.0f} kB")
    write_page(out, page)
    return out, runs
