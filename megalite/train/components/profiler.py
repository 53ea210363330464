"""Traces some steps with torch's profiler, and writes a file a rank; the run computes the same numbers.

    step first - 1    the profiler warms up, where this attempt does that step: what it records is thrown away
    first .. last     recorded, from the end of the step before to the end of the step, the wait for its batch included
    behind last       written, and the profiler is gone

Whatever goes wrong with a trace is said, and the run goes on: a disk that is full, a profiler that is in use. An
attempt that begins behind the steps does nothing, one that begins among them traces those that are left. Where the run
goes back to an earlier step, or ends, what has been recorded is written.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from megalite.config.sections.profile import ProfileConfig
from megalite.engine.protocol import Engine, StepResult
from megalite.monitor.recorder import Recorder
from megalite.train.components.component import Component, RollBack, Step
from megalite.train.heartbeat import Heartbeat

FOLDER = "profile"
"""In the run's."""

MAX_ALLOCATIONS = 100_000
"""That a snapshot of a GPU's memory remembers."""


class Profiler(Component):
    """Traces steps of one rank.

    Args:
        engine: whose messages must not outlive the profiler.
        folder: of the traces.
        rank: the global one.
    """

    name = "profiler"

    def __init__(
        self,
        settings: ProfileConfig,
        engine: Engine,
        *,
        folder: Path,
        rank: int,
        device: torch.device,
        recorder: Recorder,
        heartbeat: Heartbeat,
    ):
        self._settings, self._steps, self._engine = settings, settings.step_range, engine
        self._folder, self._rank, self._device = folder, rank, device
        self._recorder, self._heartbeat = recorder, heartbeat
        self._remembers_allocations = settings.memory and device.type == "cuda"
        self._profile: profile | None = None
        self._first, self._last = 0, 0
        """Steps that are recorded; the last is the last one done."""

    def before_step(self, step: Step) -> None:
        warm_up = step.number + 1 in self._steps[:1]
        if self._profile is None and (warm_up or step.number in self._steps):
            self._begin(step.number, warm_up=warm_up)

    def after_step(self, step: Step, result: StepResult) -> RollBack | None:
        if self._profile is None:
            return None
        self._last = step.number
        if step.number + 1 == self._steps.stop:
            self._end()
        else:
            self._profile.step()
        return None

    def rewind(self, step: int, state: dict[str, Any]) -> None:
        """What was recorded is of steps that are done again."""
        self._end()

    def close(self) -> None:
        if sys.exc_info()[0] is None:  # else other ranks may be gone, and nobody wants to wait for them
            self._end()

    def _begin(self, step: int, *, warm_up: bool) -> None:
        self._first, self._last = step + warm_up, step
        activities = {ProfilerActivity.CPU}
        if self._device.type == "cuda":
            activities |= {ProfilerActivity.CUDA} & supported_activities()
        try:
            begun = profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=int(warm_up), active=self._steps.stop - self._first, repeat=1),
                record_shapes=self._settings.shapes,
                with_stack=self._settings.stacks,
                profile_memory=self._settings.memory,
                acc_events=True,
            )
            begun.start()
        except RuntimeError as error:  # another profiler is at work
            self._give_up(step, error)
            return
        self._profile = begun
        if self._remembers_allocations:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

    def _end(self) -> None:
        """Stop, and write what there is."""
        found, self._profile = self._profile, None
        if found is None:
            return
        self._heartbeat.enter("save", self._last)
        self._steps = range(0)  # once an attempt
        self._engine.held_weights()  # waits for messages: one that ends behind its profiler writes into freed memory
        try:
            found.stop()
            if self._last >= self._first:
                self._write(found)
        except (OSError, RuntimeError) as error:
            self._give_up(self._last, error)
        finally:
            if self._remembers_allocations:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, found: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self._first}-{self._last}-rank-{self._rank}"
        path = self._folder / f"{name}.json.gz"
        plain, packed = path.with_suffix(".plain"), path.with_suffix(".new")
        try:
            found.export_chrome_trace(str(plain))
            _require_whole(plain)
            with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=4) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            packed.replace(path)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
        if self._remembers_allocations:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}-memory.pickle"))
        steps = f"step {self._first}" if self._first == self._last else f"steps {self._first} to {self._last}"
        why = f"traced {steps} into {path.parent}; `megalite profile {self._folder.parent}` sums them up"
        self._recorder.note("profile", self._last, why=why, path=str(path), num_bytes=path.stat().st_size)

    def _give_up(self, step: int, error: Exception) -> None:
        self._steps = range(0)
        why = f"no trace of rank {self._rank}: {type(error).__name__}: {error}; the run goes on"
        if self._recorder.is_writer:
            self._recorder.note("profile_failed", step, why=why)
        else:
            print(f"step {step}: {why}", flush=True)  # into the rank's own log


def _require_whole(path: Path) -> None:
    """Raises OSError where the writer, which does not tell, has met a full disk."""
    if path.is_file() and path.stat().st_size:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            while (last := file.read(1)).isspace() and file.tell() > 1:
                file.seek(-2, os.SEEK_CUR)
        if last == b"}":
            return
    raise OSError(f"{path} could not be written to its end; is the disk full?")
