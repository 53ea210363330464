"""Seconds between the passes of a step: what replicas send each other, and the update of the weights.

Where weights are divided over the replicas, they are gathered for each pass of each micro-batch and their gradients
reduced behind it: messages that the passes hide, and copies beside them, in and out of what is sent, that they do not.

Gathers and scatters have the rate that a machine's `halves` says, wherever they are those that it was measured of: on
GPUs, where the native engine and FSDP2 ask NCCL for the same two, all (DeepSpeed's are counted alike). On CPUs those of
divided weights; the native engine's go by other ways of gloo's there (`engine.native.replication`), and are counted at
the rate of a sum, with which measured runs are met better (docs/log.md).
"""

from __future__ import annotations

from math import ceil

from megalite.architecture.costs import ELEMENT_BYTES, FP32_BYTES
from megalite.config.optimizers import RULES
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.optim.rules import all_rules
from megalite.parallel.schedules.kinds import SCHEDULES
from megalite.planner.holdings import numbers_by_stage, update_multiply_adds
from megalite.planner.links import leaves_node, rate_over
from megalite.planner.machines import Machine
from megalite.planner.offloaded import (
    added_up,
    is_offloaded,
    there_and_back,
    to_the_device,
    to_the_host,
    update_seconds,
)
from megalite.planner.practice import Practice
from megalite.planner.replica_traffic import ReplicaBytes, bytes_by_stage, gathered_once, gradient_bytes


def between_steps(
    config: Config, plan: RunPlan, machine: Machine, practice: Practice, *, backward: float
) -> dict[str, float]:
    """What the replicas send, where the passes do not hide it, and the update, by their names.

    Args:
        backward: seconds of the last micro-batch's backward pass, behind which gradients may travel.
    """
    found, of_stages = dict[str, float](), numbers_by_stage(config, plan)
    numbers, updated = max(each.trained for each in of_stages), max(each.masters for each in of_stages)
    if plan.num_replicas > 1:
        hides = practice.hides_reductions and machine.hides_messages and not config.train.cuda_graphs
        found["dp"] = sum(
            max(sent - behind, sent * VISIBLE) if hides else sent
            for sent, behind in _messages(config, plan, machine, numbers, backward)
        )
        gathered = max(each.parameters for each in of_stages)
        copied = _copied_bytes(config, plan, machine, practice, numbers, gathered)
        found["dp"] += copied / (machine.memory_bandwidth * COPY_RATE)
    a, states = ELEMENT_BYTES[config.precision.dtype], max(each.state_bytes for each in of_stages)
    moved = 2.0 * (states + FP32_BYTES * updated) + (FP32_BYTES + a) * updated
    pieces = _num_shards(config, plan) if plan.sharding.optimizer else 1
    if is_offloaded(config, machine):
        found["optimizer"] = update_seconds(moved / pieces, machine)
        if plan.sharding.weights:
            found["optimizer"] += _beside_gathers(config, plan, machine, backward)
        else:
            found["optimizer"] += there_and_back(config, machine, updated / pieces)
    else:
        found["optimizer"] = moved / pieces / (machine.memory_bandwidth * machine.constants.passes)
    if products := update_multiply_adds(config, plan):
        is_given_format = any(RULES[name].multiplies for name in all_rules(config.optimizer))
        is_given_format |= config.precision.dtype == "fp32"
        rate = machine.product_rate(config.precision) if is_given_format else machine.rate("fp32")
        found["optimizer"] += 2.0 * products / rate
    return found


def _beside_gathers(config: Config, plan: RunPlan, machine: Machine, backward: float) -> float:
    """Of the way that FSDP2's rows take from the host, and gradients to it, what passes do not hide; and what the host
    adds up."""
    once, count = gathered_once(config, plan), plan.grad_accum_steps
    numbers = ((2 * each.parameters - once, each.trained) for each in numbers_by_stage(config, plan))
    gathered, reduced = (max(each) / _num_shards(config, plan) for each in zip(*numbers, strict=True))
    behind = count * to_the_device(machine, gathered) + to_the_host(machine, reduced)
    awaited = (count - 1) * (to_the_host(machine, reduced) + added_up(machine, reduced))
    return max(behind - 1.5 * count * backward, VISIBLE * behind) + awaited


def _num_shards(config: Config, plan: RunPlan) -> int:
    return plan.num_replicas // config.parallel.dp_replicate


def _messages(
    config: Config, plan: RunPlan, machine: Machine, numbers: int, backward: float
) -> list[tuple[float, float]]:
    """Seconds of what replicas send each other in a step, by the bytes that it has (`replica_traffic`), and seconds of
    the passes that it travels behind. A forward pass is half of a backward one."""
    sent = max(bytes_by_stage(config, plan), key=lambda each: each.total)
    gradients, weights = _seconds_of(sent, config, plan, machine)
    waiting = HOP_SECONDS * (plan.num_replicas - 1)  # of a message, however short it is
    count = plan.grad_accum_steps
    if plan.sharding.weights:
        num_passes = count * max(len(plan.blocks_of(stage)) for stage in range(plan.pp))
        waiting = num_passes * _waits_of_block(config, plan, machine)
        between = _between_copies(sent, config, plan, machine)
        return [((gradients + weights) / machine.halves + between + waiting, 1.5 * count * backward)]
    buckets = ceil(numbers / BUCKET_NUMBERS) * waiting
    behind = (count if plan.sharding.gradients else _last_passes(config, plan)) * backward
    if not plan.sharding.optimizer:
        return [(gradients + 2 * buckets, behind)]
    rate = machine.halves if machine.hides_messages else 1.0
    of_sums = rate if config.precision.reduce_bits is None else 1.0  # in few bits it is an all-to-all
    return [
        (gradients / of_sums + buckets, behind),
        (weights / rate + buckets, _last_passes(config, plan) * backward / 2),
    ]


def _waits_of_block(config: Config, plan: RunPlan, machine: Machine) -> float:
    """Seconds of messages of no bytes in a block's passes over a micro-batch, and until all have come: two gathers and
    a reduction among those who divide its weights, and where there are copies two rounds through these."""
    shards, copies, meeting = _num_shards(config, plan), config.parallel.dp_replicate, machine.meeting or 0.0
    waits = 3 * max(HOP_SECONDS * (shards - 1), meeting)
    return waits + (2 * max(HOP_SECONDS * (copies - 1), meeting) if copies > 1 else 0.0)


def _between_copies(sent: ReplicaBytes, config: Config, plan: RunPlan, machine: Machine) -> float:
    """Seconds of the sums over copies of the model, each of what a rank has of it: rings, of which a node has as many
    adapters as it has ranks of one."""
    group = plan.tp * _num_shards(config, plan)
    rate = machine.link
    if leaves_node(plan, machine, plan.num_replicas):
        rate = min(rate, max(1, machine.ranks_per_node // group) * machine.network)
    return sent.between / (rate * machine.constants.links)


def _last_passes(config: Config, plan: RunPlan) -> float:
    """Backward passes of a micro-batch from where the first gradients are whole to the end of a step, and forward
    passes of the next one until its last weights are needed: one, and where chunks are interleaved, those of as many
    micro-batches as there are stages through all chunks but one. A zero-bubble schedule ends with gradients of all."""
    chunks = len(plan.chunk_blocks) // plan.pp
    own = plan.own_schedule
    is_split = SCHEDULES[config.parallel.schedule].is_split if own is None else own.is_split
    if chunks == 1 or is_split:
        return 1.0
    return (plan.pp * (chunks - 1) + 1) / chunks


def _seconds_of(sent: ReplicaBytes, config: Config, plan: RunPlan, machine: Machine) -> tuple[float, float]:
    """Of gradients, and of weights."""
    parallel, ring = config.parallel, rate_over(plan, machine, "dp")

    def within(num_replicas: int) -> float:
        """Rate of a ring of neighbours; of all replicas also where a node's ranks are no whole number of rings."""
        is_whole = num_replicas == plan.num_replicas
        is_far = is_whole or leaves_node(plan, machine, num_replicas)
        return ring if is_far else machine.link * machine.constants.links

    def to_each(num_replicas: int) -> float:
        """Rate of messages to each rank of a group, for which a rank has its own adapter alone, and not all of its
        node's as a ring has."""
        leaves = leaves_node(plan, machine, num_replicas)
        return (min(machine.link, machine.network) if leaves else machine.link) * machine.constants.links

    reducing = within(_num_shards(config, plan))
    if config.precision.reduce_bits is not None:
        reducing = to_each(plan.num_replicas)
    return (
        sent.reduced / reducing + sent.reduced_near / to_each(parallel.reduce_within or 1),
        sent.gathered / within(_num_shards(config, plan)) + sent.near / within(parallel.hpz_size or 1),
    )


def _copied_bytes(
    config: Config, plan: RunPlan, machine: Machine, practice: Practice, trained: int, gathered: int
) -> float:
    """Read and written of divided weights in a step: out of what was gathered, as often as it was, and gradients into
    what is reduced, in the format of the wire. On CPUs, where it is not beside other work, also a rank's own into what
    is sent, and what is added up of the gradients that have come."""
    if not plan.sharding.weights:
        return 0.0
    if practice.copied_bytes is not None:
        return plan.grad_accum_steps * practice.copied_bytes * trained
    a, wire, pieces = ELEMENT_BYTES[config.precision.dtype], gradient_bytes(config, plan), _num_shards(config, plan)
    own, added_up = (0.0, 0.0) if machine.hides_messages else ((FP32_BYTES + a) / pieces, wire + wire / pieces)
    times = 2 * gathered - gathered_once(config, plan)
    return plan.grad_accum_steps * ((a + a + own) * times + (a + wire + added_up) * trained)


HOP_SECONDS = 5e-6
"""Of a message's way to the next rank, however short it is: what makes rings of thousands of ranks slow. NCCL's own
model of itself (`src/graph/tuning.cc`) has 3.4 us of a ring's hop over NVLink and 14 over a network: 4.7 in the mean of
a ring through nodes of eight. Taken as 0 or as twice that it moves half of the published runs by less than 0.1 %, and
one by 4.3 (MPT 13B on 64, small micro-batches of divided weights)."""
BUCKET_NUMBERS = 40e6
"""Gradients that are sent together: those of the native engine's buckets (`engine.native.buckets`, which a test
compares), and taken to be those of others. Half or twice as many move one published run by 2.4 %, hardly any other."""
VISIBLE = 0.1
"""Of messages behind a pass, the share that shows all the same: the last bucket, the first weights, and what they take
of the device. Assumed: 0 and 0.2 move published runs by 1.3 % in the median and 8 at most. Runs of FSDP are met as well
with 0.2, which puts layouts of whole weights ahead of what experts chose (docs/log.md)."""
COPY_RATE = 0.85
"""Of plain copies, over the memory's bandwidth. Assumed, of data sheets' bandwidth; 0.7 and 1.0 move published runs by
0.2 % in the median and 2.1 at most. What `calibrate` writes is the rate of a copy, of which this then takes once
more."""
