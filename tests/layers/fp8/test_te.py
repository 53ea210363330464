"""The plumbing around Transformer Engine, with a package in its place that multiplies plainly and notes how it is used.

What the real package computes waits for a GPU (docs/gpu-queue.md); how it is called does not.
"""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from megalite.config.fill import fill_model
from megalite.config.schema import BatchConfig, Fp8Config, ModelConfig
from megalite.layers.fp8.backends import choose_backend
from megalite.layers.fp8.precision import Fp8
from megalite.layers.parts import Parts
from megalite.model.initialize import FreshWeights, fill
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage
from megalite.parallel.axes import SINGLE
from tests.model.stages import SEQ_LEN, VOCAB, make_batch, run_stage

NUM_LAYERS, LINEARS = 2, 4


class UnseenProduct(torch.autograd.Function):
    """A product that is no op of torch's, as the package's are: no checkpoint can see it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with _disable_current_modes():
            return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Package:
    """Stands in for `transformer_engine.pytorch`; notes every call of a linear layer."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, object]] = []
        self.depth = 0
        package = self

        class Linear(nn.Module):
            def __init__(self, in_features, out_features, *, bias, params_dtype, device):
                super().__init__()
                assert (bias, device, params_dtype) == (False, "meta", torch.bfloat16)
                self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device))

            def forward(self, x, is_first_microbatch=None):
                package.calls.append((package.depth > 0, is_first_microbatch))
                return UnseenProduct.apply(x, self.weight)

        self.module = types.ModuleType("transformer_engine.pytorch")
        self.module.Linear, self.module.autocast = Linear, self.autocast

    @contextmanager
    def autocast(self, *, enabled, recipe):
        assert enabled
        assert recipe == "hybrid"
        self.depth += 1
        try:
            yield
        finally:  # recomputation ends by an exception as soon as it has what it needs
            self.depth -= 1


@pytest.fixture
def package(monkeypatch) -> Package:
    found = Package()
    recipes = types.ModuleType("transformer_engine.common.recipe")
    recipes.Format = types.SimpleNamespace(HYBRID="hybrid", E4M3="e4m3")
    recipes.Float8CurrentScaling = lambda fp8_format: fp8_format
    common = types.ModuleType("transformer_engine.common")
    common.recipe = recipes
    whole = types.ModuleType("transformer_engine")
    whole.pytorch, whole.common = found.module, common
    for module in (whole, found.module, common, recipes):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def make(fp8: bool, recompute: str = "none") -> Stage:
    """A tiny model, with its linear layers through the package or plain."""
    sizes = {"hidden_size": 32, "num_layers": NUM_LAYERS, "num_heads": 4, "ffn_hidden_size": 48, "vocab_size": VOCAB}
    model = fill_model(ModelConfig(**sizes), BatchConfig(seq_len=SEQ_LEN))
    parts = Parts()
    if fp8:
        config = Fp8Config(backend="te")
        backend = choose_backend(config, tp=SINGLE, replicas=SINGLE, device=torch.device("cpu"), keep_weights=True)
        parts = Parts(precision=Fp8(config, NUM_LAYERS, backend))
    stage = Stage(StageSpec(model, recompute=recompute, parts=parts))
    fill(stage, FreshWeights(model, 1))
    return stage


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_product_is_inside_autocast(package, recompute):
    """Forward passes, and those that run again in the backward pass, enter the package's autocast, so that nothing
    falls back to bf16 unseen; selective recomputation multiplies once; the weight is rounded at its first use in a step
    and kept for the second micro-batch."""
    stage = make(True, recompute)
    for step in range(2):
        package.calls.clear()
        for micro in range(2):
            run_stage(stage, make_batch(2 * step + micro)).backward()
        assert all(inside for inside, _ in package.calls)
        passes = 2 if recompute == "full" else 1
        assert len(package.calls) == 2 * passes * NUM_LAYERS * LINEARS
        assert [first for _, first in package.calls].count(True) == NUM_LAYERS * LINEARS
        stage.precision.end_step()
    assert package.depth == 0


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_names_weights_and_gradients_are_ours(package, recompute):
    """The model has the parameters it has without FP8, under the same names, and they get the same gradients."""
    ours, plain = make(True, recompute), make(False)
    for stage in (ours, plain):
        run_stage(stage, make_batch()).backward()
    found, expected = dict(ours.named_parameters()), dict(plain.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.grad, expected[name].grad)


def test_evaluation_keeps_no_weights(package):
    """Without gradients the package is not told to keep rounded weights."""
    stage = make(True)
    with torch.no_grad():
        run_stage(stage, make_batch())
    assert {first for _, first in package.calls} == {None}
