"""What must hold of a pipeline: its engine, its stages, their chunks, its schedule, and its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megalite.config.engine import NATIVE_STAGES, choose_engine, unknown_to_fsdp2
from megalite.config.plan import derive_dp
from megalite.config.schema import Config, ParallelConfig
from megalite.config.wording import counted, divisors, or_, unused
from megalite.parallel.schedules.files import read_schedule
from megalite.parallel.schedules.kinds import SCHEDULES, SUFFIX, chunks_per_stage, is_file
from megalite.parallel.schedules.operations import PipelineSchedule, ScheduleError


def check_pipeline(config: Config, world_size: int) -> Iterator[str]:
    """Complaints about pipelines, and about the engine that has them.

    A schedule of one's own is read here, as part of the config.
    """
    yield from _pipeline(config, world_size)
    yield from _engine(config, world_size)


def _pipeline(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    if parallel.pp > config.model.num_layers:
        yield (
            f"parallel.pp: num_layers={config.model.num_layers} cannot fill pp={parallel.pp} stages; use "
            f"pp={config.model.num_layers} or less"
        )
    elif parallel.pp == 1:
        yield from unused(parallel, ("schedule", "chunks"), "parallel", "pp=1")
        yield from _blocks(config, num_chunks=1)
    elif is_file(parallel.schedule):
        yield from _file(config, world_size)
    elif parallel.schedule not in SCHEDULES:
        yield (
            f"parallel.schedule: found {parallel.schedule!r}, expected {or_(SCHEDULES)}, or a file of one's own, "
            f"NAME{SUFFIX}"
        )
    else:
        yield from _kind(config, world_size)


def _engine(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    pp, stage, engine = parallel.pp, parallel.zero_stage, choose_engine(config)
    if pp > 1 and stage not in NATIVE_STAGES:
        dp = world_size // (parallel.cp * parallel.tp)
        yield (
            f"parallel.zero_stage: found {stage} with pp={pp}, but a pipeline keeps gradients and weights whole over "
            f"dp; use zero_stage=1, or pp=1 (then dp={dp})"
        )
    elif engine == "fsdp2" and stage != 3 and pp == 1:
        yield f"parallel.engine: fsdp2 divides weights, zero_stage=3, found {stage}; use that, or engine=native or null"
    elif engine == "native" and stage not in NATIVE_STAGES:
        yield (
            f"parallel.engine: native has zero_stage={or_(NATIVE_STAGES)}, found {stage}; use engine=deepspeed or "
            "null, or zero_stage=1"
        )
    if config.engine.deepspeed_extra and engine != "deepspeed":
        use = "set parallel.engine=deepspeed, or leave it out" if pp == 1 else "leave it out"
        yield (
            f"engine.deepspeed_extra: found {', '.join(config.engine.deepspeed_extra)}, but it has no effect with "
            f"parallel.engine={engine}, which is taken here; {use}"
        )
    if pp > 1 and engine != "native":
        yield f"parallel.engine: {engine} has no pipelines here, found pp={pp}; use engine=native or null, or pp=1"
    if engine == "fsdp2":
        yield from _fsdp2(config, world_size)
    else:
        yield from unused(parallel, ("dp_replicate",), "parallel", f"engine={engine}")


def _fsdp2(config: Config, world_size: int) -> Iterator[str]:
    """Groups of replicas, and what the engine does not know."""
    parallel = config.parallel
    replicas = derive_dp(config, world_size) * parallel.cp
    if replicas % parallel.dp_replicate:
        yield (
            f"parallel.dp_replicate: dp x cp = {replicas} replicas are not {parallel.dp_replicate} equal groups; use "
            f"{or_(divisors(replicas))}"
        )
    if parallel.dp_replicate > 1 and parallel.ep > 1:
        yield "parallel.dp_replicate: experts are divided over all of their replicas; use 1, or ep=1"
    yield from unknown_to_fsdp2(config)


def _kind(config: Config, world_size: int) -> Iterator[str]:
    """Of a schedule that megalite brings."""
    parallel = config.parallel
    name, pp, num_layers = parallel.schedule, parallel.pp, config.model.num_layers
    kind, chunks = SCHEDULES[name], chunks_per_stage(name, parallel.chunks)
    if kind.chunks is not None and chunks != kind.chunks:
        other = " (interleaved takes more)" if kind.chunks == 1 else ""
        use = f"use {kind.chunks} or null{other}"
        yield f"parallel.chunks: {name} has {kind.chunks} on each stage, found {chunks}; {use}"
        return
    if kind.chunks is None and chunks < 2:
        yield f"parallel.chunks: {name} has two or more on each stage, found {chunks}; use 2, or schedule=1f1b"
        return
    if pp * chunks > num_layers:
        most = num_layers // pp
        uses = [f"chunks={most}"] if kind.chunks is None and most > 1 else []
        uses += [f"pp={num_layers // chunks}"] if num_layers // chunks > 1 else []
        if not uses or kind.chunks is not None:
            uses.append("schedule=1f1b or zb-h1, which have one chunk a stage")
        yield (
            f"parallel.chunks: pp={pp} stages with {chunks} each are {pp * chunks} chunks, more than "
            f"num_layers={num_layers}; use {or_(uses)}"
        )
        return
    yield from _blocks(config, num_chunks=pp * chunks)
    if kind.is_split:
        yield from _split(config)
    yield from _micro_batches(config, world_size, kind.least_micro_batches(pp))


def _micro_batches(config: Config, world_size: int, least: int) -> Iterator[str]:
    """That no step has too few."""
    batch, dp = config.batch, derive_dp(config, world_size)
    unit = batch.micro_batch_size * dp
    sizes = {"global_batch_size": batch.global_batch_size}
    if batch.ramp is not None:
        sizes["ramp.start_size"] = batch.ramp.start_size
    for name, size in sizes.items():
        if size // unit < least:
            yield (
                f"batch.{name}: {size} is {counted(size // unit)} of {batch.micro_batch_size} on each of dp={dp} "
                f"ranks, and schedule={config.parallel.schedule} with pp={config.parallel.pp} needs {least} or more; "
                f"use {least * unit}, a smaller micro_batch_size, or schedule=zb-v"
            )


def _file(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    try:
        schedule = read_schedule(Path(parallel.schedule))
    except ScheduleError as error:
        yield f"parallel.schedule: {error}"
        return
    placement, where = schedule.placement, f"parallel.schedule: {parallel.schedule}"
    if placement.num_ranks != parallel.pp:
        stages = counted(placement.num_ranks, "stage", "stages")
        use = f"use pp={placement.num_ranks}" if placement.num_ranks > 1 else f"write a line for each of {parallel.pp}"
        yield f"{where} is for {stages}, found pp={parallel.pp}; {use}"
        return
    if placement.num_chunks > config.model.num_layers:
        yield (
            f"{where} has {placement.num_chunks} chunks, more than num_layers={config.model.num_layers}; write one "
            "with fewer"
        )
        return
    first, last = placement.ranks[0], placement.ranks[-1]
    if first != 0 or last not in (0, parallel.pp - 1):
        yield (
            f"{where} has the first chunk on stage {first} and the last one on stage {last}; the first has to be on "
            f"stage 0, the last on stage 0 or {parallel.pp - 1}: number the stages so"
        )
        return
    yield from _file_micro_batches(config, world_size, schedule.num_micro_batches)
    yield from unused(parallel, ("chunks",), "parallel", f"a schedule of one's own, which has {_counts(schedule)}")
    yield from _blocks(config, num_chunks=placement.num_chunks)
    if schedule.is_split:
        yield from _split(config)


def _file_micro_batches(config: Config, world_size: int, expected: int) -> Iterator[str]:
    """That every step has as many as stand in the file."""
    batch, dp = config.batch, derive_dp(config, world_size)
    unit, size, path = batch.micro_batch_size * dp, batch.global_batch_size, config.parallel.schedule
    if batch.ramp is not None or (batch.noise_scale is not None and batch.noise_scale.max_batch_size is not None):
        key = "ramp" if batch.ramp is not None else "noise_scale.max_batch_size"
        yield (
            f"batch.{key}: the batch grows, and {path} is for {counted(expected)} in every step; use {key}=null, or "
            f"schedule={or_(SCHEDULES)}"
        )
    elif size % unit == 0 and size != expected * unit:
        yield (
            f"batch.global_batch_size: {size} is {counted(size // unit)} of {batch.micro_batch_size} on each of "
            f"dp={dp} ranks, and {path} is for {expected}; use {expected * unit}, or schedule={or_(SCHEDULES)}"
        )


def _counts(schedule: PipelineSchedule) -> str:
    """How many chunks each stage has, in words."""
    placement = schedule.placement
    return f"{or_(sorted({len(placement.chunks_of(rank)) for rank in range(placement.num_ranks)}))} on a stage"


def _blocks(config: Config, num_chunks: int) -> Iterator[str]:
    """That the blocks given for chunks, or for stages of one chunk each, are those of the model."""
    parallel = config.parallel
    if parallel.blocks_per_stage is not None and parallel.blocks_per_chunk is not None:
        yield "parallel.blocks_per_chunk: found beside blocks_per_stage; give one of them"
        return
    if parallel.blocks_per_stage is not None and num_chunks != parallel.pp:
        yield (
            f"parallel.blocks_per_stage: schedule={parallel.schedule} has {num_chunks} chunks on pp={parallel.pp} "
            "stages; use blocks_per_chunk"
        )
        return
    yield from _sums(parallel, "blocks_per_stage", f"pp={parallel.pp}", parallel.pp, config.model.num_layers)
    yield from _sums(parallel, "blocks_per_chunk", str(num_chunks), num_chunks, config.model.num_layers)


def _sums(parallel: ParallelConfig, key: str, count: str, expected: int, num_layers: int) -> Iterator[str]:
    blocks = getattr(parallel, key)
    if blocks is not None and (len(blocks) != expected or sum(blocks) != num_layers or 0 in blocks[:-1]):
        yield (
            f"parallel.{key}: found {list(blocks)}, expected {count} numbers whose sum is "
            f"num_layers={num_layers}, of which only the last may be 0; correct it, or use null"
        )


def _split(config: Config) -> Iterator[str]:
    fp8, name = config.precision.fp8, config.parallel.schedule
    if fp8 is not None and fp8.backend == "te":
        yield (
            f"parallel.schedule: {name} makes gradients of weights later than those of inputs, and "
            "precision.fp8.backend=te makes both in one; use schedule=1f1b or interleaved, or backend=scaled_mm"
        )
