"""Whose flash attention works behind torch's: torch has a version of its own, and takes a newer one that is installed.

It is for the whole process, since torch's registry is. Whatever asks torch for flash attention then gets it: packed
documents of any length (`layers.attention`), windows, and context parallelism's stretches.
"""

from __future__ import annotations

import torch

from megalite.errors import UnavailableError

PACKAGES = {"fa3": "flash-attn-3", "fa4": "flash-attn-4"}
"""What `train.flash_attention` names, and the package that brings it."""

CAPABILITIES = (9, 10)
"""Major compute capabilities that both have kernels for: Hopper, and Blackwell for data centres."""


def use_flash_attention(kind: str, device: torch.device) -> None:
    """Have torch take a version from now on.

    Args:
        kind: `train.flash_attention`.
        device: of this rank.

    Raises:
        UnavailableError: it is not installed, this torch cannot take it, or it has no kernels for the device.
    """
    if kind == "torch":
        return
    setting, instead = f"train.flash_attention={kind}", "use train.flash_attention=torch"
    if device.type != "cuda":
        raise UnavailableError(f"{setting}: it is for GPUs, and this run is on the CPU; {instead}")
    found = torch.cuda.get_device_capability(device)
    if found[0] not in CAPABILITIES:
        name = torch.cuda.get_device_name(device)
        raise UnavailableError(
            f"{setting}: {name} has compute capability {found[0]}.{found[1]}, and it has kernels for 9.0 and 10.0; "
            f"{instead}"
        )
    try:
        from torch.nn.attention import activate_flash_attention_impl  # torch >= 2.11
    except ImportError:
        raise UnavailableError(f"{setting}: needs torch 2.11 or newer, found {torch.__version__}; {instead}") from None
    try:
        activate_flash_attention_impl(kind.upper())
    except Exception as error:
        raise UnavailableError(
            f"{setting}: {PACKAGES[kind]} cannot be used here ({type(error).__name__}: {error}); install it, or "
            f"{instead}"
        ) from error
