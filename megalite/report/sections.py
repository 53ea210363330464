"""The parts of a report's page that need no script: figures, tables and the bars of where the time went."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
import yaml

from megalite.config.schema import Config
from megalite.page.markup import Child, Markup, details, flatten, join, soft, strip, table, tag
from megalite.page.numbers import count, short
from megalite.report.curves import NUM_COLOURS, QUIET, event_losses, event_tasks, kind_in_words, severity
from megalite.report.run_data import Event, RunData, TimeUse, time_use

MAX_WINDOW = 50
"""Steps over which a last value is averaged, at most; a tenth of a short run."""

ALIVE_SECONDS = 900.0
"""A run without a last word that wrote something this recently is taken to be running."""

MAX_EVENTS = 400
"""Rows of a table of events; the last ones."""

MAX_ATTEMPTS = 8
"""That are shown without a click."""

SHARES = ("steps that count", "validation", "standing still for saves", "starting, waiting, steps done again")


def status(run: RunData, now: float) -> tuple[str, str]:
    """How a run stands, in a few words, and how bad that is: good, warn or bad."""
    last = next((event for event in reversed(run.events) if event["event"] in ("done", "stop", "start")), None)
    early = run.of_kind("early_stop")
    step = f"step {count(run.last_step)}" + (f" of {count(run.total_steps)}" if run.total_steps else "")
    if last is not None and last["event"] == "done":
        return (
            "stopped early" if early and early[-1].get("step") == last.get("step") else "finished"
        ) + f" at {step}", "good"
    if last is not None and last["event"] == "stop":
        return f"stopped at {step}, ready to go on", "warn"
    silent = now - max([(run.folder / "metrics.jsonl").stat().st_mtime, *(event["time"] for event in run.events[-1:])])
    if silent < ALIVE_SECONDS:
        return f"running, at {step}", "good"
    return f"ended at {step} without a last word, {clock(silent)} before this report", "bad"


def tiles(run: RunData) -> Markup:
    """The numbers of one run that most readers came for."""
    used = time_use(run)
    loss, window = last_loss(run)
    found = [("training loss", loss, f"mean of {window}")]
    best = best_validation(run)
    if best is not None:
        found.append(("lowest validation loss", f"{best[1]:.4f}", f"at step {count(best[0])}"))
    found.append(("tokens", short(int(run.columns["tokens"][-1])), f"step {count(run.last_step)}{_of_total(run)}"))
    speed, mfu = recent(run, "tokens_per_second"), recent(run, "mfu")
    if speed is not None:
        note = f"{100 * mfu:.1f} % MFU" if mfu is not None else "median of the last steps"
        found.append(("tokens a second", short(round(speed)), note))
    found.append(("goodput", f"{100 * used.goodput:.1f} %", f"of {clock(used.total)} went into steps that count"))
    found.append(("spikes of the loss", *_spikes(run)))
    return tag("div", *(_tile(*each) for each in found), class_="tiles")


def summary(runs: Sequence[RunData], now: float) -> Markup:
    """Several runs beside each other."""
    rows: list[list[Child]] = []
    for number, run in enumerate(runs):
        best, used, (said, how) = best_validation(run), time_use(run), status(run, now)
        speed = recent(run, "tokens_per_second")
        loss, window = last_loss(run)
        rows.append(
            [
                tag("b", tag("i", class_=f"swatch c{number % NUM_COLOURS}"), soft(run.name)),
                tag("span", said, class_=f"status {how}"),
                short(int(run.columns["tokens"][-1])),
                _over(loss, window),
                "–" if best is None else _over(f"{best[1]:.4f}", f"step {count(best[0])}"),
                _over(*_spikes(run)),
                "–" if speed is None else short(round(speed)),
                f"{100 * used.goodput:.1f} %",
                clock(used.total),
            ]
        )
    head = ["run", "status", "tokens", "training loss", "lowest validation", "spikes", "tokens/s", "goodput", "time"]
    return table(head, rows, numbers_from=2)


def time_bars(runs: Sequence[RunData]) -> Markup:
    """Where the time of each run went."""
    rows = []
    for run in runs:
        used = time_use(run)
        whole = used.total or 1
        parts = [
            (seconds / whole, f"f{part}", f"{run.name}: {name}, {clock(seconds)}, {100 * seconds / whole:.1f} %")
            for part, (name, seconds) in enumerate(zip(SHARES, _parts(used), strict=True))
        ]
        said = f": {clock(used.total)}, {100 * used.goodput:.1f} % of it steps that count"
        rows.append(tag("div", tag("small", tag("b", soft(run.name)), said), strip(parts)))
    if len(runs) == 1:
        used = time_use(runs[0])
        spent = [f"{name}: {clock(seconds)}" for name, seconds in zip(SHARES, _parts(used), strict=True)]
    else:
        spent = list(SHARES)
    keys = (tag("span", tag("i", class_=f"f{part}"), said) for part, said in enumerate(spent))
    return section("Where the time went", tag("div", *keys, class_="key"), *rows, class_="shares")


def events_table(runs: Sequence[RunData]) -> Markup:
    """What was out of the ordinary, the newest last, and everything else folded."""
    kept = [(run, event) for run in runs for event in run.events if event["event"] != "save_started"]
    loud = [(run, event) for run, event in kept if event["event"] not in QUIET]
    parts: list[Markup] = [_events(loud, len(runs) > 1)] if loud else [tag("p", "Nothing was out of the ordinary.")]
    return section("Events", *parts, details(f"All {count(len(kept))} events", _events(kept, len(runs) > 1)))


def _events(events: list[tuple[RunData, Event]], with_run: bool) -> Markup:
    left_out = f"The last {MAX_EVENTS} of {count(len(events))}; all are in events.jsonl."
    head = ["event", *(["run"] if with_run else []), "step", "time (UTC)", "what"]
    found = table(head, [_event_row(run, event, with_run) for run, event in events[-MAX_EVENTS:]], numbers_from=9)
    return join(tag("p", left_out) if len(events) > MAX_EVENTS else None, found)


def settings(runs: Sequence[RunData]) -> Markup | None:
    """What sets the runs apart, or one run from the defaults."""
    flat = [flatten(run.config) for run in runs]
    if not any(flat):
        return None
    if len(runs) == 1:
        defaults = flatten(Config().model_dump(mode="json"))
        changed = {key: value for key, value in flat[0].items() if defaults.get(key) != value}
        rows: list[list[Child]] = [
            [tag("code", soft(key)), code(value), code(defaults.get(key))] for key, value in changed.items()
        ]
        said = tag("p", "Settings that are not at their defaults; config.yaml has all of them.")
        found = table(["setting", "value", "default"], rows, numbers_from=9)
        return section("Settings", said, found, class_="settings")
    keys = sorted({key for each in flat for key in each})
    different = [key for key in keys if len({repr(each.get(key)) for each in flat}) > 1]
    rows = [[tag("code", soft(key)), *(code(each.get(key)) for each in flat)] for key in different]
    said = tag("p", f"{count(len(different))} of {count(len(keys))} settings differ between these runs.")
    return section("Differences", said, table(["setting", *(run.name for run in runs)], rows, numbers_from=99))


def layout(runs: Sequence[RunData]) -> Markup | None:
    """Model, layout and batch, from each run's plan."""
    if not any(run.plan for run in runs):
        return None
    facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for each in facts for name in each))
    of_all = [name for name in names if len({each.get(name) for each in facts}) == 1]
    shared: list[list[Child]] = [[name, facts[0][name]] for name in of_all]
    own: list[list[Child]] = [[name, *(each.get(name, "–") for each in facts)] for name in names if name not in of_all]
    head = "" if len(runs) == 1 else "of all runs"
    parts = [table([head, ""], shared, numbers_from=9, stacked=False)] if shared else []
    parts += [table(["", *(run.name for run in runs)], own, numbers_from=99)] if own else []
    return section("Model and layout", *parts)


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
    if not rows:
        return None
    found = table(head, rows, numbers_from=9)
    return section("Environment", found if len(rows) <= MAX_ATTEMPTS else details(f"{len(rows)} attempts", found))


def sources(runs: Sequence[RunData]) -> Markup | None:
    """What the runs read; what several read alike is one row."""
    read: dict[tuple[str, str, str, str], list[tuple[str, int | None]]] = {}
    for run in runs:
        counted = (event["consumed"] for event in reversed(run.events) if event.get("consumed"))
        consumed: dict[str, Any] = next(counted, {})
        for part in ("train", "valid"):
            for source in (run.config.get("data") or {}).get(part) or ():
                path = str(source.get("path", ""))
                name = source.get("name") or path.rstrip("/").rsplit("/", 1)[-1]
                weight = f"{source.get('weight', 1.0):g}" if part == "train" else "–"
                tokens = consumed.get(name, {}).get("tokens") if part == "train" else None
                read.setdefault((name, part, path, weight), []).append((run.name, tokens))
    rows: list[list[Child]] = []
    for (name, part, path, weight), by_run in read.items():
        who = "all" if len(by_run) == len(runs) else ", ".join(run for run, _ in by_run)
        amounts = sorted({tokens for _, tokens in by_run if tokens is not None})
        tokens = " to ".join(short(amount) for amount in dict.fromkeys((amounts[0], amounts[-1]))) if amounts else "–"
        rows.append([name, part, *([who] if len(runs) > 1 else []), tag("code", soft(path)), weight, tokens])
    head = ["source", "part", *(["runs"] if len(runs) > 1 else []), "path", "weight", "tokens read"]
    return section("Data", table(head, rows, numbers_from=len(head) - 2)) if rows else None


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
    """Step and value of the lowest watched validation loss; what a rollback has undone does not count."""
    last = {event["step"]: event["loss"] for event in run.of_kind("validation") if "loss" in event}
    found = [(loss, step) for step, loss in last.items() if loss is not None and step <= run.last_step]
    return (min(found)[1], min(found)[0]) if found else None


def last_loss(run: RunData) -> tuple[str, str]:
    """The loss of training over the last steps, and which those are."""
    window = _window(run)
    losses, steps = run.columns.get("loss", np.full(1, np.nan))[-window:], run.columns["step"][-window:]
    finite = losses[np.isfinite(losses)]
    first, last = count(int(steps[0])), count(int(steps[-1]))
    which = f"step {last}" if window == 1 else f"steps {first} to {last}"
    return f"{finite.mean():.4f}" if finite.size else "–", which


def recent(run: RunData, key: str) -> float | None:
    """Median of the last steps' values."""
    values = run.columns.get(key, np.empty(0))[-_window(run) :]
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
    return tag("code", soft(text.removesuffix("...\n").strip()))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _window(run: RunData) -> int:
    """How many steps at the end stand for what a number is now."""
    return max(1, min(MAX_WINDOW, len(run.columns["step"]) // 10))


def _spikes(run: RunData) -> tuple[str, str]:
    """How many spikes there are, and where the largest is."""
    if not run.spikes:
        return "0", "none"
    largest = max(run.spikes, key=lambda spike: spike.loss - spike.before)
    at = count(int(run.columns["step"][largest.index]))
    return str(len(run.spikes)), f"largest +{largest.loss - largest.before:.3g} at {at}"


def _over(number: str, note: str) -> Markup:
    """A number in a cell, with what it is of under it."""
    return join(number, tag("small", note, class_="faint"))


def _of_total(run: RunData) -> str:
    return f" of {count(run.total_steps)}" if run.total_steps else ""


def _tile(name: str, number: str, note: str) -> Markup:
    return tag("div", join(tag("span", name), tag("b", number), tag("span", note)), class_="tile")


def _parts(used: TimeUse) -> tuple[float, float, float, float]:
    return used.steps, used.validating, used.saving, used.other


def _event_row(run: RunData, event: Event, with_run: bool) -> list[Child]:
    kind = severity(event) if event["event"] not in QUIET else None
    name = tag("span", kind_in_words(event), class_=kind)
    step = count(event["step"]) if isinstance(event.get("step"), int) else "–"
    return [name, *([run.name] if with_run else []), step, time_of(event), _said(event)]


def _said(event: Event) -> str:
    """An event in a line."""
    if event["event"] == "validation":
        losses = [f"{name} {loss:.4f}" for name, loss in event_losses(event).items()]
        return ", ".join([*losses, *(f"{name} acc {each['acc']:.4f}" for name, each in event_tasks(event).items())])
    if event.get("why"):
        return str(event["why"])
    shown = ("origin", "folder", "seconds")
    return ", ".join(f"{key} {event[key]}" for key in shown if event.get(key) is not None)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{count(number)} ranks"


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
        facts["layout"] = f"{_ranks(plan['world_size'])}{axes and ': '}{axes}, ZeRO {parallel.get('zero_stage', '?')}"
    batch = config.get("batch") or {}
    if batch:
        facts["batch"] = (
            f"{batch.get('global_batch_size')} sequences of {count(batch.get('seq_len') or 0)} tokens, "
            f"{batch.get('micro_batch_size')} at once"
        )
    precision = config.get("precision") or {}
    rounded_to = precision.get("products") or "fp32"
    facts["number format"] = f"{precision.get('dtype', '–')}{f', products {rounded_to}' * (rounded_to != 'fp32')}"
    return facts
