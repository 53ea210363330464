"""Whether this machine can multiply in FP8 as a config asks, and the reason where it cannot."""

from __future__ import annotations

import torch

from megalite.config.schema import Fp8Config

SMALLEST_CAPABILITY = (8, 9)
"""CUDA's compute capability of Ada, the first with FP8 tensor cores; Hopper is 9.0."""
ROWWISE_CAPABILITY = (9, 0)


def why_unavailable(config: Fp8Config, device_type: str) -> str:
    """Why a backend cannot run on a device of this machine; empty when it can."""
    if config.backend == "emulate":
        return ""
    if config.backend == "te":
        from megalite.layers import te

        return te.why_unavailable(config.recipe)
    if device_type == "cuda":
        found, needed = torch.cuda.get_device_capability(), SMALLEST_CAPABILITY
        if config.recipe == "rowwise":
            needed = ROWWISE_CAPABILITY
        if found < needed:
            return (
                f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}, and FP8 products with "
                f"recipe={config.recipe} need {needed[0]}.{needed[1]}"
            )
    return ""
