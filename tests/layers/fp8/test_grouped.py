"""Products of experts in FP8: each is what a linear layer of that expert alone makes of its rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

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
from megalite.parallel.axes import SINGLE, connect
from megalite.parallel.collectives import from_all
from megalite.parallel.mesh import Mesh
from tests.kit.spawn import run_ranks
from tests.layers.fp8.kit import EMULATED, difference, draw, fp8_layer, run
from tests.layers.small import small_model

OUT, IN = 144, 160
"""More than one block of 128 numbers, and no whole number of them."""

SIZES = ([3, 0, 21, 8], [0, 0, 32, 0], [0, 0, 0, 0])


def weights() -> torch.nn.Parameter:
    """Four matrices."""
    return torch.nn.Parameter(draw(4 * OUT, IN, seed=0))


def made(recipe: str, product=EMULATED, *, may_spare: bool = False) -> tuple[GroupedProduct, GroupedSite]:
    settings = make_recipe(Fp8Config(backend="emulate", recipe=recipe))
    rows = Fp8Rows(settings, CurrentScales(settings, WeightSharding(SINGLE, 0)), product)
    grouped = GroupedProduct(PLAIN, may_spare=may_spare)
    return grouped, GroupedSite("blocks.0.mlp.experts.up", grouped, rows)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("recipe", ROW_RECIPES)
def test_each_expert_is_a_linear_layer(recipe: str, sizes: list[int]):
    """y and dx, of experts without rows too, and with rows behind of no expert; dw is that of unrounded numbers."""
    (grouped, _), weight = made(recipe, may_spare=True), weights()
    num_rows = sum(sizes) + 2
    x, grad = draw(num_rows, IN, seed=1).requires_grad_(), draw(num_rows, OUT, seed=2)
    y = grouped(x, weight, torch.tensor(sizes))
    y.backward(grad)
    parts = zip(x.detach().split([*sizes, 2]), grad.split([*sizes, 2]), weight.detach().chunk(4), strict=False)
    wanted = [run(fp8_layer(recipe), *part[::2], part[1]) if len(part[0]) else None for part in parts]
    behind = {"y": torch.zeros(2, OUT), "dx": torch.zeros(2, IN)}
    for name, found in {"y": y.detach(), "dx": x.grad}.items():
        torch.testing.assert_close(found, torch.cat([*(each[name] for each in wanted if each), behind[name]]))
    exact = [g.t() @ a for a, g in zip(x.detach().split([*sizes, 2])[:4], grad.split([*sizes, 2])[:4], strict=True)]
    torch.testing.assert_close(weight.grad, torch.cat(exact))


def test_torchs_product_is_the_same():
    """`scaled_mm`, group by group, against the emulation."""
    x, sizes = draw(32, IN, seed=1), torch.tensor([3, 0, 21, 8])
    results = [made("rowwise", product)[0](x, weights(), sizes) for product in (EMULATED, scaled_mm)]
    assert difference(results[1], results[0]) < 1e-5


def test_a_look_at_experts():
    """A measurement takes in rows, all matrices, the product and the gradient; without FP8 nothing is rounded."""
    (grouped, site), weight = made("rowwise"), weights()
    x, grad, sizes = draw(32, IN, seed=1).requires_grad_(), draw(32, OUT, seed=2), torch.tensor([3, 0, 21, 8])
    gauge = Gauge(torch.device("cpu"))
    site.use_gauge(gauge)
    y = grouped(x, weight, sizes)
    y.backward(grad)
    found = read_gauges({"up": gauge}, SINGLE, SINGLE)["up"]
    site.use_plain()
    exact = grouped(x, weight, sizes)
    assert found.error == pytest.approx(difference(y.detach(), exact.detach()), rel=1e-4)
    assert 0.001 < found.error < 0.05
    assert {role: each.amax for role, each in found.operands.items()} == {
        "activation": x.abs().max().item(),
        "weight": weight.abs().max().item(),
        "gradient": grad.abs().max().item(),
    }
    rows = torch.cat([a @ w.t() for a, w in zip(x.split(sizes.tolist()), weight.chunk(4), strict=True)])
    torch.testing.assert_close(exact, rows)
    site.use_fp8()
    assert torch.equal(grouped(x, weight, sizes), y)
    site.retire(5)
    assert torch.equal(grouped(x, weight, sizes), exact)


HIDDEN, FFN, NUM_EXPERTS = 32, 64, 3


def scales_of_ranks() -> dict[str, list[float]]:
    """Scales of what is multiplied by experts and by the MLP beside them, cut over the ranks of this world, as a stage
    gives them their way to multiply: those of this rank's own rows, where it has not all."""
    tp = connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp if dist.get_world_size() > 1 else SINGLE
    moe = {"num_experts": NUM_EXPERTS, "ffn_hidden_size": FFN, "shared_ffn_hidden_size": FFN, "activation": "gelu"}
    spec = small_model(hidden_size=HIDDEN, activation=moe.pop("activation"), moe=moe).blocks[0].feed_forward
    config = Fp8Config(backend="emulate", recipe="rowwise")
    backend = choose_backend(config, tp=tp, replicas=SINGLE, device=torch.device("cpu"), keep_weights=False)
    precision = Fp8(config, 1, backend)
    precision.attach(torch.nn.ModuleDict({"0": SparseMLP(HIDDEN, spec, tp=tp, sequence_parallel=False)}))
    up, down = draw(NUM_EXPERTS, FFN, HIDDEN, seed=0), draw(NUM_EXPERTS, HIDDEN, FFN, seed=1)
    stream, between = draw(8, HIDDEN, seed=2), draw(8, FFN, seed=3)
    ahead = 2.0 ** torch.arange(FFN)  # the last rank's part is far larger than others
    up, down, between = up * ahead.view(1, -1, 1), down * ahead, between * ahead
    found = {}
    for name, x, matrices, grad, dim in (
        ("up", stream, up, between.chunk(tp.size, 1)[tp.rank], 1),
        ("down", between.chunk(tp.size, 1)[tp.rank], down, stream, 2),
    ):
        rows = precision.sites[f"blocks.0.experts.{name}"].fp8
        linear = precision.sites[f"blocks.0.shared.{name}"].fp8
        part = matrices.chunk(tp.size, dim)[tp.rank]
        found[f"{name}, x"] = rows.quantise("activation", x).inverse.flatten().tolist()
        found[f"{name}, dy"] = rows.quantise("gradient", grad).inverse.flatten().tolist()
        found[f"{name}, shared, x"] = linear.quantise("activation", x).inverse.flatten().tolist()
        found[f"{name}, shared, dy"] = linear.quantise("gradient", grad).inverse.flatten().tolist()
        for is_back in (False, True):
            each = part.transpose(1, 2) if is_back else part
            scales = torch.stack([one.inverse for one in rows.round_matrices(each, transposed=is_back)])
            if (name == "up") != is_back:  # a rank has some of the rows
                scales = torch.cat(from_all(scales, tp), dim=1) if tp.size > 1 else scales
            found[f"{name}, w, {is_back}"] = scales.flatten().tolist()
        sizes, (forth, back) = torch.tensor([3, 0, 5]), (torch.ones(8, part.shape[dim]) for dim in (2, 1))
        found[f"{name}, parts"] = [
            rows.multiply("activation", forth, part, sizes).abs().max().item(),
            rows.multiply("gradient", back, part.transpose(1, 2), sizes).abs().max().item(),
        ]
    return found


def test_scales_agree_across_tp():
    """Cut over two ranks, every row of tokens and of matrices has the scale of the whole one, there and back."""
    whole = run_ranks(scales_of_ranks, 1)[0]
    first, last = run_ranks(scales_of_ranks, 2)
    assert first.pop("up, parts")[1] == 0.0, "its part of w^T is nothing beside the other's"
    assert first.pop("down, parts")[0] == 0.0, "so is its part of w"
    assert {name: found for name, found in last.items() if "parts" not in name} == first
    assert first == {name: found for name, found in whole.items() if "parts" not in name}
