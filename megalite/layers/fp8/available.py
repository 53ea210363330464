"""Whether this machine can multiply in FP8 as a config asks, and the reason where it cannot."""

from __future__ import annotations

import torch

from megalite.config.schema import Fp8Config

SMALLEST_CAPABILITY = (8, 9)
"""CUDA's compute capability of Ada, the first with FP8 tensor cores; Hopper is 9.0."""
ROWWISE_CAPABILITY = (9, 0)


def why_unavailable(config: Fp8Config, device: torch.device) -> str:
    """Why a backend cannot run on a device of this machine, which is asked for its kind alone; empty when it can."""
    if config.backend == "emulate":
        return ""
    if config.backend == "te":
        from megalite.layers import te

        return te.why_unavailable(config.recipe)
    if device.type == "cuda":
        found, needed = torch.cuda.get_device_capability(device), SMALLEST_CAPABILITY
        if config.recipe == "rowwise":
            needed = ROWWISE_CAPABILITY
        if found < needed:
            name = torch.cuda.get_device_name(device)
            return (
                f"{name} has compute capability {found[0]}.{found[1]}, and FP8 products with recipe={config.recipe} "
                f"need {needed[0]}.{needed[1]}"
            )
    return ""
