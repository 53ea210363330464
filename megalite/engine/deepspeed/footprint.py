"""Bytes that DeepSpeed keeps (0.19; ZeRO, Rajbhandari et al. 2020, section 3)."""

from __future__ import annotations

from megalite.architecture.costs import ELEMENT_BYTES, FP32_BYTES
from megalite.config.optimizers import averages
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.engine.deepspeed.config import deepspeed_config
from megalite.engine.kept import EngineNumbers, Footprint, outer_parameters

MASTER_BYTES = {"fp32": (0, 4, 4, 4), "bf16": (0, 4, 2, 0)}
"""Of a parameter, by ZeRO stage: the weight that is updated, beside the one that computes. Without ZeRO, and in bf16 at
stage 3, they are the same."""

GRADIENT_BYTES = {"fp32": (4, 4, 4, 4), "bf16": (2, 4 + 2, 4, 4), "fp16": (2, 2, 2, 2)}
"""Of a parameter's gradient, by ZeRO stage; stages 2 and 3 divide it by dp. bf16 accumulates in fp32, at stage 1
beside the bf16 gradient of the micro-batch."""

ZERO3_LIVE_PARAMETERS = 10**9
"""DeepSpeed's stage3_max_live_parameters: weights that stage 3 keeps gathered at most."""

ZERO3_PREFETCHED = 5 * 10**7
"""DeepSpeed's stage3_prefetch_bucket_size: weights of blocks that come in one message at most, which is there beside
what it is copied to until the last of them is used."""

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
    gathered = 0
    if sharding.weights and plan.num_replicas > 1:
        in_blocks = num_parameters - outer_parameters(plan)
        gathered = element * (min(num_parameters, ZERO3_LIVE_PARAMETERS) + min(in_blocks, ZERO3_PREFETCHED))
    gradients = num_parameters * GRADIENT_BYTES[dtype][zero] // (plan.num_replicas if sharding.gradients else 1)
    is_late = zero == 2 and plan.grad_accum_steps == 1
    copied = 0  # while averages are evaluated; the other engines have memory of gradients for that
    if any(averages(name) for name in config.optimizer.names):
        copied = num_parameters * (masters or element) // (plan.num_replicas if sharding.optimizer else 1)
    return Footprint(
        weights=num_parameters * element // (plan.num_replicas if sharding.weights else 1),
        gradients=gradients,
        optimizer=(state_bytes + num_parameters * masters) // (plan.num_replicas if sharding.optimizer else 1),
        buffers=gathered + (0 if sends_themselves else sent),
        after_backward=max(at_the_end - (gradients if is_late else 0), copied),
        late_gradients=gradients if is_late else 0,
    )
