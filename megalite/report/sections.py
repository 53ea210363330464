"""The parts of a report's page that need no script: figures, tables and the bars of where the time went."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
import yaml

from megalite.config.schema import Config
from megalite.page.markup import Child, Markup, details, join, table, tag
from megalite.page.numbers import count, short
from megalite.page.settings import flatten
from megalite.report.curves import QUIET, event_losses, event_tasks, severity
from megalite.report.run_data import Event, RunData
from megalite.report.time_use import TimeUse, time_use

WIDTH = 760
"""Of the bars, in units that a narrow window scales down."""

BAR_ROW = 34

RECENT = 50
"""Steps over which a last value is averaged."""

ALIVE_SECONDS = 900.0
"""A run without a last word that wrote something this recently is taken to be running."""

MAX_EVENTS = 400
"""Rows of the table of events; the last ones."""

SHARES = ("steps that count", "validation", "standing still for saves", "starting, waiting, steps done again")


def status(run: RunData, now: float) -> tuple[str, str]:
    """How a run stands, in a few words, and how bad that is: good, warn or bad."""
    last = next((event for event in reversed(run.events) if event["event"] in ("done", "stop", "start")), None)
    early = run.of_kind("early stop")
    step = f"step {count(run.last_step)}" + (f" of {count(run.total_steps)}" if run.total_steps else "")
    if last is not None and last["event"] == "done":
        return ("stopped early" if early and early[-1]["step"] == last["step"] else "finished") + f" at {step}", "good"
    if last is not None and last["event"] == "stop":
        return f"stopped at {step}, ready to go on", "warn"
    silent = now - max([(run.folder / "metrics.jsonl").stat().st_mtime, *(event["time"] for event in run.events[-1:])])
    if silent < ALIVE_SECONDS:
        return f"running, at {step}", "good"
    return f"ended at {step} without a last word, {clock(silent)} before this report", "bad"


def tiles(run: RunData) -> Markup:
    """The numbers of one run that most readers came for."""
    used = time_use(run)
    found = [("training loss", _loss(run), f"mean of the last {min(RECENT, len(run.columns['step']))} steps")]
    best = best_validation(run)
    if best is not None:
        found.append(("lowest validation loss", f"{best[1]:.4f}", f"at step {count(best[0])}"))
    found.append(("tokens", short(int(run.columns["tokens"][-1])), f"step {count(run.last_step)}{_of_total(run)}"))
    speed, mfu = recent(run, "tokens_per_second"), recent(run, "mfu")
    if speed is not None:
        note = f"{100 * mfu:.1f} % MFU" if mfu is not None else "median of the last steps"
        found.append(("tokens a second", short(round(speed)), note))
    found.append(("goodput", f"{100 * used.goodput:.1f} %", f"of {clock(used.total)} went into steps that count"))
    return tag("div", *(_tile(*each) for each in found), class_="tiles")


def summary(runs: Sequence[RunData], now: float) -> Markup:
    """Several runs beside each other."""
    rows: list[list[Child]] = []
    for run in runs:
        best, used, (said, how) = best_validation(run), time_use(run), status(run, now)
        speed = recent(run, "tokens_per_second")
        rows.append(
            [
                tag("b", run.name),
                tag("span", said, class_=f"status {how}"),
                short(int(run.columns["tokens"][-1])),
                _loss(run),
                "–" if best is None else f"{best[1]:.4f} at {count(best[0])}",
                "–" if speed is None else short(round(speed)),
                f"{100 * used.goodput:.1f} %",
                clock(used.total),
            ]
        )
    head = ["run", "status", "tokens", "loss", "lowest validation", "tokens/s", "goodput", "time"]
    return table(head, rows, numbers_from=2)


def time_bars(runs: Sequence[RunData]) -> Markup:
    """Where the time of each run went."""
    rows = []
    for number, run in enumerate(runs):
        used, y, x = time_use(run), number * BAR_ROW, 0.0
        for part, (name, seconds) in enumerate(zip(SHARES, _parts(used), strict=True)):
            width = WIDTH * seconds / (used.total or 1)
            told = tag("title", f"{run.name}: {name}, {clock(seconds)}, {100 * seconds / (used.total or 1):.1f} %")
            place = {"x": f"{x:.2f}", "y": y + 16, "width": f"{width:.2f}", "height": 12}
            rows.append(tag("rect", told, **place, class_=f"f{part}"))
            x += width
        said = f"{run.name}: {clock(used.total)}, {100 * used.goodput:.1f} % of it steps that count"
        rows.append(tag("text", said, x=0, y=y + 11, class_="small"))
    keys = (tag("span", tag("i", class_=f"f{part}"), name) for part, name in enumerate(SHARES))
    drawing = tag("svg", *rows, viewBox=f"0 0 {WIDTH} {len(runs) * BAR_ROW}", role="img", aria_label="Use of time")
    return section("Where the time went", tag("div", *keys, class_="key"), drawing, class_="shares share")


def events_table(runs: Sequence[RunData]) -> Markup:
    """Everything out of the ordinary, and validations, the newest last."""
    rows: list[list[Child]] = []
    for run in runs:
        rows += [
            _event_row(run, event, len(runs) > 1) for event in run.events if event["event"] not in ("save started",)
        ]
    shown = rows[-MAX_EVENTS:]
    left_out = (
        f"The last {MAX_EVENTS} of {count(len(rows))}; all are in events.jsonl." if len(rows) > MAX_EVENTS else None
    )
    out_of_the_ordinary = sum(event["event"] not in QUIET for run in runs for event in run.events)
    said = f"{count(len(rows))} events, {count(out_of_the_ordinary)} of them out of the ordinary"
    head = [*(["run"] if len(runs) > 1 else []), "step", "event", "what", "time (UTC)"]
    body = details(said, tag("p", left_out) if left_out else None, table(head, shown, numbers_from=9))
    return section("Events", body, class_="events")


def settings(runs: Sequence[RunData]) -> Markup | None:
    """What sets the runs apart, or one run from the defaults."""
    flat = [flatten(run.config) for run in runs]
    if not any(flat):
        return None
    if len(runs) == 1:
        defaults = flatten(Config().model_dump(mode="json"))
        changed = {key: value for key, value in flat[0].items() if defaults.get(key) != value}
        rows: list[list[Child]] = [
            [tag("code", key), code(value), code(defaults.get(key))] for key, value in changed.items()
        ]
        said = tag("p", "Settings that are not at their defaults; config.yaml has all of them.")
        return section("Settings", said, table(["setting", "value", "default"], rows, numbers_from=9))
    keys = sorted({key for each in flat for key in each})
    different = [key for key in keys if len({repr(each.get(key)) for each in flat}) > 1]
    rows = [[tag("code", key), *(code(each.get(key)) for each in flat)] for key in different]
    said = tag("p", f"{count(len(different))} of {count(len(keys))} settings differ between these runs.")
    return section("Differences", said, table(["setting", *(run.name for run in runs)], rows, numbers_from=99))


def layout(runs: Sequence[RunData]) -> Markup | None:
    """Model, layout and batch, from each run's plan."""
    if not any(run.plan for run in runs):
        return None
    facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for each in facts for name in each))
    rows: list[list[Child]] = [[name, *(each.get(name, "–") for each in facts)] for name in names]
    return section("Model and layout", table(["", *(run.name for run in runs)], rows, numbers_from=9))


def attempts(runs: Sequence[RunData]) -> Markup | None:
    """Where each attempt ran and what it went on from."""
    rows: list[list[Child]] = []
    for run in runs:
        for event in run.of_kind("start"):
            machine = ", ".join(str(event[key]) for key in ("device", "host") if event.get(key))
            software = ", ".join(f"{name} {version}" for name, version in (event.get("software") or {}).items())
            started = [time_of(event), f"{event['origin']}, step {count(event['step'])}" if "origin" in event else ""]
            ranks = count(event["world_size"]) if "world_size" in event else "–"
            rows.append([run.name, event.get("attempt", "–"), *started, ranks, machine, software])
    head = ["run", "attempt", "started (UTC)", "from", "ranks", "on", "software"]
    return section("Environment", table(head, rows, numbers_from=9)) if rows else None


def sources(runs: Sequence[RunData]) -> Markup | None:
    """What the runs read."""
    rows: list[list[Child]] = []
    for run in runs:
        consumed = next((event["consumed"] for event in reversed(run.events) if event.get("consumed")), {})
        for part in ("train", "valid"):
            for source in (run.config.get("data") or {}).get(part) or ():
                path = str(source.get("path", ""))
                name = source.get("name") or path.rstrip("/").rsplit("/", 1)[-1]
                weight = f"{source.get('weight', 1.0):g}" if part == "train" else "–"
                tokens = consumed.get(name, {}).get("tokens") if part == "train" else None
                rows.append([run.name, part, name, tag("code", path), weight, "–" if tokens is None else short(tokens)])
    head = ["run", "part", "source", "path", "weight", "tokens read"]
    return section("Data", table(head, rows, numbers_from=4)) if rows else None


def problems(runs: Sequence[RunData]) -> Markup | None:
    """What could not be read."""
    found = [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    if not found:
        return None
    items = (tag("li", each) for each in found)
    return section("What could not be read", tag("ul", *items))


def section(title: str, *children: Child, class_: str | None = None) -> Markup:
    """A part of the page under its own heading."""
    return tag("section", tag("h2", title), *children, class_=class_)


def best_validation(run: RunData) -> tuple[int, float] | None:
    """Step and value of the lowest watched validation loss."""
    found = [(event["loss"], event["step"]) for event in run.of_kind("validation") if event.get("loss") is not None]
    return (min(found)[1], min(found)[0]) if found else None


def recent(run: RunData, key: str) -> float | None:
    """Median of the last steps' values."""
    values = run.columns.get(key, np.empty(0))[-RECENT:]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else None


def clock(seconds: float) -> str:
    """12:34:56, or 3 d 4 h for long ones."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24} d {hours % 24} h" if hours >= 48 else f"{hours}:{minutes:02d}:{rest:02d}"


def time_of(event: Event) -> str:
    """When an event was."""
    return f"{datetime.datetime.fromtimestamp(event['time'], datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"


def code(value: Any) -> Markup:
    """A setting's value, as YAML in a line; what is null inside of it is left out."""
    text = yaml.safe_dump(_without_nulls(value), default_flow_style=True, width=10**6, sort_keys=False)
    return tag("code", text.removesuffix("...\n").strip())


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _loss(run: RunData) -> str:
    losses = run.columns.get("loss", np.empty(0))[-RECENT:]
    losses = losses[np.isfinite(losses)]
    return f"{losses.mean():.4f}" if losses.size else "–"


def _of_total(run: RunData) -> str:
    return f" of {count(run.total_steps)}" if run.total_steps else ""


def _tile(name: str, number: str, note: str) -> Markup:
    return tag("div", join(tag("span", name), tag("b", number), tag("span", note)), class_="tile")


def _parts(used: TimeUse) -> tuple[float, float, float, float]:
    return used.steps, used.validating, used.saving, used.other


def _event_row(run: RunData, event: Event, with_run: bool) -> list[Child]:
    kind = severity(event) if event["event"] not in QUIET else None
    name = tag("span", event["event"], class_=kind)
    step = count(event["step"]) if isinstance(event.get("step"), int) else "–"
    return [*([run.name] if with_run else []), step, name, _said(event), time_of(event)]


def _said(event: Event) -> str:
    """An event in a line."""
    if event["event"] == "validation":
        losses = [f"{name} {loss:.4f}" for name, loss in event_losses(event).items()]
        return ", ".join([*losses, *(f"{name} acc {each['acc']:.4f}" for name, each in event_tasks(event).items())])
    if event.get("why"):
        return str(event["why"])
    shown = ("origin", "folder", "seconds")
    return ", ".join(f"{key} {event[key]}" for key in shown if event.get(key) is not None)


def _facts(run: RunData) -> dict[str, str]:
    plan, config = run.plan, run.config
    model, parallel = plan.get("model") or {}, config.get("parallel") or {}
    facts: dict[str, str] = {}
    if "num_parameters" in plan:
        facts["parameters"] = short(plan["num_parameters"])
    if model:
        facts["model"] = (
            f"{model.get('num_layers')} layers, width {model.get('hidden_size')}, {model.get('num_heads')} heads, "
            f"vocabulary {count(model.get('vocab_size') or 0)}"
        )
    if "world_size" in plan:
        axes = " x ".join(f"{axis} {plan[axis]}" for axis in ("pp", "dp", "cp", "tp") if plan.get(axis, 1) > 1)
        facts["layout"] = f"{count(plan['world_size'])} ranks: {axes or 'one'}, ZeRO {parallel.get('zero_stage', '?')}"
    batch = config.get("batch") or {}
    if batch:
        facts["batch"] = (
            f"{batch.get('global_batch_size')} sequences of {count(batch.get('seq_len') or 0)} tokens, "
            f"{batch.get('micro_batch_size')} at once"
        )
    facts["number format"] = (config.get("precision") or {}).get("dtype", "–")
    return facts
