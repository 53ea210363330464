"""Whose flash attention works behind torch's: torch has a version of its own, and takes a newer one that is installed.

It is for the whole process, since torch's registry is. Whatever asks torch for flash attention then gets it: packed
documents of any length (`layers.attention`), windows, and context parallelism's stretches.

The registry calls private functions of the package, which change from version to version, so a version that is taken is
tried first: torch 2.11 to 2.13 with flash-attn-4 4.0.0b36 end in "too many values to unpack" (seen on a H200).
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
    package = PACKAGES[kind]
    try:
        wanted = _attend_two_documents(device)
        activate_flash_attention_impl(kind.upper())
        made = _attend_two_documents(device)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UnavailableError(
            f"{setting}: {package} cannot be used here ({why}); install another version, or {instead}"
        ) from error
    error_of = [((one - other).norm() / other.norm()).item() for one, other in zip(made, wanted, strict=True)]
    if not all(each < TRIAL_TOLERANCE for each in error_of):
        raise UnavailableError(
            f"{setting}: {package} does not compute here what torch does: relative errors of the result and its "
            f"gradients are {error_of}, and rounding to bf16 allows {TRIAL_TOLERANCE}; install another version, or "
            f"{instead}"
        )


TRIAL_LENGTHS, TRIAL_HEADS, TRIAL_WIDTH = (57, 71), 2, 64
TRIAL_TOLERANCE = 2e-2
"""Relative: some roundings to bf16, each of up to 2**-9."""


def _attend_two_documents(device: torch.device) -> list[torch.Tensor]:
    """What attention makes of packed documents, and its three gradients, in fp32."""
    from torch.nn.attention.varlen import varlen_attn

    generator, shape = torch.Generator().manual_seed(0), (sum(TRIAL_LENGTHS), TRIAL_HEADS, TRIAL_WIDTH)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(4))
    borders = torch.tensor([0, TRIAL_LENGTHS[0], sum(TRIAL_LENGTHS)], dtype=torch.int32, device=device)
    operands, longest = [x.requires_grad_() for x in (q, k, v)], max(TRIAL_LENGTHS)
    out = varlen_attn(q, k, v, borders, borders, longest, longest, window_size=(-1, 0))
    assert isinstance(out, torch.Tensor), "a pair is returned only to those who ask for it"
    return [out.detach().float(), *(each.float() for each in torch.autograd.grad(out, operands, grad))]
