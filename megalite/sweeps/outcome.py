"""What came of a trial, read from its run folder alone: a sweep that was killed finds out the same way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megalite.config.evaluation import task_name, validation_sets
from megalite.config.schema import Config
from megalite.errors import ConfigError, UserError, did_you_mean
from megalite.report.curves import MEASURES, event_losses, event_tasks
from megalite.report.run_data import METRICS, RunData, read_runs

State = Literal["done", "diverged", "failed", "stopped"]
"""Trained to its end; its loss was no number; ended by another fault; not at its end, and ready to go on."""

VALIDATION, OF_SET, OF_TASK = "validation", "validation/", "task/"

LAST_WORDS = ("start", "done", "stop", "nonfinite")
"""Events of which the last says how a run stands."""

SHARE_AT_END = 0.1
"""Of the steps, over which a number of every step is averaged."""


@dataclass(frozen=True)
class TrialOutcome:
    """Of a trial."""

    state: State
    value: float | None = None
    """Of the metric; None where there is none."""
    steps: int = 0
    """Done."""
    seconds: float = 0.0
    """Of these steps, without start, validation and saving."""
    tokens: int = 0
    """Trained on."""
    why: str = ""
    """For all but done."""


def read_outcome(
    folder: Path, metric: str, *, code: int | None = None, wanted_steps: int | None = None
) -> TrialOutcome:
    """What a run folder says.

    Args:
        metric: as in `SweepConfig.metric`.
        code: exit code of the process that trained it last; None where nobody knows.
        wanted_steps: to which it was to train; None for its config's own end.
    """
    if not (folder / METRICS).is_file() or not (folder / METRICS).stat().st_size:
        return TrialOutcome("failed" if code not in (None, 0, 3) else "stopped", why=_ended(code))
    try:
        (run,) = read_runs([folder])
    except UserError as error:
        return TrialOutcome("failed", why=str(error))
    steps, tokens = run.last_step, int(run.columns["tokens"][-1])
    seconds = float(np.nansum(run.columns.get("seconds", np.zeros(1))))
    last = next((event for event in reversed(run.events) if event["event"] in LAST_WORDS), None)
    kind = last["event"] if last is not None else None
    if kind == "nonfinite" and code != 0:
        return TrialOutcome("diverged", None, steps, seconds, tokens, str(last and last.get("why", "")))
    if kind != "done" or code not in (None, 0):  # it may be the end of a shorter run, on which this one did not go on
        state: State = "failed" if code not in (None, 0, 3) else "stopped"
        return TrialOutcome(state, None, steps, seconds, tokens, _ended(code))
    if wanted_steps is not None and not _is_end(run, wanted_steps):
        state = "failed" if steps > wanted_steps else "stopped"
        why = f"stands at step {steps:,}, and was to be judged at step {wanted_steps:,}"
        return TrialOutcome(state, None, steps, seconds, tokens, why)
    value = value_of(run, metric)
    if value is None:
        return TrialOutcome("failed", None, steps, seconds, tokens, f"the run has no {metric}")
    if not math.isfinite(value):
        return TrialOutcome("diverged", None, steps, seconds, tokens, f"{metric} is {value}")
    return TrialOutcome("done", value, steps, seconds, tokens)


def _is_end(run: RunData, steps: int) -> bool:
    """Whether a run has ended where it was to, or before by early stopping."""
    is_early = any(event["step"] == run.last_step for event in run.of_kind("early_stop"))
    return run.last_step == steps or (run.last_step < steps and is_early)


def value_of(run: RunData, metric: str) -> float | None:
    """The metric of a run at its last step."""
    if metric == VALIDATION or metric.startswith((OF_SET, OF_TASK)):
        event = next((each for each in reversed(run.of_kind("validation")) if each["step"] == run.last_step), None)
        return None if event is None else _of_validation(event, metric)
    column = run.columns.get(metric)
    if column is None:
        return None
    last = column[-max(1, round(SHARE_AT_END * len(column))) :]
    return float(last[~np.isnan(last)].mean()) if (~np.isnan(last)).any() else None


def _of_validation(event: dict[str, Any], metric: str) -> float | None:
    if metric.startswith(OF_SET):
        return event_losses(event).get(metric.removeprefix(OF_SET))
    if metric.startswith(OF_TASK):
        return event_tasks(event).get(metric.removeprefix(OF_TASK), {}).get("acc")
    return event.get("loss")


def _ended(code: int | None) -> str:
    if code is None:
        return "not at its end"
    return f"ended with {code}" if code >= 0 else f"ended by signal {-code}"


def check_metric(config: Config, metric: str) -> None:
    """Refuse a metric that runs of a config will not have.

    Raises:
        ConfigError: with those that they will.
    """
    known = list(_metrics_of(config))
    if metric not in known:
        needs = "" if config.data.valid else "; `validation` needs data.valid"
        raise ConfigError([f"metric: found {metric!r}{did_you_mean(metric, known)}; use {', '.join(known)}{needs}"])


def _metrics_of(config: Config) -> Iterator[str]:
    if config.data.valid:
        yield VALIDATION
        yield from (f"{OF_SET}{name}" for name in validation_sets(config.data.valid))
    yield from (f"{OF_TASK}{task_name(task)}" for task in config.train.tasks)
    yield "loss"
    yield from (name for name in MEASURES if name != "lr")
    yield from config.monitor.metrics
