"""Whose flash attention torch takes: what stands in the way is said, with what to do."""

from __future__ import annotations

import pytest
import torch

from megalite.errors import UnavailableError
from megalite.layers import flash
from megalite.layers.flash import use_flash_attention


def test_torchs_own_asks_for_nothing():
    use_flash_attention("torch", torch.device("cpu"))


@pytest.mark.parametrize("kind", ["fa3", "fa4"])
def test_a_cpu_has_none(kind):
    with pytest.raises(UnavailableError, match=rf"train.flash_attention={kind}: it is for GPUs.*use .*=torch"):
        use_flash_attention(kind, torch.device("cpu"))


def test_a_gpu_without_kernels_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(UnavailableError, match=r"A100 has compute capability 8.0, and it has kernels for 9.0 and 10.0"):
        use_flash_attention("fa4", torch.device("cuda", 0))


@pytest.fixture
def hopper(monkeypatch):
    """A GPU that has kernels, as far as anybody asks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_a_torch_without_the_registry_is_named(hopper, monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    with pytest.raises(UnavailableError, match=r"needs torch 2.11 or newer, found"):
        use_flash_attention("fa3", torch.device("cuda", 0))


def results(scale: float = 1.0) -> list[torch.Tensor]:
    return [torch.ones(4), *(torch.full((4,), scale) for _ in range(3))]


def test_a_missing_package_is_named(hopper, monkeypatch):
    monkeypatch.setattr(flash, "_attend_two_documents", lambda device: results())
    with pytest.raises(
        UnavailableError, match=r"flash-attn-4 cannot be used here .ModuleNotFoundError.*install another"
    ):
        use_flash_attention("fa4", torch.device("cuda", 0))


def test_a_version_is_tried_and_compared(hopper, monkeypatch):
    """What cannot be called, and what computes something else, is refused before training starts."""
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: None)
    device = torch.device("cuda", 0)

    def try_with(*outcomes):
        answers = iter(outcomes)
        monkeypatch.setattr(flash, "_attend_two_documents", lambda device: next(answers)())
        use_flash_attention("fa4", device)

    def unpack():
        raise ValueError("too many values to unpack (expected 2)")

    try_with(results, lambda: results(1.001))
    with pytest.raises(UnavailableError, match=r"cannot be used here .ValueError: too many values to unpack"):
        try_with(results, unpack)
    with pytest.raises(UnavailableError, match=r"does not compute here what torch does: .* are .0.0, 0.5"):
        try_with(results, lambda: results(0.5))
    with pytest.raises(UnavailableError, match=r"are .0.0, nan"):
        try_with(results, lambda: results(float("nan")))
