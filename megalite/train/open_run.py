"""From ranks that are connected to a run that can train: its attempt, its folder, weights, engine and records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megalite.checkpoint.attempt import join_attempt
from megalite.checkpoint.format import Progress
from megalite.checkpoint.hf.families.registry import exportable
from megalite.checkpoint.precision_state import load_state
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data.samples import Samples
from megalite.engine.build import DTYPES, build_engine
from megalite.engine.protocol import Engine
from megalite.monitor.recorder import Recorder
from megalite.parallel.axes import Axes
from megalite.plugins import changed_plugins, loaded_plugins
from megalite.train.data_check import verify_data
from megalite.train.device import describe_machine, find_peak
from megalite.train.heartbeat import Heartbeat
from megalite.train.place import Place
from megalite.train.preflight import open_run_tasks
from megalite.train.run import Run
from megalite.train.run_folder import write_run_folder
from megalite.train.signals import StopRequest
from megalite.train.start import Start, Zeros, choose_start
from megalite.train.startup import BUILDING, LOADING, Say


@dataclass(frozen=True)
class Connected:
    """A rank that has met the others."""

    config: Config
    plan: RunPlan
    place: Place
    axes: Axes
    device: torch.device
    stop: StopRequest
    heartbeat: Heartbeat


def open_run(rank: Connected, samples: Samples, valid_sets: dict[str, Samples], say: Say) -> tuple[Run, Progress]:
    """Make ready to train: what a rank trains with, and where it goes on from. Collective.

    Args:
        samples: of the training mixture, from its beginning.
        say: is told what takes its time.
    """
    config, plan, axes, device = rank.config, rank.plan, rank.axes, rank.device
    is_writer = rank.place.rank == 0
    verified = verify_data(config, plan, axes, device, say) if config.data.verify else None
    fence = join_attempt(config.run.dir, rank.place.attempt, axes, device)
    if is_writer:
        write_run_folder(config, plan)
    say(LOADING)
    start = choose_start(config, plan, samples, axes, device)
    say(BUILDING)
    engine = _build_engine(config, plan, axes, device, start)
    anew = load_state(engine, start.reader)
    peak = find_peak(device, DTYPES[config.precision.dtype])
    recorder = Recorder(config, plan, first_step=start.progress.step, peak_flops=peak.flops, is_writer=is_writer)
    about = {"world_size": rank.place.world_size, "attempt": fence.attempt, **describe_machine(device)}
    about |= {"plugins": {each.origin: each.digest for each in loaded_plugins()}} if loaded_plugins() else {}
    _record_start(recorder, start, plan, {**about, "peak_flops": peak.flops, "peak_is": peak.origin}, anew, verified)
    recorder.say(f"mfu is a share of {peak}")
    run = Run(
        config,
        plan,
        axes,
        device,
        engine,
        samples.following(start.progress.account),
        valid_sets,
        open_run_tasks(config, plan, samples),
        recorder,
        fence,
        rank.stop,
        rank.heartbeat,
    )
    return run, start.progress


def _build_engine(config: Config, plan: RunPlan, axes: Axes, device: torch.device, start: Start) -> Engine:
    """The engine in the state that a run starts from."""
    is_loaded = bool(start.progress.num_updates) or config.precision.dtype != "fp32"  # sets all weights, unrounded
    engine = build_engine(config, plan, axes, device, Zeros() if is_loaded else start.weights)
    if is_loaded:
        engine.load(start.weights, start.moments, start.progress.num_updates)
    return engine


def _record_start(
    recorder: Recorder,
    start: Start,
    plan: RunPlan,
    about: dict[str, Any],
    anew: Sequence[str],
    verified: dict[str, float] | None,
) -> None:
    """Write down and say where the run goes on from, and what it had to pass over.

    Args:
        about: the machine.
        anew: layers whose FP8 history begins anew.
        verified: of `data_check.verify_data`; None where that was not asked for.
    """
    total_steps, why_not_exportable = plan.total_steps, exportable(plan.model).why_not
    step = start.progress.step
    for problem in start.damaged:
        recorder.event("damaged_checkpoint", step, why=problem)
        recorder.say(f"passed over a damaged checkpoint: {problem}")
    for folder in start.set_aside:
        recorder.event("checkpoint_set_aside", step, folder=folder.name)
        recorder.say(f"it is kept as {folder}; mended, it takes part again under its old name")
    recorder.event("start", step, origin=start.origin, **about)
    for origin in changed_plugins(recorder.former_start.get("plugins", {})) if step and recorder.former_start else ():
        recorder.note("plugin_changed", step, why=f"{origin} is not the code that this run had before")
    if verified is not None:
        recorder.event("data_verified", step, **verified)
    if start.proof:
        recorder.event("weights_compared", step, why=start.proof)
        recorder.say(f"{start.origin}: {start.proof}")
    for choice in start.choices:
        recorder.event("model_choice_changed", step, why=choice)
        recorder.say(f"on purpose: {choice}")
    if anew and start.reader is not None:
        recorder.event("fp8_history_anew", step, layers=anew, why="the checkpoint has none for them")
    if start.remixed:
        why = "data.train or data.mix has changed; every source goes on where it stood"
        recorder.event("mixture", step, why=why, consumed=start.progress.consumed)
        recorder.say(f"from step {step + 1} on another mixture: {why}")
    if why_not_exportable and step == 0:
        recorder.event("not_exportable", step, why=why_not_exportable)
        recorder.say(f"this model cannot be exported to Hugging Face: {why_not_exportable}")
    again = f"; steps done before that come again: {recorder.num_redone:,}" if recorder.num_redone else ""
    recorder.say(f"starting from {start.origin}, step {step} of {total_steps}{again}")
