"""Whether a run fits this machine, asked before its ranks start: who has too little memory should hear it in words.

    plan's bytes of the local ranks + what each process takes by itself    against what is available
    ranks                                                                  against cores

The plan counts tensors at the peak of a step (`planner.memory`), so what does not fit by it does not fit at all; what
fits narrowly may still not. On GPUs every rank asks its own device.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from megalite.config.plan import RunPlan, default_world_size, make_plan
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.config.wording import divisors
from megalite.errors import ConfigError, UserError
from megalite.host import available_bytes, num_cores
from megalite.planner.memory import memory_by_stage, on_device
from megalite.planner.process import BASE_BYTES

MOST_RANKS_A_CORE = 8
"""With more, a step of a tiny model takes minutes."""

GIB = 2**30

FORCE = "--force starts it all the same"


def trains_on_cpu(config: Config) -> bool:
    """Whether ranks of a run would train on the CPU here, as far as can be told without importing torch."""
    return config.train.device == "cpu" or not any(Path("/dev").glob("nvidia[0-9]*"))


def check_fit(
    config: Config, plan: RunPlan, local_ranks: range, *, memory: int | None = None, cores: int | None = None
) -> None:
    """Refuse to start ranks for which this machine has too little memory or too few cores, or no memory that those of
    tp could share where they are to (`parallel.async_tp`).

    Args:
        local_ranks: global ranks that will run here.
        memory: bytes for all of them, which no force makes more; by default what is available now.
        cores: for all of them; by default those that this process may run on.

    Raises:
        UserError: what is needed, what is here, and the nearest plan that fits.
    """
    hint = f"; {FORCE}" if memory is None else ""
    cores = num_cores() if cores is None else cores
    if len(local_ranks) > MOST_RANKS_A_CORE * cores:
        raise UserError(
            f"{len(local_ranks)} ranks on {cores} cores: use at most {MOST_RANKS_A_CORE} a core, or another "
            f"machine{hint}"
        )
    if config.parallel.async_tp:
        check_shared_memory(not trains_on_cpu(config), plan.tp, len(local_ranks))
    if not trains_on_cpu(config):
        return
    needed, available = needed_bytes(config, plan, local_ranks), available_bytes() if memory is None else memory
    if needed <= available:
        return
    raise UserError(
        f"the run needs about {_gib(needed)} of memory here, {len(local_ranks)} rank{'s' * (len(local_ranks) > 1)} "
        f"together, and {_gib(available)} are available; {_advice(config, plan, available)}{hint}"
    )


def check_device_memory(config: Config, plan: RunPlan, stage: int, free: int) -> None:
    """Refuse a stage of the model that the device of this rank has no room for.

    Args:
        stage: of the pipeline.
        free: bytes of the device that nobody uses yet.

    Raises:
        UserError: what is needed, what is free, and the nearest plan that fits.
    """
    config = on_device(config, "cuda")
    needed = memory_by_stage(config, plan)[stage].total
    if needed > free:
        others = f"; {_advice(config, plan, free, on_devices=True)}"
        raise UserError(
            f"pipeline stage {stage} needs about {_gib(needed)} of its device, and {_gib(free)} are free{others}; "
            f"{FORCE}"
        )


def needed_bytes(config: Config, plan: RunPlan, local_ranks: range) -> int:
    """Memory that some ranks take together at the peak of a step, on CPUs."""
    stages, ranks_a_stage = memory_by_stage(on_device(config, "cpu"), plan), plan.world_size // plan.pp
    return sum(stages[rank // ranks_a_stage].total + BASE_BYTES for rank in local_ranks)


def _advice(config: Config, plan: RunPlan, available: int, *, on_devices: bool = False) -> str:
    for words, other, other_plan in _nearest(config, plan):
        if on_devices:
            needed = max(stage.total for stage in memory_by_stage(other, other_plan))
        else:
            needed = needed_bytes(other, other_plan, range(other_plan.world_size))
        if needed <= available:
            return f"{words} fits ({_gib(needed)})"
    return "no smaller micro-batch and no recomputation would fit; use a smaller model, or more machines"


def _nearest(config: Config, plan: RunPlan) -> Iterator[tuple[str, Config, RunPlan]]:
    """Plans of the same run that take less: first those that only cost time, then those with fewer ranks."""
    sizes = [size for size in reversed(divisors(config.batch.micro_batch_size)) if size < config.batch.micro_batch_size]
    changes: list[dict[str, object]] = [{"batch.micro_batch_size": size} for size in sizes]
    full: dict[str, object] = {"train.recompute": "full"}
    if config.train.recompute_layers:
        full["train.recompute_layers"] = ()
    changes += [full, *({**change, **full} for change in changes)]
    fewer = [size for size in reversed(divisors(plan.dp)) if size < plan.dp]
    changes += [{"parallel.dp": size, **change} for size in fewer for change in ({}, *changes)]
    for change in changes:
        other = _with(config, change)
        world_size = default_world_size(other) if "parallel.dp" in change else plan.world_size
        try:
            validate(other, world_size)
            other_plan = make_plan(other, world_size, plan.model.vocab_size)
        except ConfigError:
            continue
        words = shlex.join(f"{key}={'[]' if value == () else value}" for key, value in change.items())
        yield words, other, other_plan


def _with(config: Config, changes: dict[str, object]) -> Config:
    """The config with some settings replaced, by their dotted names."""
    for key, value in changes.items():
        section, name = key.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def check_shared_memory(has_gpus: bool, tp: int, local_world_size: int | None) -> None:
    """Refuse `parallel.async_tp` where the ranks of tp have no GPUs, or not all in one node.

    Args:
        local_world_size: ranks on this node, where the launcher says.

    Raises:
        UserError: which of both it is, and what to set instead.
    """
    if not has_gpus:
        raise UserError("parallel.async_tp: needs GPUs that share memory, and this rank has none; use false")
    if local_world_size is not None and local_world_size % tp:
        raise UserError(
            f"parallel.async_tp: each tp={tp} ranks share memory, and a node has {local_world_size}; use a tp that "
            "divides these, or async_tp=false"
        )
