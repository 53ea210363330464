"""DeepSpeed's JSON, generated from the config and the plan: the only place that knows its keys.

Users never write it. `engine.deepspeed_extra` adds keys that are not ours; ours (`config.schema.DEEPSPEED_OWNED_KEYS`)
are refused there by the schema.
"""

from __future__ import annotations

import math
from typing import Any

from megalite.config.plan import RunPlan
from megalite.config.schema import Config

BUCKET_ELEMENTS = 200_000_000
"""Gradient elements reduced at once under ZeRO: 400 MB in bf16, enough to fill a link, small beside the weights.
DeepSpeed allocates all of it, so a smaller model gets no more than it has parameters."""

GATHERED_ELEMENTS = 10**9
"""Of weights that ZeRO-3 leaves gathered because they are used again before so many others, and of all it has gathered
at most, but for what is needed at once."""

PREFETCHED_ELEMENTS = 50_000_000
"""Of weights of blocks that come in one message at most."""

ONE_SUB_GROUP = 10**15
"""Elements that ZeRO-3 steps at once: all, because the optimizer compares gradients of different weights."""


def deepspeed_config(config: Config, plan: RunPlan) -> dict[str, Any]:
    """Return the dict that `deepspeed.initialize` takes.

    ZeRO-0 leaves clipping to us (`gradient_clipping` 0): DeepSpeed reports no norm there, and under a pipeline its
    clip forgets the other stages' parameters.
    """
    stage = config.parallel.zero_stage
    json: dict[str, Any] = {
        "train_batch_size": config.batch.global_batch_size * plan.cp,  # as it counts: each rank a sequence of its own
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_size,
        "gradient_accumulation_steps": plan.grad_accum_steps,
        "gradient_clipping": (config.optimizer.clip_grad_norm or 0.0) if stage else 0.0,
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},  # it waits for the device twice a micro-batch
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            **(_zero_buckets(plan) if stage else {}),
            **(_divided_weights() if stage == 3 else {}),
        },
    }
    if config.precision.dtype == "bf16":
        json["bf16"] = {"enabled": True}
        if config.precision.master_dtype == "bf16":  # states stay fp32: they are our optimizer's
            json["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        json["data_types"] = {"grad_accum_dtype": "fp32"}
        json["communication_data_type"] = config.precision.reduce_dtype or ("fp32" if stage == 1 else "bf16")
    if config.precision.dtype == "fp16":
        scale = config.precision.loss_scale.search
        json["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": round(math.log2(scale.initial)),
            "loss_scale_window": scale.window,
            "hysteresis": scale.hysteresis,
            "min_loss_scale": scale.minimum,
        }
    if plan.pp > 1:
        json["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False}
    return {**json, **config.engine.deepspeed_extra}


def _zero_buckets(plan: RunPlan) -> dict[str, Any]:
    elements = min(BUCKET_ELEMENTS, plan.num_parameters)
    return {
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
        "overlap_comm": False,  # `start.prepare_deepspeed` builds on it
        "contiguous_gradients": True,
        "memory_efficient_linear": False,
    }


def _divided_weights() -> dict[str, Any]:
    return {
        "sub_group_size": ONE_SUB_GROUP,
        "stage3_max_live_parameters": GATHERED_ELEMENTS,
        "stage3_max_reuse_distance": GATHERED_ELEMENTS,
        "stage3_prefetch_bucket_size": PREFETCHED_ELEMENTS,
    }
