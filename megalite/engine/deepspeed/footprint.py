"""Bytes that DeepSpeed keeps (0.19; ZeRO, Rajbhandari et al. 2020, section 3)."""

from __future__ import annotations

from math import prod

from megalite.architecture.costs import ELEMENT_BYTES, FP32_BYTES
from megalite.architecture.weights import by_parameter, weight_table
from megalite.config.optimizers import averages
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.engine.deepspeed.config import deepspeed_config
from megalite.engine.kept import NOTHING, EngineNumbers, Footprint, InBlocks, outer_parameters

MASTER_BYTES = {"fp32": (0, 4, 4, 4), "bf16": (0, 4, 2, 0)}
"""Of a parameter, by ZeRO stage: the weight that is updated, beside the one that computes. Without ZeRO, and in bf16 at
stage 3, they are the same."""

GRADIENT_BYTES = {"fp32": (4, 4, 4, 4), "bf16": (2, 4 + 2, 4, 4), "fp16": (2, 2, 2, 2)}
"""Of a parameter's gradient, by ZeRO stage; stages 2 and 3 divide it by dp. bf16 accumulates in fp32, at stage 1
beside the bf16 gradient of the micro-batch."""

ALLREDUCE_ELEMENTS = 5 * 10**8
"""DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE: gradient elements copied into one message where ZeRO has no bucket."""


def footprint(config: Config, plan: RunPlan, numbers: EngineNumbers) -> Footprint:
    """By ZeRO stage."""
    num_parameters, state_bytes = numbers.parameters, numbers.state_bytes
    dtype, zero, sharding = config.precision.dtype, config.parallel.zero_stage, plan.sharding
    element, masters = ELEMENT_BYTES[dtype], MASTER_BYTES[config.precision.master_dtype][zero]
    sends_themselves = zero == 0 or (zero == 1 and dtype == "bf16")
    if sends_themselves:  # the gradients are sent when all are there, copied message by message
        sent = at_the_end = min(num_parameters, ALLREDUCE_ELEMENTS) * FP32_BYTES if plan.num_replicas > 1 else 0
    else:
        bucket = deepspeed_config(config, plan)["zero_optimization"]["reduce_bucket_size"]
        sent, at_the_end = element * bucket, 0
        if not sharding.weights and plan.num_replicas > 1:
            at_the_end = element * min(num_parameters, bucket)  # its tensors, once more in a row
    gradients = num_parameters * GRADIENT_BYTES[dtype][zero] // (plan.num_replicas if sharding.gradients else 1)
    is_late = zero == 2 and plan.grad_accum_steps == 1
    copied = gradients if zero == 3 else 0  # for the optimizer, in a row
    if any(averages(name) for name in config.optimizer.names):  # the other engines have memory of gradients for that
        copied += num_parameters * (masters or element) // (plan.num_replicas if sharding.optimizer else 1)
    return Footprint(
        weights=num_parameters * element // (plan.num_replicas if sharding.weights else 1),
        gradients=gradients,
        optimizer=(state_bytes + num_parameters * masters) // (plan.num_replicas if sharding.optimizer else 1),
        buffers=0 if sends_themselves else sent,
        in_blocks=_in_blocks(config, plan, num_parameters) if sharding.weights and plan.num_replicas > 1 else NOTHING,
        after_backward=max(at_the_end - (gradients if is_late else 0), copied),
        late_gradients=gradients if is_late else 0,
    )


def _in_blocks(config: Config, plan: RunPlan, num_parameters: int) -> InBlocks:
    """Weights that stage 3 has gathered, and gradients that a bucket does not hold: one as it is made, and what is sent
    meanwhile, in a row, or one that is itself more than a bucket.

    Needed at once is a weight, or a block that is made again: what its products keep of weights is there until each has
    been used. What comes in a message is there beside what it is copied to, until the last of it is used.
    """
    element, zero = ELEMENT_BYTES[config.precision.dtype], deepspeed_config(config, plan)["zero_optimization"]
    in_blocks, largest = num_parameters - outer_parameters(plan), _largest_weight(plan)
    left = min(num_parameters, zero["stage3_max_live_parameters"]) + min(in_blocks, zero["stage3_prefetch_bucket_size"])
    is_redone = config.train.recompute != "none"
    needed = in_blocks // (plan.model.num_layers + plan.model.num_predictions) if is_redone else largest
    gathered = element * max(left, needed)
    bucket = zero["reduce_bucket_size"]
    beside = element * (largest + max(largest, bucket)) if num_parameters > bucket else 0
    return InBlocks(
        at_head=gathered,
        first=gathered,
        behind_first=gathered,
        second=gathered,
        behind_second=gathered,
        product=beside,
    )


def _largest_weight(plan: RunPlan) -> int:
    """Its numbers on a rank."""
    of_each_kind = {kind: index for index, kind in enumerate(plan.model.kinds())}
    table = weight_table(plan.model, set(of_each_kind.values()))
    return max(sum(prod(row.local_shape(plan.tp)) for row in rows) for rows in by_parameter(table).values())
