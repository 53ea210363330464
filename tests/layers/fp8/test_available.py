"""Whether FP8 can run is asked before a run starts, and every no has a reason."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from megalite.config.schema import Fp8Config
from megalite.layers import te
from megalite.layers.fp8.available import why_unavailable

TE = Fp8Config(backend="te", recipe="block")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _ask_again():
    te.why_unavailable.cache_clear()
    yield
    te.why_unavailable.cache_clear()


def test_emulation_runs_anywhere():
    """Emulation, and torch's own products on a CPU."""
    assert why_unavailable(Fp8Config(backend="emulate", recipe="mxfp8"), CPU) == ""
    assert why_unavailable(Fp8Config(backend="scaled_mm", recipe="rowwise"), CPU) == ""


def test_te_without_a_device(monkeypatch):
    """Without a CUDA device the package is not even imported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_unavailable(TE, CPU) == "there is no CUDA device"


def test_te_that_cannot_be_imported(monkeypatch):
    """With a device but without a package that works, its own error is the reason."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert "ModuleNotFoundError" in why_unavailable(TE, GPU)


@pytest.mark.parametrize(
    ("answer", "reason"), [((True, ""), ""), ((False, "CUDA 12.9 is needed"), "CUDA 12.9 is needed")]
)
def test_te_has_the_last_word(monkeypatch, answer, reason):
    """The package itself says whether device and driver can do the recipe."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    package = types.ModuleType("transformer_engine")
    package.pytorch = types.ModuleType("transformer_engine.pytorch")
    package.pytorch.is_fp8_block_scaling_available = lambda return_reason: answer
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package.pytorch)
    assert why_unavailable(TE, GPU) == reason


@pytest.mark.parametrize(
    ("capability", "recipe", "works"),
    [((8, 0), "current", False), ((8, 9), "current", True), ((8, 9), "rowwise", False)],
)
def test_tensor_cores(monkeypatch, capability, recipe, works):
    """torch's own products need FP8 tensor cores, rowwise ones those of Hopper."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    reason = why_unavailable(Fp8Config(backend="scaled_mm", recipe=recipe), GPU)
    assert (reason == "") is works
    assert works or f"{capability[0]}.{capability[1]}" in reason
