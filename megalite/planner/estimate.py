"""What a layout takes on a machine: seconds, memory, and what both are made of.

A layout fits where no rank has more than its share of the machine's memory (`memory_gib`):

    on GPUs    tensors at the peak of a step             nine tenths of it, less what libraries take
    on CPUs    its process: tensors, the heap's holes,   nine tenths of it
               Python and PyTorch (`process`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from megalite.config.length_stages import length_stages
from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config
from megalite.planner.machines import Machine
from megalite.planner.memory import StageMemory, each_stage, memory_by_stage, on_device
from megalite.planner.practice import OURS, Practice
from megalite.planner.process import process_bytes
from megalite.planner.seconds import Parts, step_time_below

USABLE = 0.9
"""Of a GPU's memory: the rest is the allocator's, whose blocks do not fit into one another."""
TAKEN_BYTES = 2 * 2**30
"""Of a GPU's, by the driver and by the libraries that ranks talk through."""
USABLE_OF_HOST = 0.9
"""Of a node's memory: the rest is the system's, the processes' and the page cache's."""


@dataclass(frozen=True)
class Estimate:
    """A layout judged."""

    overrides: tuple[str, ...]
    """What makes the config this layout; empty for its own."""
    seconds: float
    """Of a step of the full batch."""
    tokens_per_second: float
    """Of all ranks."""
    mfu: float
    """Model FLOPs a second over the peak of `precision.dtype`, or TF32's where fp32 may round to it, causal attention
    counted half: FP8's products are held against that, too, and can bring it above 1."""
    tensors: tuple[int, ...]
    """Bytes of a rank of each stage of the pipeline at the peak of a step; of the longest sequences of the run."""
    host: tuple[int, ...]
    """The same of the host's memory: what is offloaded."""
    fits: bool
    parts: Parts
    """Seconds, by what they go into."""
    process: tuple[int, ...] = ()
    """Bytes of the whole process of a rank of each stage, on a machine of CPUs; else nothing."""

    @property
    def memory(self) -> tuple[int, ...]:
        """Bytes of a rank of each stage that the machine must have room for: those of what is `compared`."""
        return self.process or self.tensors

    @property
    def compared(self) -> str:
        """What of a rank is held against the machine's memory."""
        return "process" if self.process else "tensors"

    @property
    def bound_by(self) -> str:
        """What most of a step goes into."""
        return max(self.parts, key=self.parts.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "overrides": list(self.overrides),
            "seconds_per_step": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "memory_bytes": list(self.tensors),
            "process_bytes": list(self.process) or None,
            "host_bytes": list(self.host),
            "fits": self.fits,
            "breakdown": self.parts,
        }


def estimate(
    config: Config,
    world_size: int,
    machine: Machine,
    *,
    vocab_size: int | None = None,
    overrides: Sequence[str] = (),
    practice: Practice = OURS,
) -> Estimate:
    """Judge a config that `validate` has passed.

    Args:
        vocab_size: where the config takes its tokenizer's.
        overrides: what has made the config, for the record.
        practice: of the software.

    Raises:
        UserError: the machine has no units for the config's format.
    """
    config = on_device(config, machine.device_type)
    plan = make_plan(config, world_size, vocab_size)
    memory = Memory([0] * plan.pp, [0] * plan.pp)
    for each in _of_one_length(config, plan, vocab_size):
        for stage in memory_by_stage(*each, practice):
            memory.add(stage)
    found = timed(config, plan, machine, memory, overrides=overrides, practice=practice)
    assert found is not None, "no limit is given"
    return found


class Memory(NamedTuple):
    """Most bytes of a rank of each stage, of the device's memory and of the host's."""

    device: list[int]
    host: list[int]

    def add(self, stage: StageMemory) -> None:
        """What a stage takes in a run of one length."""
        for most, taken in ((self.device, stage.total), (self.host, stage.host)):
            most[stage.stage] = max(most[stage.stage], taken)


def memory_if_fits(
    config: Config, plan: RunPlan, machine: Machine, *, vocab_size: int | None, practice: Practice
) -> Memory | None:
    """What a layout takes; None where it does not fit, which is sooner known than its seconds."""
    usable, of_host, memory = usable_memory(machine), usable_host_memory(machine), Memory([0] * plan.pp, [0] * plan.pp)
    for each in _of_one_length(config, plan, vocab_size):
        for stage in each_stage(*each, practice):
            if _taken(config, machine, stage.total) > usable or stage.host > of_host:
                return None
            memory.add(stage)
    return memory


def _of_one_length(config: Config, plan: RunPlan, vocab_size: int | None) -> list[tuple[Config, RunPlan]]:
    """The run's stages as runs by themselves: memory is that of the longest sequences."""
    if not config.batch.stages:
        return [(config, plan)]
    configs = [stage.config for stage in length_stages(config)]
    return [(each, make_plan(each, plan.world_size, vocab_size)) for each in configs]


def timed(
    config: Config,
    plan: RunPlan,
    machine: Machine,
    memory: Memory,
    *,
    overrides: Sequence[str] = (),
    practice: Practice = OURS,
    below: float = inf,
) -> Estimate | None:
    """A layout whose memory is known; None for one that takes so many seconds or more."""
    time = step_time_below(below, config, plan, machine, practice)
    if time is None:
        return None
    taken = tuple(_taken(config, machine, tensors) for tensors in memory.device)
    return Estimate(
        tuple(overrides),
        time.seconds,
        plan.tokens_per_step / time.seconds,
        mfu(config, plan, machine, time.seconds),
        tuple(memory.device),
        tuple(memory.host),
        max(taken) <= usable_memory(machine) and max(memory.host) <= usable_host_memory(machine),
        time.parts,
        taken if machine.device_type == "cpu" else (),
    )


def _taken(config: Config, machine: Machine, tensors: int) -> int:
    """Bytes of the machine's memory that a rank takes, given those of its tensors."""
    return process_bytes(config, tensors) if machine.device_type == "cpu" else tensors


def mfu(config: Config, plan: RunPlan, machine: Machine, seconds: float) -> float:
    """Of a step that takes so long."""
    peak = machine.product_rate(config.precision) / machine.constants.products
    return plan.flops_per_token * plan.tokens_per_step / plan.world_size / peak / seconds


def usable_memory(machine: Machine) -> float:
    """Bytes that a rank may take: its tensors, or on a CPU its process."""
    if machine.device_type == "cpu":
        return USABLE_OF_HOST * machine.memory_gib * 2**30
    return USABLE * machine.memory_gib * 2**30 - TAKEN_BYTES


def usable_host_memory(machine: Machine) -> float:
    """Bytes that a rank may keep in the memory of its node."""
    if machine.host_memory_gib is None:
        return inf
    return USABLE_OF_HOST * machine.host_memory_gib * 2**30 / machine.ranks_per_node
