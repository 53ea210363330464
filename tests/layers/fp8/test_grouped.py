"""Products of experts in FP8: each is what a linear layer of that expert alone makes of its rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megalite.config.checks_moe import ROW_RECIPES
from megalite.config.schema import Fp8Config
from megalite.layers.experts import SparseMLP
from megalite.layers.fp8.backends import choose_backend
from megalite.layers.fp8.grouped import Fp8Rows
from megalite.layers.fp8.linear import CurrentScales, WeightSharding
from megalite.layers.fp8.precision import Fp8
from megalite.layers.fp8.products import scaled_mm
from megalite.layers.fp8.recipes import make_recipe
from megalite.layers.fp8.site import GroupedSite
from megalite.layers.fp8.watch import Gauge, read_gauges
from megalite.layers.gemm import PLAIN
from megalite.layers.grouped import GroupedProduct
from megalite.parallel.axes import SINGLE, Axis
from tests.layers.fp8.kit import EMULATED, difference, draw, fp8_layer, run
from tests.layers.parity import NUM_TOKENS, Case, assert_equal_to_one_process, columns, complaints, fused_rows, whole
from tests.layers.small import small_model

OUT, IN = 144, 160
"""More than one block of 128 numbers, and no whole number of them."""

SIZES = ([3, 0, 21, 8], [0, 0, 32, 0], [0, 0, 0, 0])


def made(recipe: str, product=EMULATED, *, may_spare: bool = False) -> tuple[GroupedProduct, GroupedSite]:
    weight = torch.nn.Parameter(draw(4 * OUT, IN, seed=0))
    settings = make_recipe(Fp8Config(backend="emulate", recipe=recipe))
    rows = Fp8Rows(settings, CurrentScales(settings, WeightSharding(SINGLE, 0)), product)
    grouped = GroupedProduct(weight, PLAIN, may_spare=may_spare)
    return grouped, GroupedSite("blocks.0.mlp.experts.up", grouped, rows)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("recipe", ROW_RECIPES)
def test_each_expert_is_a_linear_layer(recipe: str, sizes: list[int]):
    """y and dx, of experts without rows too, and with rows behind of no expert; dw is that of unrounded numbers."""
    grouped, _ = made(recipe, may_spare=True)
    num_rows = sum(sizes) + 2
    x, grad = draw(num_rows, IN, seed=1).requires_grad_(), draw(num_rows, OUT, seed=2)
    y = grouped(x, grouped.weight, torch.tensor(sizes))
    y.backward(grad)
    parts = zip(x.detach().split([*sizes, 2]), grad.split([*sizes, 2]), grouped.weight.detach().chunk(4), strict=False)
    wanted = [run(fp8_layer(recipe), *part[::2], part[1]) if len(part[0]) else None for part in parts]
    behind = {"y": torch.zeros(2, OUT), "dx": torch.zeros(2, IN)}
    for name, found in {"y": y.detach(), "dx": x.grad}.items():
        torch.testing.assert_close(found, torch.cat([*(each[name] for each in wanted if each), behind[name]]))
    exact = [g.t() @ a for a, g in zip(x.detach().split([*sizes, 2])[:4], grad.split([*sizes, 2])[:4], strict=True)]
    torch.testing.assert_close(grouped.weight.grad, torch.cat(exact))


def test_torchs_product_is_the_same():
    """`scaled_mm`, group by group, against the emulation."""
    x, sizes = draw(32, IN, seed=1), torch.tensor([3, 0, 21, 8])
    results = [made("rowwise", product)[0](x, made("rowwise")[0].weight, sizes) for product in (EMULATED, scaled_mm)]
    assert difference(results[1], results[0]) < 1e-5


def test_a_look_at_experts():
    """A measurement takes in rows, all matrices, the product and the gradient; without FP8 nothing is rounded."""
    grouped, site = made("rowwise")
    x, grad, sizes = draw(32, IN, seed=1).requires_grad_(), draw(32, OUT, seed=2), torch.tensor([3, 0, 21, 8])
    gauge = Gauge(torch.device("cpu"))
    site.use_gauge(gauge)
    y = grouped(x, grouped.weight, sizes)
    y.backward(grad)
    found = read_gauges({"up": gauge}, SINGLE, SINGLE)["up"]
    site.use_plain()
    exact = grouped(x, grouped.weight, sizes)
    assert found.error == pytest.approx(difference(y.detach(), exact.detach()), rel=1e-4)
    assert 0.001 < found.error < 0.05
    assert {role: each.amax for role, each in found.operands.items()} == {
        "activation": x.abs().max().item(),
        "weight": grouped.weight.abs().max().item(),
        "gradient": grad.abs().max().item(),
    }
    rows = torch.cat([a @ w.t() for a, w in zip(x.split(sizes.tolist()), grouped.weight.chunk(4), strict=True)])
    torch.testing.assert_close(exact, rows)
    site.use_fp8()
    assert torch.equal(grouped(x, grouped.weight, sizes), y)
    site.retire(5)
    assert torch.equal(grouped(x, grouped.weight, sizes), exact)


HIDDEN, FFN, SHARED = 32, 64, 64


def in_fp8(recipe: str, tp: Axis, sequence_parallel: bool) -> SparseMLP:
    """Experts and an MLP beside them, as a stage gives them their way to multiply."""
    moe = {"num_experts": 3, "ffn_hidden_size": FFN, "shared_ffn_hidden_size": SHARED}
    spec = small_model(hidden_size=HIDDEN, moe=moe).blocks[0].feed_forward
    layer = SparseMLP(HIDDEN, spec, tp=tp, sequence_parallel=sequence_parallel)
    config = Fp8Config(backend="emulate", recipe=recipe)
    backend = choose_backend(config, tp=tp, replicas=SINGLE, device=torch.device("cpu"), keep_weights=False)
    Fp8(config, 1, backend).attach(torch.nn.ModuleDict({"0": layer}))
    return layer


def check() -> list[str]:
    cuts = {
        "router.weight": whole,
        "experts.gate_up": fused_rows(*[FFN, FFN] * 3),
        "experts.down": columns,
        "shared.gate_up.weight": fused_rows(SHARED, SHARED),
        "shared.down.weight": columns,
    }
    shape = (NUM_TOKENS, HIDDEN)
    cases = {
        recipe: Case(partial(in_fp8, recipe), cuts, input_shape=shape, output_shape=shape, dtypes=(torch.float32,))
        for recipe in ("rowwise", "mxfp8")
    }
    return complaints(cases)


def test_experts_in_fp8_equal_one_process():
    """Cut over two ranks, every row and every matrix is rounded as the whole one is."""
    assert_equal_to_one_process(check, 2)
