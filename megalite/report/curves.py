"""The curves of a report: which charts there are, and each run's numbers in them, few enough for a page.

A long run has more steps than a screen has columns. Neighbouring steps become one point, their mean, with the least and
the largest beside it, so that a spike of a single step still shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalite.page.numbers import count
from megalite.report.run_data import Event, RunData

MAX_POINTS = 1200
"""Of one line."""

NUM_COLOURS = 8
NUM_DASHES = 4

MAX_LAYERS = 6
"""Layers whose statistics are drawn."""

LOG_STATISTICS = {"grad_norm", "update_ratio", "max", "kurtosis"}
"""Of layers, that span decades."""

NUM_DIGITS = 6
"""Of the numbers in the page."""

X_AXES = ("step", "tokens", "hours")


@dataclass(frozen=True)
class Measure:
    """How a number of metrics.jsonl is shown."""

    title: str
    unit: str = ""
    log: bool = False
    factor: float = 1.0


MEASURES = {
    "lr": Measure("Learning rate"),
    "grad_norm": Measure("Gradient norm before clipping", log=True),
    "tokens_per_second": Measure("Throughput", "tokens/s"),
    "mfu": Measure("Model FLOPs utilisation", "%", factor=100.0),
    "seconds": Measure("Time of a step", "s"),
    "memory_bytes": Measure("Peak memory of the first rank", "GB", factor=1e-9),
    "num_tokens": Measure("Tokens of a step"),
    "mtp_loss_1": Measure("Loss of the token behind the next one"),
    "expert_load_max": Measure("Tokens of the fullest expert, over the mean, in the worst block"),
    "expert_load_entropy": Measure("Entropy of the experts' loads, over that of even ones, in the worst block"),
    "dead_experts": Measure("Experts without tokens, in the worst block", "%", factor=100.0),
    "dropped_choices": Measure("Choices without room at their expert, in the worst block", "%", factor=100.0),
}
"""In the order of their charts; numbers that are not here come after them under their own names."""

NOT_DRAWN = {"step", "tokens", "hours", "skipped", "loss"}

QUIET = {"start", "done", "validation", "save", "save_started", "consumed", "profile"}
"""Events that are a run's everyday life: not marked on the curves."""

SEVERITY = {
    "nonfinite": "bad",
    "rollback": "bad",
    "save_failed": "bad",
    "score_alarm": "bad",
    "damaged_checkpoint": "bad",
    "drift": "bad",
    "unstable": "bad",
    "router_collapsed": "bad",
    "mixture": "plain",
    "batch_grown": "plain",
    "stop": "plain",
    "early_stop": "plain",
    "save_skipped": "plain",
}
"""How bad a marked event is; one that is not named here is a warning."""


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    run: int
    key: str
    label: str
    color: int
    dash: int = 0
    points: bool = False
    """Measured now and then, not at every step."""
    what: str = ""
    """Its name without the run's."""


@dataclass(frozen=True)
class Chart:
    """One chart."""

    title: str
    unit: str
    log: bool
    lines: tuple[Line, ...]
    main: bool = False
    """Wide, and with flags on its marks."""
    note: str = ""
    """Beside the title."""

    def numbers(self) -> dict[str, Any]:
        """As the page's script reads it."""
        lines = [vars(line) for line in self.lines]
        return {"title": self.title, "unit": self.unit, "log": self.log, "main": self.main, "lines": lines}


def charts_of(runs: Sequence[RunData]) -> list[Chart]:
    """Every chart that any of the runs has numbers for."""
    runs_numbers = [(run, numbers_present(run)) for run in runs]
    found = [_loss_chart(runs_numbers)]
    tasks = list(
        dict.fromkeys(name for run in runs for event in run.of_kind("validation") for name in event_tasks(event))
    )
    if tasks:
        lines = _lines(runs_numbers, {f"task/{name}": name for name in tasks}, points=True)
        title = f"Accuracy on {tasks[0]}" if len(tasks) == 1 else "Accuracy on tasks"
        found.append(Chart(title, "", False, lines))
    drawn = {key for run in runs for key, column in run.columns.items() if np.isfinite(column).any()} - NOT_DRAWN
    ordered = [key for key in MEASURES if key in drawn] + sorted(drawn - MEASURES.keys())
    for key in ordered:
        measure = MEASURES.get(key, Measure(key.replace("_", " ")))
        found.append(Chart(measure.title, measure.unit, measure.log, _lines(runs_numbers, {key: key}, points=False)))
    return [*found, *(_layer_charts(*runs_numbers[0]) if len(runs) == 1 else [])]


def numbers_of(run: RunData) -> dict[str, Any]:
    """A run's numbers, as the page's script reads them."""
    cuts = _cuts(len(run.columns["step"]))
    drawn = {key: column for key, column in run.columns.items() if key not in NOT_DRAWN or key == "loss"}
    scaled = {key: column * MEASURES[key].factor if key in MEASURES else column for key, column in drawn.items()}
    return {
        "name": run.name,
        "steps_a_point": max(1, math.ceil(len(run.columns["step"]) / max(1, len(cuts) - 1))),
        "x": {axis: _rounded(run.columns[axis][np.array(cuts[1:]) - 1]) for axis in X_AXES},
        "series": {key: _thinned(column, cuts) for key, column in scaled.items()},
        "points": _points(run),
        "spikes": _spikes(run),
        "marks": [_mark(run, event) for event in run.events if event["event"] not in QUIET and "step" in event],
    }


def event_tasks(event: Event) -> dict[str, Any]:
    """The tasks of a validation."""
    return event.get("tasks") or {}


def event_losses(event: Event) -> dict[str, float]:
    """The loss of each set of a validation; one without names is called `validation`."""
    sets = event.get("sets") or ({"validation": event} if "loss" in event else {})
    return {name: each["loss"] for name, each in sets.items() if each.get("loss") is not None}


def kind_in_words(event: Event) -> str:
    """What happened, for people."""
    return event["event"].replace("_", " ")


def severity(event: Event) -> str:
    """bad, warn or plain."""
    return SEVERITY.get(event["event"], "warn")


def _loss_chart(runs: Sequence[tuple[RunData, set[str]]]) -> Chart:
    sets = list(dict.fromkeys(name for run, _ in runs for e in run.of_kind("validation") for name in event_losses(e)))
    names = {"loss": "training", **{f"valid/{name}": _set_title(name, sets) for name in sets}}
    note = "nats a token, scaled to what follows the first steps"
    return Chart("Loss", "", False, _lines(runs, names, points=None), main=True, note=note)


def _layer_charts(run: RunData, present: set[str]) -> list[Chart]:
    """A chart for each statistic of the layers."""
    shown = _shown_layers(run)
    found = (each["layers"].get(name, ()) for each in run.layer_stats for name in shown)
    statistics = dict.fromkeys(key for of_layer in found for key in of_layer)
    charts = []
    for statistic in statistics:
        lines = _lines([(run, present)], {f"layer/{statistic}/{name}": name for name in shown}, points=True)
        log = statistic in LOG_STATISTICS
        charts.append(Chart(f"Layers: {statistic.replace('_', ' ')}", "", log, lines))
    return charts


def _shown_layers(run: RunData) -> list[str]:
    """Some of the layers, evenly spaced from the first to the last."""
    layers = list(dict.fromkeys(name for each in run.layer_stats for name in each["layers"]))
    places = np.linspace(0, len(layers) - 1, min(len(layers), MAX_LAYERS)).astype(int)
    return [layers[place] for place in np.unique(places)]


def _set_title(name: str, sets: Sequence[str]) -> str:
    return "validation" if len(sets) == 1 else f"validation: {name}"


def _lines(runs: Sequence[tuple[RunData, set[str]]], keys: dict[str, str], *, points: bool | None) -> tuple[Line, ...]:
    """A line for each run that has each key. One run takes a colour for each key; several take one for each run.

    Args:
        runs: and the keys that each has numbers for.
        keys: what they are called.
        points: whether they are measured now and then; None for all but the loss of training.
    """
    lines = []
    for number, (run, present) in enumerate(runs):
        for place, (key, name) in enumerate(keys.items()):
            if key not in present:
                continue
            alone = len(runs) == 1
            label = name if alone else run.name if len(keys) == 1 else f"{run.name}, {name}"
            own_points = key != "loss" if points is None else points
            color, dash = (place, 0) if alone else (number, place % NUM_DASHES)
            lines.append(Line(number, key, label, color % NUM_COLOURS, dash, own_points, name))
    return tuple(lines)


def numbers_present(run: RunData) -> set[str]:
    """The keys of a run's lines."""
    return {key for key, column in run.columns.items() if np.isfinite(column).any()} | _points(run).keys()


def _points(run: RunData) -> dict[str, dict[str, list[float | None]]]:
    """What was measured at validations: losses by set, accuracy by task."""
    found: dict[str, dict[int, float]] = {}
    for event in run.of_kind("validation"):
        for name, loss in event_losses(event).items():
            found.setdefault(f"valid/{name}", {})[event["step"]] = loss
        for name, scores in event_tasks(event).items():
            found.setdefault(f"task/{name}", {})[event["step"]] = scores["acc"]
    shown = _shown_layers(run)
    for each in run.layer_stats[:: max(1, len(run.layer_stats) // MAX_POINTS)]:
        for name in shown:
            for statistic, value in each["layers"].get(name, {}).items():
                found.setdefault(f"layer/{statistic}/{name}", {})[each["step"]] = value
    return {
        key: {**_places(run, sorted(own)), "y": _rounded([own[step] for step in sorted(own)])}
        for key, own in found.items()
    }


def _places(run: RunData, steps: Sequence[int]) -> dict[str, list[float | None]]:
    """Where steps lie on each x axis."""
    known = run.columns["step"]
    return {
        axis: _rounded(np.interp(steps, known, run.columns[axis])) if axis != "step" else list(steps) for axis in X_AXES
    }


def _spikes(run: RunData) -> dict[str, list[Any]]:
    """Steps whose loss stands out, with what is said of them."""
    spikes = run.spikes
    steps = [int(run.columns["step"][spike.index]) for spike in spikes]
    told = [
        f"{run.name}, step {count(step)}: loss {spike.loss:.4f} after {spike.before:.4f}"
        for step, spike in zip(steps, spikes, strict=True)
    ]
    return {**_places(run, steps), "y": _rounded([spike.loss for spike in spikes]), "text": told}


def _mark(run: RunData, event: Event) -> dict[str, Any]:
    places = {axis: values[0] for axis, values in _places(run, [event["step"]]).items()}
    why = f": {event['why']}" if event.get("why") else ""
    text = f"{run.name}, step {count(event['step'])}, {kind_in_words(event)}{why}"
    return {**places, "kind": severity(event), "text": text}


def _cuts(length: int) -> list[int]:
    """Where points begin and end: each holds the steps from one cut to the next."""
    return np.unique(np.linspace(0, length, min(length, MAX_POINTS) + 1).astype(int)).tolist()


def _thinned(column: np.ndarray, cuts: list[int]) -> dict[str, list[float | None]]:
    """A point for each stretch of steps: the mean of its finite values, and the least and the largest of them."""
    finite = np.isfinite(column)
    starts = np.array(cuts[:-1])
    counts = np.add.reduceat(finite.astype(int), starts)
    means = np.add.reduceat(np.where(finite, column, 0.0), starts) / np.maximum(counts, 1)
    means[counts == 0] = np.nan
    found = {"y": _rounded(means)}
    if len(cuts) - 1 < len(column):
        lows = np.minimum.reduceat(np.where(finite, column, np.inf), starts)
        highs = np.maximum.reduceat(np.where(finite, column, -np.inf), starts)
        found |= {"low": _rounded(lows), "high": _rounded(highs)}
    return found


def _rounded(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Six digits are more than a screen shows; what is not finite is nothing."""
    numbers = np.asarray(values, np.float64)
    finite = np.isfinite(numbers)
    size = np.abs(np.where(finite & (numbers != 0), numbers, 1.0))
    with np.errstate(over="ignore", invalid="ignore"):
        scale = 10.0 ** (NUM_DIGITS - 1 - np.floor(np.log10(size)))
        scaled = np.round(numbers * scale) / scale
    rounded = np.where(np.isfinite(scaled), scaled, numbers)  # what is so small that its scale has no number
    return [value if known else None for value, known in zip(rounded.tolist(), finite.tolist(), strict=True)]
