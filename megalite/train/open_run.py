"""From ranks that are connected to a run that can train: its attempt, its folder, weights, engine and records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megalite.checkpoint.attempt import join_attempt
from megalite.checkpoint.fence import Fence
from megalite.checkpoint.format import Progress
from megalite.checkpoint.hf.families.registry import exportable
from megalite.checkpoint.precision_state import load_state
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data.samples import Samples
from megalite.engine.build import DTYPES, build_engine, with_preference
from megalite.engine.protocol import Engine
from megalite.monitor.recorder import Recorder
from megalite.parallel.axes import Axes
from megalite.plugins import changed_plugins, loaded_plugins
from megalite.train.data_check import verify_data
from megalite.train.device import describe_machine, find_peak, kind_with_products
from megalite.train.heartbeat import Heartbeat
from megalite.train.place import Place
from megalite.train.preflight import ReadyStage, open_run_tasks
from megalite.train.reference import open_reference
from megalite.train.rotation_change import is_rotated_otherwise, measure_rotation, tell_rotation
from megalite.train.run import Run
from megalite.train.run_folder import write_run_folder
from megalite.train.same_run import counted, find_machines, tell_machines
from megalite.train.signals import StopRequest
from megalite.train.start import Start, Zeros, choose_start
from megalite.train.startup import BUILDING, LOADING, Say


@dataclass(frozen=True)
class Connected:
    """A rank that has met the others."""

    config: Config
    stages: tuple[ReadyStage, ...]
    valid_sets: dict[str, Samples]
    place: Place
    axes: Axes
    device: torch.device
    stop: StopRequest
    heartbeat: Heartbeat


@dataclass(frozen=True)
class Entrance:
    """What a rank does once, before the first stage that it trains."""

    fence: Fence
    verified: dict[str, float] | None
    """Of `data_check.verify_data`; None where that was not asked for."""


def enter(rank: Connected, say: Say) -> Entrance:
    """Take the run's folder, and look at its data where that is asked for. Collective.

    Args:
        say: is told what takes its time.
    """
    config, plan, axes, device = rank.config, rank.stages[0].plan, rank.axes, rank.device
    verified = verify_data(config, plan, axes, device, say) if config.data.verify else None
    fence = join_attempt(config.run.dir, rank.place.attempt, axes, device)
    if rank.place.rank == 0:
        write_run_folder(config, plan)
    return Entrance(fence, verified)


def open_run(rank: Connected, entry: Entrance, say: Say) -> tuple[Run, Progress]:
    """Make ready to train: what a rank trains with, and where it goes on from. Collective.

    Args:
        say: is told what takes its time.
    """
    axes, device, is_writer = rank.axes, rank.device, rank.place.rank == 0
    say(LOADING)
    start = choose_start(rank.config, rank.stages, axes, device)
    stage = next((each for each in rank.stages if each.plan.goes_on_from(start.progress.step)), rank.stages[-1])
    config, plan = stage.config, stage.plan
    say(BUILDING)
    engine = _build_engine(config, plan, axes, device, start)
    reference = partial(open_reference, rank.config, rank.stages, axes, device)
    engine = with_preference(engine, config, plan, axes, device, reference)
    anew = load_state(engine, start.reader)
    peak = find_peak(device, DTYPES[config.precision.dtype])
    recorder = Recorder(config, plan, first_step=start.progress.step, peak_flops=peak.flops, is_writer=is_writer)
    about = {"world_size": rank.place.world_size, "attempt": entry.fence.attempt, **describe_machine(device)}
    if len(rank.stages) > 1:
        about |= {"stage": rank.stages.index(stage), "seq_len": config.batch.seq_len}
    about |= {"plugins": {each.origin: each.digest for each in loaded_plugins()}} if loaded_plugins() else {}
    machines = find_machines(kind_with_products(device), axes.world)
    about |= {"peak_flops": peak.flops, "peak_is": peak.origin, "machines": counted(machines)}
    _record_start(recorder, start, plan, about, anew, entry.verified)
    tell_machines(recorder, machines, start.progress.step)
    recorder.say(f"mfu is a share of {peak}")
    if len(rank.stages) > 1:
        _say_stage(recorder, rank.stages, stage)
    samples = stage.samples.following(start.progress.account)
    if start.trained_as is not None and is_rotated_otherwise(start.trained_as, plan.model):
        step = start.progress.step
        tell_rotation(recorder, measure_rotation(start.trained_as, stage, engine, samples, axes, step), step)
    run = Run(
        config,
        rank.config,
        rank.stages,
        plan,
        axes,
        device,
        engine,
        samples,
        rank.valid_sets,
        open_run_tasks(rank.config, plan, stage.samples),
        recorder,
        entry.fence,
        rank.stop,
        rank.heartbeat,
        {} if start.reader is None else start.reader.manifest.data,
    )
    return run, start.progress


def _say_stage(recorder: Recorder, stages: tuple[ReadyStage, ...], stage: ReadyStage) -> None:
    """Which part of the run begins, or goes on."""
    plan, length, theta = stage.plan, stage.config.batch.seq_len, stage.config.model.rope.theta
    where = f"stage {stages.index(stage) + 1} of {len(stages)}, steps {plan.first_step:,} to {plan.last_step:,}"
    recorder.say(f"{where}: sequences of {length:,} tokens, rotated with theta {theta:g}")


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
