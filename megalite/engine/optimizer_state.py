"""The weights and moments inside a DeepSpeed engine, whole and in fp32, whatever the ZeRO stage.

ZeRO keeps master weights and moments as slices of flat buffers, spread over dp. DeepSpeed's fragment functions gather
one parameter at a time; ZeRO-0 in fp32 has plain torch tensors. This module hides the difference, and makes the moments
exist before the first step, which torch and DeepSpeed do only during it. What lies on this rank alone: `slices`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalite.engine.protocol import MOMENTS


def read_parameter(engine: Any, parameter: nn.Parameter, zero_stage: int) -> dict[str, Tensor]:
    """The fp32 weight and moments of a parameter, shaped like it. Collective over dp from stage 1 on."""
    if zero_stage == 0:
        state = engine.optimizer.state[parameter]
        return {"weight": parameter.detach(), **{key: state[key] for key in MOMENTS}}
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    tensors = {"weight": safe_get_full_fp32_param(parameter)}
    for key in MOMENTS:
        tensors[key] = safe_get_full_optimizer_state(parameter, key)
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return {key: tensor.detach().reshape(shape) for key, tensor in tensors.items()}


def create_moments(engine: Any) -> None:
    """Make zero moments for every weight before the first step.

    Torch makes them lazily, and DeepSpeed then links its fragments to them once, after the step of the first parameter
    group, when those of the second do not exist yet: they could never be read. Made here, all are linked.
    """
    inner = _torch_optimizer(engine)
    for weight in _flat_weights(engine):
        inner.state[weight] = {key: torch.zeros_like(weight, memory_format=torch.preserve_format) for key in MOMENTS}
    set_num_updates(engine, 0)
    link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:
        link()


def set_num_updates(engine: Any, num_updates: int) -> None:
    """Set the optimizer's step counter, which the moments' bias correction depends on."""
    inner = _torch_optimizer(engine)
    for weight in _flat_weights(engine):
        device = weight.device if inner.defaults["fused"] else torch.device("cpu")
        inner.state[weight]["step"] = torch.tensor(float(num_updates), device=device)


def _torch_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The torch optimizer under DeepSpeed's wrappers."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _flat_weights(engine: Any) -> list[Tensor]:
    """The fp32 tensors that the inner optimizer really steps on this rank."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(engine.optimizer, name):
            return list(getattr(engine.optimizer, name))
    return [weight for group in engine.optimizer.param_groups for weight in group["params"]]
