"""What a look at a layer finds, against counting by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megalite.config.schema import Fp8Config
from megalite.layers.fp8.backends import choose_backend
from megalite.layers.fp8.precision import Fp8
from megalite.layers.linear import ColumnParallelLinear
from megalite.parallel.axes import SINGLE
from tests.layers.fp8.kit import draw

CPU = torch.device("cpu")


def precision_of_one_layer(**settings) -> tuple[Fp8, ColumnParallelLinear]:
    """A block of one linear layer in emulated FP8."""
    config = Fp8Config(backend="emulate", **settings)
    layer = ColumnParallelLinear(32, 16, tp=SINGLE)
    with torch.no_grad():
        layer.weight.copy_(draw(16, 32, seed=0))
    backend = choose_backend(config, tp=SINGLE, replicas=SINGLE, device=CPU, keep_weights=True)
    precision = Fp8(config, 1, backend)
    precision.attach(nn.ModuleDict({"0": nn.ModuleDict({"up": layer})}))
    return precision, layer


def look_at(precision: Fp8, layer: ColumnParallelLinear, x: torch.Tensor, grad: torch.Tensor):
    precision.begin_measuring(CPU)
    layer(x).backward(grad)
    errors = precision.end_measuring(SINGLE, SINGLE)
    precision.end_step()
    return errors["blocks.0.up"]


def test_a_look_counts_what_is_lost():
    """Maxima, shares of zeros that were none, and relative errors, of every operand and of the product."""
    precision, layer = precision_of_one_layer(recipe="current")
    x, grad = draw(8, 32, seed=1), draw(8, 16, seed=2) * 1e-5
    x[0, :8] = 1e-6  # less than half the smallest step below the maximum
    grad[3] = 0.0  # zeros are not lost
    look = look_at(precision, layer, x, grad)
    activation, gradient = look.operands["activation"], look.operands["gradient"]
    assert activation.amax == pytest.approx(x.abs().max().item())
    assert gradient.amax == pytest.approx(grad.abs().max().item())
    rounded = precision.sites["blocks.0.up"].fp8.quantise("activation", x).dequantise()
    lost = ((rounded == 0) & (x != 0)).sum().item()
    assert lost >= 7
    assert activation.underflow == pytest.approx(lost / x.numel())
    assert activation.saturation == 0
    assert activation.error == pytest.approx(((rounded - x).norm() / x.norm()).item(), rel=1e-4)
    with torch.no_grad():
        exact = x @ layer.weight.T
        found = layer(x)
    assert look.error == pytest.approx(((found - exact).norm() / exact.norm()).item(), rel=1e-4)
    assert look.worst == max(look.error, gradient.error)


def test_a_look_changes_nothing():
    """Results and gradients during a look are those without it, and histories record the same."""
    x, grad = draw(8, 32, seed=1), draw(8, 16, seed=2)
    results = []
    for measured in (False, True):
        precision, layer = precision_of_one_layer(recipe="delayed", amax_history_len=4)
        if measured:
            precision.begin_measuring(CPU)
        y = layer(x)
        y.backward(grad)
        if measured:
            precision.end_measuring(SINGLE, SINGLE)
        precision.end_step()
        results.append((y.detach(), layer.weight.grad, precision.state()["fp8_amax/blocks.0.up"]))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_saturation_shows_in_the_look():
    """Activations four times those of the history are clamped, and the look says how many."""
    precision, layer = precision_of_one_layer(recipe="delayed", amax_history_len=4)
    x, grad = draw(8, 32, seed=1), draw(8, 16, seed=2)
    look_at(precision, layer, x, grad)
    look = look_at(precision, layer, 4 * x, grad)
    beyond = (4 * x.abs() > x.abs().max() * (1 + 1e-5)).float().mean().item()
    assert look.operands["activation"].saturation == pytest.approx(beyond)
    assert look.operands["gradient"].saturation == 0


def test_two_measurements_in_a_row_and_a_layer_goes_back():
    """One measurement beyond the allowed error is not enough, nor are two with a good one between; after two in a row
    the layer multiplies unrounded, also after the state was saved and read."""
    precision, layer = precision_of_one_layer(recipe="current", fallback_error=0.5)
    x, grad = draw(8, 32, seed=1), draw(8, 16, seed=2)
    look = look_at(precision, layer, x, grad)
    good, bad = {"blocks.0.up": look}, {"blocks.0.up": type(look)(0.6, look.operands)}
    for step, errors in enumerate((bad, good, bad)):
        assert precision.retire_worst(errors, step) == []
    other, other_layer = precision_of_one_layer(recipe="current", fallback_error=0.5)
    state = precision.state()
    other.load(state.get)
    for each, where in ((precision, layer), (other, other_layer)):
        assert each.retire_worst(bad, 3) == ["blocks.0.up"]
        assert torch.equal(where(x), x @ where.weight.T)
        assert each.state()["fp8_retired/blocks.0.up"].tolist() == [3.0]
    again, again_layer = precision_of_one_layer(recipe="current")
    again.load(precision.state().get)
    assert torch.equal(again_layer(x), x @ again_layer.weight.T)


def test_unrounded_for_a_while():
    """Inside `unrounded` the layer is plain; afterwards it is in FP8 again."""
    precision, layer = precision_of_one_layer(recipe="block")
    x = draw(8, 32, seed=1)
    with torch.no_grad():
        rounded = layer(x)
        with precision.unrounded():
            assert torch.equal(layer(x), x @ layer.weight.T)
        assert torch.equal(layer(x), rounded)
    assert not torch.equal(rounded, x @ layer.weight.T)
