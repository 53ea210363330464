"""Measured steps against what `megalite plan` says of them, once they have settled: said and written down as the event
`plan`, with why where it is off by more than a tenth.

Seconds are the median of a few steps; memory is the first rank's, which is of the pipeline's first stage: on a GPU
torch's, which counts tensors as the plan does, on a CPU that of the process. Nothing waits for it. Where nothing is
compared, a line at the start says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.engine.protocol import StepResult
from megalite.errors import UserError
from megalite.monitor.recorder import Recorder, peak_memory_bytes
from megalite.planner.block_memory import is_compiled
from megalite.planner.estimate import Estimate, estimate
from megalite.planner.machines import load_machine, machine_of_gpu
from megalite.planner.memory import on_device
from megalite.train.components.component import Component, Step

UNSETTLED = 5
"""Steps of an attempt that are not counted: they allocate, compile and fill caches."""
COUNTED = 10
FAR = 0.1
GIB = 2**30
SETTING = "monitor.machine"


@dataclass(frozen=True)
class Measured:
    """What some steps took."""

    seconds: tuple[float, ...]
    waited: tuple[float, ...]
    """Of these, what passed before the batches were there."""
    memory: int
    """Bytes of the first rank."""


class PlanComparison(Component):
    """Compares once an attempt.

    Args:
        planned: what the machine was said to take for this config, memory being the process's on a CPU.
        machine: its name.
        is_full: whether a step has the whole batch, which was planned: it may still be growing.
        is_compiled: whether blocks are.
    """

    name = "plan_comparison"

    def __init__(
        self,
        planned: Estimate,
        machine: str,
        recorder: Recorder,
        is_full: Callable[[int], bool],
        *,
        is_compiled: bool,
    ):
        self._planned, self._machine, self._recorder = planned, machine, recorder
        self._is_full, self._is_compiled = is_full, is_compiled
        self._begun, self._seen = 0.0, 0
        self._seconds, self._waited = list[float](), list[float]()

    def before_step(self, step: Step) -> None:
        self._begun = time.perf_counter()

    def measure(self, step: Step, result: StepResult) -> None:
        if not self._is_full(step.number):
            return
        self._seen += 1
        if self._seen <= UNSETTLED or len(self._seconds) >= COUNTED:
            return
        worked = time.perf_counter() - self._begun
        self._waited.append(max(0.0, step.seconds - worked))
        self._seconds.append(step.seconds)
        if len(self._seconds) == COUNTED:
            self._say(step.number)

    def _say(self, step: int) -> None:
        measured = Measured(tuple(self._seconds), tuple(self._waited), peak_memory_bytes())
        why = " ".join(complaints(measured, self._planned, is_compiled=self._is_compiled))
        self._recorder.note(
            "plan",
            step,
            why=f"{summary(measured, self._planned, self._machine)}{'. ' if why else ''}{why}",
            machine=self._machine,
            seconds=median(measured.seconds),
            planned_seconds=self._planned.seconds,
            planned_parts=self._planned.parts,
            memory_bytes=measured.memory,
            planned_memory_bytes=self._planned.memory[0],
        )


def summary(measured: Measured, planned: Estimate, machine: str) -> str:
    """Both figures, and how far they are from what was planned; of a pipeline also which stage was to take the most
    memory, where that is not the one that was measured."""
    seconds, memory = median(measured.seconds), planned.memory
    text = (
        f"a step takes {seconds:.3g} s, and megalite plan says {planned.seconds:.3g} on {machine}"
        f" ({seconds / planned.seconds - 1:+.0%}); the first rank {measured.memory / GIB:.2f} GiB, planned"
        f" {memory[0] / GIB:.2f} ({measured.memory / memory[0] - 1:+.0%})"
    )
    stage = memory.index(max(memory))
    return f"{text}, of stage {stage} {memory[stage] / GIB:.2f}, the most" if stage else text


def complaints(measured: Measured, planned: Estimate, *, is_compiled: bool) -> Iterator[str]:
    """Why steps or memory are more than a tenth from what was planned, as far as that can be told; else nothing."""
    seconds, waited = median(measured.seconds), median(measured.waited)
    off = seconds / planned.seconds - 1
    if off > FAR and seconds - waited <= planned.seconds * (1 + FAR):
        yield f"It waits {waited:.3g} s for its batch: see data.prefetch, and what reads the data."
    elif off > FAR and min(measured.seconds) <= planned.seconds * (1 + FAR):
        yield (
            f"The fastest took {min(measured.seconds):.3g} s: something else takes turns with this run, on this node "
            "or on another of its ranks'."
        )
    elif off > FAR and not is_compiled:
        yield "Blocks are not compiled, and the machine's constants may be of compiled ones: see train.compile."
    elif abs(off) > FAR:
        part = max(planned.parts, key=planned.parts.__getitem__)
        yield (
            f"Nothing that is seen from here explains it; most was said to go into {part} "
            f"({planned.parts[part]:.3g} s): `megalite plan calibrate` measures this machine, and `--explain` shows "
            "all parts."
        )
    if abs(measured.memory / planned.memory[0] - 1) > FAR:
        more = measured.memory > planned.memory[0]
        yield (
            f"Memory is {'more' if more else 'less'} than planned: "
            + ("what a plug-in or the allocator keeps is not counted." if more else "the peak may be still to come.")
        )


def comparison_of(config: Config, plan: RunPlan, recorder: Recorder, device: torch.device) -> PlanComparison | None:
    """The component of a run on a machine that its config names, or that the GPU's name tells; where there is none the
    person watching hears why."""
    name, none = config.monitor.machine, f"{SETTING} names no machine"
    if name is None and device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        name, none = machine_of_gpu(gpu), f"{none}, and none that comes along is an {gpu}"
    if name is None:
        measure = "`megalite plan calibrate CONFIG --ranks N --out FILE` measures this one"
        recorder.say(f"no comparison with megalite plan: {none}; {measure}, and {SETTING}=FILE names it")
        return None
    machine = load_machine(name, asked_by=SETTING)
    if machine.device_type != device.type:
        recorder.say(f"no comparison with megalite plan: {SETTING}={name} is not for a {device.type.upper()}")
        return None
    try:
        planned = estimate(config, plan.world_size, machine, vocab_size=plan.model.vocab_size)
    except UserError as error:  # a machine without the format, on which the run trains all the same
        recorder.say(f"no comparison with megalite plan: {error}")
        return None
    compiled = is_compiled(on_device(config, device.type), plan)
    sizes, whole = plan.batch_sizes, config.batch.global_batch_size
    return PlanComparison(planned, name, recorder, lambda step: sizes.size(step) == whole, is_compiled=compiled)
