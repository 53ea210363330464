"""Seconds between the passes of a step: what replicas send each other, and the update of the weights.

Where weights are divided over the replicas, they are gathered for each pass of each micro-batch and their gradients
reduced behind it: messages that the passes hide, and copies beside them, in and out of what is sent, that they do not.
"""

from __future__ import annotations

from math import ceil

from megalite.architecture.costs import ELEMENT_BYTES, FP32_BYTES
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.planner.holdings import numbers_by_stage, parameters_by_stage
from megalite.planner.links import leaves_node, rate_over
from megalite.planner.machines import Machine
from megalite.planner.practice import Practice
from megalite.planner.replica_traffic import gradient_bytes, weight_bytes


def between_steps(
    config: Config, plan: RunPlan, machine: Machine, practice: Practice, *, backward: float
) -> dict[str, float]:
    """What the replicas send, where the passes do not hide it, and the update, by their names.

    Args:
        backward: seconds of the last micro-batch's backward pass, behind which gradients may travel.
    """
    found, of_stages = dict[str, float](), numbers_by_stage(config, plan)
    numbers, updated = max(each.trained for each in of_stages), max(each.masters for each in of_stages)
    memory_rate = machine.memory_bandwidth * machine.constants.passes
    if plan.num_replicas > 1 and plan.sharding.weights:
        found["dp"] = _with_divided_weights(config, plan, machine, practice, numbers=numbers, backward=backward)
        copied = _copied_bytes(config, plan) if practice.copied_bytes is None else practice.copied_bytes
        found["dp"] += plan.grad_accum_steps * copied * numbers / (machine.memory_bandwidth * COPY_RATE)
    elif plan.num_replicas > 1:
        found["dp"] = _with_whole_weights(config, plan, machine, practice, numbers=numbers, backward=backward)
    a, states = ELEMENT_BYTES[config.precision.dtype], max(each.state_bytes for each in of_stages)
    moved = 2.0 * (states + FP32_BYTES * updated) + (FP32_BYTES + a) * updated
    found["optimizer"] = moved / (plan.num_replicas if plan.sharding.optimizer else 1) / memory_rate
    return found


def _with_divided_weights(
    config: Config, plan: RunPlan, machine: Machine, practice: Practice, *, numbers: int, backward: float
) -> float:
    reduced, gathered = _once(config, plan, machine, practice, numbers)
    gathered += _gathered_again(config, plan, machine, gathered)
    num_messages = 3 * max(len(plan.blocks_of(stage)) for stage in range(plan.pp))
    each = (reduced + gathered) / machine.halves + num_messages * _waiting(plan)
    return _seen(plan.grad_accum_steps * each, 1.5 * backward * plan.grad_accum_steps, machine, practice)


def _with_whole_weights(
    config: Config, plan: RunPlan, machine: Machine, practice: Practice, *, numbers: int, backward: float
) -> float:
    num_messages = 2 * ceil(numbers / BUCKET_NUMBERS)
    reduced, gathered = _once(config, plan, machine, practice, numbers)
    if not plan.sharding.optimizer and config.precision.reduce_bits is None:
        gathered = reduced  # sums, not weights
    times = plan.grad_accum_steps if plan.sharding.gradients else 1  # divided sums grow by a micro-batch at a time
    return _seen(times * reduced + gathered + num_messages * _waiting(plan), times * backward, machine, practice)


def _once(config: Config, plan: RunPlan, machine: Machine, practice: Practice, numbers: int) -> tuple[float, float]:
    """Seconds in which all gradients are reduced, and in which all weights are gathered, once."""
    once = (plan.num_replicas - 1) / plan.num_replicas * numbers / rate_over(plan, machine, "dp")
    gathered = weight_bytes(config) * once
    if config.precision.reduce_bits is not None:
        return _rounded_seconds(config, plan, machine, numbers), gathered
    gradient = gradient_bytes(config, plan) if practice.gradient_bytes is None else practice.gradient_bytes
    return gradient * once, gathered


def _seen(sent: float, behind: float, machine: Machine, practice: Practice) -> float:
    """Of seconds of messages, those that passes of so many seconds do not hide."""
    hides = practice.hides_reductions and machine.hides_messages
    return max(sent - behind, sent * VISIBLE) if hides else sent


def _waiting(plan: RunPlan) -> float:
    """Seconds of a message around the replicas, however short it is."""
    return HOP_SECONDS * (plan.num_replicas - 1)


def _copied_bytes(config: Config, plan: RunPlan) -> float:
    """Read and written of a divided weight in a micro-batch: twice out of what was gathered, and its gradient into what
    is reduced, in the format of the wire."""
    a = ELEMENT_BYTES[config.precision.dtype]
    return 2 * (a + a) + a + gradient_bytes(config, plan)


def _rounded_seconds(config: Config, plan: RunPlan, machine: Machine, numbers: int) -> float:
    """Of rounded gradients: by messages to each rank, for which a rank has its own adapter alone, and not all of its
    node's as a ring has; or within a node, and what is left of them between nodes."""
    links, once = machine.constants.links, gradient_bytes(config, plan) * numbers
    own = min(machine.link, machine.network) if leaves_node(plan, machine, plan.num_replicas) else machine.link
    within, replicas = config.parallel.reduce_within, plan.num_replicas
    if within is None:
        return (replicas - 1) / replicas * once / (own * links)
    near = own if leaves_node(plan, machine, within) else machine.link
    return ((within - 1) / within * once / near + (replicas // within - 1) / replicas * once / own) / links


def _gathered_again(config: Config, plan: RunPlan, machine: Machine, gathered: float) -> float:
    """Seconds of a backward pass's gather of all weights: from all replicas, or from the neighbours that kept them."""
    hpz = config.parallel.hpz_size
    if hpz is None:
        return gathered
    rate = rate_over(plan, machine, "dp")
    if not leaves_node(plan, machine, hpz):
        rate = machine.link * machine.constants.links
    numbers = max(parameters_by_stage(plan))
    return (hpz - 1) / hpz * numbers * ELEMENT_BYTES[config.precision.dtype] / rate


HOP_SECONDS = 5e-6
"""Of a message's way to the next rank, however short it is: what makes rings of thousands of ranks slow."""
BUCKET_NUMBERS = 40e6
"""Gradients that are sent together."""
VISIBLE = 0.1
"""Of messages behind a pass, the share that shows all the same: the last bucket, the first weights, and what they take
of the device."""
COPY_RATE = 0.85
"""Of plain copies, over the memory's bandwidth."""
