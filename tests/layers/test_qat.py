"""Weights rounded to integers: the numbers against torch's own fake quantisation, layers against a plain module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.architecture.settings import WeightScales
from megalite.config.schema import QatConfig
from megalite.layers.gemm import PLAIN
from megalite.layers.grouped import GroupedProduct
from megalite.layers.qat.integers import to_integers
from megalite.layers.qat.learned import LearnedRounding
from megalite.layers.qat.linear import RoundedLinear, RoundedRows, RoundedWeight
from megalite.layers.weight_gradients import SummedLinear
from megalite.parallel.axes import SINGLE
from megalite.parallel.collectives import copy_to, keep

SETTINGS = [
    QatConfig(bits=bits, group_size=group, symmetric=symmetric)
    for bits in (4, 8)
    for group in (32, None)
    for symmetric in (True, False)
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fake_quantised(weight: Tensor, qat: QatConfig) -> Tensor:
    """By torch's op, which has the straight-through gradient too; scales by the formula."""
    rows = weight.unflatten(1, (-1, qat.group_size or weight.shape[1])).flatten(0, 1)
    low, high = rows.detach().amin(1).clamp(max=0), rows.detach().amax(1).clamp(min=0)
    if qat.symmetric:
        limit = 2 ** (qat.bits - 1) - 1
        scale, zero, borders = rows.detach().abs().amax(1) / limit, torch.zeros(len(rows)), (-limit, limit)
    else:
        borders = (0, 2**qat.bits - 1)
        scale = (high - low) / borders[1]
        zero = (-low / scale).round()
    rounded = torch.fake_quantize_per_channel_affine(rows, scale, zero.int(), 0, *borders)
    return rounded.view(weight.shape)


def test_numbers_are_those_of_torch_fake_quantisation():
    """Every width, group and kind of zero point, on weights with an outlier and with a group of zeros."""
    for qat in SETTINGS:
        weight = draw(6, 96) * 0.02
        weight[0, 40] = 1.0
        found = to_integers(weight, qat)
        assert torch.allclose(found.values(), fake_quantised(weight, qat), rtol=0.0, atol=1e-6), qat
        assert found.q.unique().numel() <= 2**qat.bits - qat.symmetric
        weight[2, :] = 0.0
        assert not to_integers(weight, qat).values()[2].any()


def test_bf16_weights_have_bf16_scales():
    """Numbers are integers times a scale that bf16 has, rounded once: what a file of both stands for."""
    weight = (draw(8, 64) * 0.05).bfloat16()
    found = to_integers(weight, QatConfig(bits=4, group_size=32))
    assert found.scale.dtype == found.values().dtype == torch.bfloat16
    exact = found.q.double() * found.scale.double()
    assert torch.equal(found.values(), exact.flatten(-2).bfloat16())
    assert (found.values().float() - weight.float()).abs().max() <= found.scale.float().max() * 0.51


@pytest.mark.parametrize("handed_over", [False, True])
def test_layer_and_gradients_are_those_of_a_plain_module(handed_over: bool):
    """Two layers in a row, against a module whose weights torch fake-quantises: result, gradients of inputs and of
    weights, by autograd and handed over."""
    for qat in SETTINGS:
        weights = [nn.Parameter(draw(64, 96, seed=1)), nn.Parameter(draw(32, 64, seed=2))]
        x, taken, ours = draw(10, 96, seed=3).requires_grad_(), {}, draw(10, 96, seed=3).requires_grad_()
        first, second = (fake_quantised(weight, qat) for weight in weights)
        wanted_y = F.linear(F.silu(F.linear(x, first)), second)
        wanted = torch.autograd.grad(wanted_y.square().sum(), [x, *weights])
        layers = []
        for weight in weights:
            plain = (
                SummedLinear(weight, PLAIN, lambda p, g, taken=taken: taken.update({p: g.make()}))
                if handed_over
                else PLAIN
            )
            layers.append(RoundedLinear(plain, RoundedWeight(qat, SINGLE, keep=True)))
        y = layers[1].linear(F.silu(layers[0].linear(ours, weights[0])), weights[1])
        y.square().sum().backward()
        found = [ours.grad, *(taken[weight] if handed_over else weight.grad for weight in weights)]
        for one, other in zip([y, *found], [wanted_y, *wanted], strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-3), qat
        with torch.no_grad():
            weights[0].mul_(2.0)
            kept = layers[0].linear(x, weights[0])
            for layer in layers:
                layer.weight.forget()
            assert torch.allclose(layers[0].linear(x, weights[0]), 2 * kept, rtol=1e-4, atol=1e-4)


def test_experts_are_rounded_matrix_by_matrix():
    """Products in groups and their gradients are those of each expert's fake-quantised matrix alone."""
    qat, sizes = QatConfig(bits=4, group_size=32), torch.tensor([3, 0, 5])
    weight, x = nn.Parameter(draw(3 * 16, 64)), draw(8, 64, seed=1).requires_grad_()
    product = GroupedProduct(PLAIN)
    product.rows = RoundedRows(product.rows, RoundedWeight(qat, SINGLE, keep=True))
    y = product(x, weight, sizes)
    found = torch.autograd.grad(y.square().sum(), [x, weight])
    rounded = fake_quantised(weight, qat).view(3, 16, 64)
    parts = [F.linear(part, matrix) for part, matrix in zip(x.split(sizes.tolist()), rounded, strict=True)]
    wanted_y = torch.cat(parts)
    wanted = torch.autograd.grad(wanted_y.square().sum(), [x, weight])
    for one, other in zip([y, *found], [wanted_y, *wanted], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def learned_by_autograd(weight: Tensor, scale: Tensor, limit: int) -> Tensor:
    """LSQ's weights as its authors have them: rounding has the derivative 1, and the scale's gradient a factor."""
    factor = (weight[0].numel() / scale[0].numel() * limit) ** -0.5
    size = ((scale - scale * factor).detach() + scale * factor).abs().unsqueeze(-1)
    ratio = (weight.unflatten(1, (scale.shape[1], -1)) / size).clamp(-limit, limit)
    return ((ratio + (ratio.round() - ratio).detach()) * size).flatten(1)


@pytest.mark.parametrize("handed_over", ["nothing", "weight", "both"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (4, None)])
def test_learned_scales_are_those_of_the_formula(bits: int, group: int | None, handed_over: str):
    """Result and gradients of inputs, weights and scales, one of these below zero, by autograd and handed over; some
    numbers lie beyond the largest integer, and some groups are zeros."""
    limit, width = 2 ** (bits - 1) - 1, 96
    weight = nn.Parameter(draw(48, width, seed=1) * 0.1)
    weight.data[3] = 0.0
    means = weight.detach().abs().unflatten(1, (-1, group or width)).mean(2).clamp(min=1e-3)
    scale = means * 2 / limit**0.5 * (1 + 0.3 * draw(*means.shape, seed=2))
    scale[5, 0] *= -0.5
    settings = WeightScales(bits=bits, group_size=group, first_block=0, last_block=0)
    share = keep if handed_over == "both" else copy_to
    layer = LearnedRounding(tuple(scale.shape), group or width, settings, tp=SINGLE, share=share)
    layer.scale.data.copy_(scale)
    taken: dict[nn.Parameter, Tensor] = {}
    summed = SummedLinear(weight, PLAIN, lambda parameter, made: taken.update({parameter: made.make()}))
    rounded = RoundedWeight(QatConfig(bits=bits, group_size=group, learned_scales=True), SINGLE, keep=True)
    layer.attach(PLAIN if handed_over == "nothing" else summed, rounded)
    x, gradient = draw(10, width, seed=3).requires_grad_(), draw(10, 48, seed=4)
    y = layer(x, weight)
    y.backward(gradient)

    wanted_x, wanted_weight, wanted_scale = (
        each.detach().clone().requires_grad_() for each in (x, weight, layer.scale)
    )
    wanted_y = F.linear(wanted_x, learned_by_autograd(wanted_weight, wanted_scale, limit))
    wanted_y.backward(gradient)
    inside = (weight.detach().unflatten(1, (scale.shape[1], -1)) / scale.unsqueeze(2)).abs() <= limit
    assert bits == 8 or 0.5 < inside.float().mean() < 1.0
    ours = {"x": x.grad, "weight": weight.grad, "scale": layer.scale.grad}
    ours |= {"weight": taken[weight]} if handed_over != "nothing" else {}
    ours |= {"scale": taken[layer.scale]} if handed_over == "both" else {}
    assert set(taken) == {"nothing": set(), "weight": {weight}, "both": {weight, layer.scale}}[handed_over]
    wanted = {"x": wanted_x.grad, "weight": wanted_weight.grad, "scale": wanted_scale.grad}
    torch.testing.assert_close(y, wanted_y, rtol=1e-5, atol=1e-5)
    for name, each in wanted.items():
        torch.testing.assert_close(ours[name], each, rtol=1e-4, atol=1e-5, msg=name)
