"""The pipeline of a run: which schedule for how many micro-batches, and what its chunks cost.

Costs are multiply-adds of one micro-batch, from the descriptions of blocks: a schedule is a function of the config
alone, and the same on every rank. Of a backward pass, I has the other products of the linear layers, attention's
backward pass (five products where the forward pass has two) and what is recomputed; W the linear layers' products. The
head makes its gradients in its forward pass, so that its backward pass costs nothing.
"""

from __future__ import annotations

from megalite.architecture.architecture import Architecture
from megalite.architecture.attention_costs import mixing_multiply_adds
from megalite.architecture.costs import linear_multiply_adds
from megalite.config.batch_sizes import reachable_sizes
from megalite.config.plan import HEAD_TIME_PER_FLOP, RunPlan
from megalite.config.recompute import recompute_by_block
from megalite.config.schema import Config
from megalite.config.wording import counted
from megalite.errors import ConfigError
from megalite.parallel.schedules.kinds import find_schedule
from megalite.parallel.schedules.operations import PipelineSchedule, ScheduleError
from megalite.parallel.schedules.programs import Program, make_programs
from megalite.parallel.schedules.proof import check_orders, prove
from megalite.parallel.schedules.simulation import ChunkCosts

ATTENTION_BACKWARD = 2.5
"""Products of attention's backward pass over those of its forward pass, which are made again."""


def chunk_costs(config: Config, plan: RunPlan) -> tuple[ChunkCosts, ...]:
    """Of each chunk, in multiply-adds of a token."""
    modes = recompute_by_block(config, plan)
    return tuple(
        _costs(plan.model, blocks, config, modes, is_last=blocks is plan.chunk_blocks[-1])
        for blocks in plan.chunk_blocks
    )


def _costs(
    model: Architecture, blocks: tuple[int, int], config: Config, modes: tuple[str, ...], *, is_last: bool
) -> ChunkCosts:
    further = model.num_predictions if is_last else 0
    indices = [*range(*blocks), *range(model.num_layers, model.num_layers + further)]
    chosen = (*model.blocks[slice(*blocks)], *(further * [model.block(model.num_layers)]))
    of_linear = [linear_multiply_adds(block, model.hidden_size) for block in chosen]
    of_attention = [mixing_multiply_adds(block.attention, config.batch.seq_len) for block in chosen]
    linear, attention = sum(of_linear) + further * 2 * model.hidden_size**2, sum(of_attention)
    head = 3.0 * HEAD_TIME_PER_FLOP * model.vocab_size * model.hidden_size * (1 + further) if is_last else 0.0
    passes = zip(indices, of_linear, of_attention, strict=True)
    again = sum(products + mixing for index, products, mixing in passes if modes[index] == "full")
    return ChunkCosts(
        forward=linear + attention + head,
        input_gradient=linear + ATTENTION_BACKWARD * attention + again,
        weight_gradient=linear if model.lora is None else 0.0,  # of what is frozen none is made
    )


def pipeline_schedule(config: Config, plan: RunPlan, num_micro_batches: int) -> PipelineSchedule:
    """The order of passes of a step of so many micro-batches.

    Raises:
        ScheduleError: there is none.
    """
    parallel, schedule = config.parallel, plan.own_schedule
    if schedule is None:
        return find_schedule(parallel.schedule, plan.pp, num_micro_batches, parallel.chunks)
    if schedule.num_micro_batches != num_micro_batches:
        raise ScheduleError(f"it is for {counted(schedule.num_micro_batches)}, and a step has {num_micro_batches}")
    check_orders(schedule)
    return schedule


def few_rounds(num_micro_batches: int, pp: int) -> int:
    """So many micro-batches that a schedule of ours does with more of them what it does with these, again and again."""
    return min(num_micro_batches, ROUNDS * pp + num_micro_batches % pp)


ROUNDS = 3
"""Of as many micro-batches as there are stages: it fills, it is full, it empties."""


def proven_programs(config: Config, plan: RunPlan, schedule: PipelineSchedule) -> tuple[Program, ...]:
    """What each stage does in a step, proven to be whole and to end.

    Raises:
        ScheduleError: naming the passes or messages that are at fault.
    """
    check_orders(schedule)
    programs = make_programs(schedule, chunk_costs(config, plan))
    prove(programs, schedule.placement)
    return programs


def prove_pipeline(config: Config, plan: RunPlan) -> None:
    """See that every step that the run will have ends, before any process starts.

    Raises:
        ConfigError: one does not; naming the passes or messages that are at fault.
    """
    for count in micro_batch_counts(config, plan):
        try:
            proven_programs(config, plan, pipeline_schedule(config, plan, count))
        except ScheduleError as error:
            raise ConfigError(
                [f"parallel.schedule: {config.parallel.schedule} with {counted(count)}: {error}"]
            ) from error


def micro_batch_counts(config: Config, plan: RunPlan) -> tuple[int, ...]:
    """How many micro-batches steps of the run can have on each rank: each number once."""
    unit = config.batch.micro_batch_size * plan.dp
    return tuple(dict.fromkeys(size // unit for size in reachable_sizes(config.batch)))
