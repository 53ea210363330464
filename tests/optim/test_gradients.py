"""Clipping, centralisation and noise against their formulas, and alike in every layout."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.config.plan import make_plan
from megalite.config.schema import OptimizerConfig
from megalite.engine.protocol import StepResult
from megalite.optim.adaptive import clip_bound, remember
from megalite.optim.gradients import UNIT_NORM_FLOOR, GradientChanges
from megalite.parallel.axes import SINGLE
from megalite.parallel.random import normal
from megalite.train.components.adaptive_control import AdaptiveControl
from megalite.train.components.component import Step
from tests.kit.slices import whole_slices
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config, train
from tests.model.stages import GPT_STYLE, make_stage, tiny_model

ROUNDING = 1e-6
"""fp32, relative to norms near 1."""

Tensors = dict[str, Tensor]


def changed(step: int = 1, **settings: Any) -> tuple[Tensors, Tensors, Tensors]:
    """Weights, random gradients, and what becomes of them."""
    stage = make_stage(tiny_model(**GPT_STYLE), dtype=torch.float32)
    slices = list(whole_slices(stage))
    torch.manual_seed(0)
    before = [torch.randn(part.stop) * 10 ** torch.rand(1) for part in slices]
    after = [gradient.clone() for gradient in before]
    weights = [part.local.weight for part in slices]
    changes = GradientChanges(
        OptimizerConfig(**settings),
        weights,
        slices,
        SINGLE,
        world=SINGLE,
        tp_rank=0,
        seed=1,
        device=torch.device("cpu"),
    )
    changes.apply(after, step)
    flat = [part.tensors["weight"] for part in slices], before, after
    return tuple(
        {weight.name: t.view(weight.shape) for weight, t in zip(weights, tensors, strict=True)} for tensors in flat
    )


def assert_close(found: Tensors, expected: Tensors) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=ROUNDING, atol=ROUNDING, msg=f"{name} differs")


def test_by_value():
    """torch's clip_grad_value_."""
    _, before, after = changed(clip={"by": "value", "threshold": 0.5})
    assert_close(after, {name: g.clamp(-0.5, 0.5) for name, g in before.items()})


def test_by_parameter():
    """torch's clip_grad_norm_ on each canonical weight alone: query, key and value are three."""
    _, before, after = changed(clip={"by": "parameter", "threshold": 2.0})
    assert_close(after, {name: g * min(1.0, 2.0 / float(g.norm())) for name, g in before.items()})


def test_by_layer():
    """The same on all gradients of a block together, and on each weight outside the blocks."""
    _, before, after = changed(clip={"by": "layer", "threshold": 2.0})
    layers = {name: name.split(".")[1] if name.startswith("blocks.") else name for name in before}
    expected = {}
    for name, gradient in before.items():
        norm = math.sqrt(sum(float(g.square().sum()) for other, g in before.items() if layers[other] == layers[name]))
        expected[name] = gradient * min(1.0, 2.0 / norm)
    assert_close(after, expected)


def test_by_unit():
    """Brock et al. 2021, equation 3: each row of a matrix, each vector, to a share of the weights' norm there."""
    weights, before, after = changed(clip={"by": "unit", "threshold": 0.1})
    expected = {}
    for name, gradient in before.items():
        dims = {"dim": 1, "keepdim": True} if gradient.dim() > 1 else {}
        bound = 0.1 * weights[name].norm(**dims).clamp(min=UNIT_NORM_FLOOR)
        norm = gradient.norm(**dims)
        expected[name] = torch.where(norm > bound, gradient * bound / norm, gradient)
    assert_close(after, expected)


def test_centralisation():
    """The mean of each row of the blocks' matrices is gone; nothing else changes."""
    _, before, after = changed(centralize=True)
    for name, gradient in before.items():
        centred = name.startswith("blocks.") and gradient.dim() > 1
        wanted = gradient - gradient.mean(dim=1, keepdim=True) if centred else gradient
        torch.testing.assert_close(after[name], wanted, rtol=0.0, atol=1e-5)


def test_noise_has_its_variance_and_no_memory():
    """At step s the variance is noise / (1 + s)^decay; the same seed, step and name give the same noise, others not."""
    _, before, after = changed(step=3, noise=0.5, noise_decay=1.0)
    added = {name: after[name] - before[name] for name in before}
    everything = torch.cat([noise.view(-1) for noise in added.values()])
    assert float(everything.var()) == pytest.approx(0.5 / 4, rel=0.05)  # of 22,000 numbers
    _, before, again = changed(step=3, noise=0.5, noise_decay=1.0)
    assert all(torch.equal(again[name], after[name]) for name in after)
    one, other = added["blocks.0.mlp.up.weight"].view(-1), added["blocks.1.mlp.up.weight"].view(-1)
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.1


def test_normal_numbers_are_normal():
    """Mean, variance and the share beyond two deviations of a million numbers."""
    numbers = normal(torch.arange(10**6), seed=7)
    assert abs(float(numbers.mean())) < 5e-3
    assert float(numbers.std()) == pytest.approx(1.0, abs=5e-3)
    assert float((numbers.abs() > 2).float().mean()) == pytest.approx(0.0455, abs=1e-3)


def test_percentile_of_recent_norms():
    """numpy's percentile of the last `window` norms, once there are ten; `clip_grad_norm` bounds it."""
    optimizer = OptimizerConfig(clip={"by": "percentile", "threshold": 75, "window": 20}, clip_grad_norm=None)
    norms, all_norms = [], list(np.random.default_rng(0).lognormal(size=50))
    for number, norm in enumerate(all_norms):
        expected = float(np.percentile(all_norms[max(0, number - 20) : number], 75)) if number >= 10 else None
        assert clip_bound(norms, optimizer) == expected
        norms = remember(norms, norm, optimizer)
    assert remember(norms, math.inf, optimizer) == norms
    tight = optimizer.model_copy(update={"clip_grad_norm": 1e-3})
    assert clip_bound(norms, tight) == 1e-3
    assert remember([], 1.0, OptimizerConfig()) == []


STEPS = 6
LOSS_TOLERANCE = 1e-5
"""fp32 sums in another order, at a high learning rate."""

CHANGES: list[dict[str, Any]] = [
    {"clip": {"by": "value", "threshold": 1e-3}, "clip_grad_norm": None},
    {"clip": {"by": "parameter", "threshold": 0.02}, "clip_grad_norm": None},
    {"clip": {"by": "layer", "threshold": 0.05}},
    {"clip": {"by": "unit", "threshold": 0.005}, "clip_grad_norm": None, "centralize": True},
    {"noise": 1e-3, "centralize": True},
]

FSDP2 = {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}
LAYOUTS = {
    2: [{"tp": 2, "sequence_parallel": True}, {"dp": 2, "zero_stage": 2}, {"dp": 2, "zero_stage": 3}, FSDP2, {"pp": 2}],
    4: [{"tp": 2, "dp": 2}],
}


def case(change: dict[str, Any], **parallel: Any) -> dict[str, Any]:
    """A tiny tied run; SGD, because AdamW would hide a wrong scale."""
    optimizer = {"name": "sgd", "lr": 0.5, "momentum": 0.5, **change}
    model = {"num_layers": 2, "tie_embeddings": True}
    return {"parallel": {"zero_stage": 1, **parallel}, "optimizer": optimizer, "model": model}


def curves(cases: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    return [train(tiny_config(**each), STEPS) for each in cases]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_layout_changes_gradients_alike(world_size):
    """Losses of one process without ZeRO; and each change does change them."""
    single = [case(change, zero_stage=0) for change in ({"clip_grad_norm": None}, *CHANGES)]
    plain, *truth = run_ranks(curves, 1, single)[0]
    cases = [(number, layout) for number in range(len(CHANGES)) for layout in LAYOUTS[world_size]]
    ranks = run_ranks(curves, world_size, [case(CHANGES[number], **layout) for number, layout in cases])
    for curve in truth:
        assert abs(curve[-1][0] - plain[-1][0]) > 10 * LOSS_TOLERANCE
    for found in ranks:
        for (number, layout), curve in zip(cases, found, strict=True):
            off = max(abs(loss - wanted) for (loss, _), (wanted, _) in zip(curve, truth[number], strict=True))
            assert off <= LOSS_TOLERANCE, f"{CHANGES[number]} {layout}: {off:.1e}"


def curves_with_bounds(layouts: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """Curves of runs whose bound on the norm is another at every step."""
    found = []
    for layout in layouts:
        rank = start_rank(tiny_config(**case({}, **layout)))
        curve = []
        for step, bound in enumerate((None, 0.1, 0.02, None, 0.3)):
            rank.engine.clip_norm = bound
            curve += rank.train(step, step + 1)
        rank.engine.close()
        found.append(curve)
    return found


def test_thresholds_of_groups():
    """A group's own threshold in place of the common one; what shares a block with others is clipped apart."""
    own = [{"match": "blocks.*.attention.*", "clip_threshold": 0.5}, {"match": "embedding.*", "lr_scale": 2.0}]
    attention = {name for name in changed()[1] if ".attention." in name}

    def clipped(gradients: Tensors, names: set[str], threshold: float) -> Tensors:
        norm = math.sqrt(sum(float(gradients[name].square().sum()) for name in names))
        return {name: gradients[name] * min(1.0, threshold / norm) for name in names}

    _, before, after = changed(clip={"by": "value", "threshold": 2.0}, groups=own)
    bounds = {name: 0.5 if name in attention else 2.0 for name in before}
    assert_close(after, {name: g.clamp(-bounds[name], bounds[name]) for name, g in before.items()})
    _, before, after = changed(clip={"by": "layer", "threshold": 2.0}, groups=own)
    for block in ("blocks.0.", "blocks.1."):
        inside = {name for name in before if name.startswith(block)}
        expected = clipped(before, inside & attention, 0.5) | clipped(before, inside - attention, 2.0)
        assert_close({name: after[name] for name in inside}, expected)
    _, before, after = changed(clip={"by": "group", "threshold": 2.0}, groups=own)
    tables = {name for name in before if name.startswith("embedding.")}
    rest = set(before) - attention - tables
    assert_close(after, clipped(before, attention, 0.5) | clipped(before, tables, 2.0) | clipped(before, rest, 2.0))


def test_a_bound_that_changes_holds_in_every_layout():
    """What a percentile needs: engines take another bound, or none, at every step."""
    (truth,) = run_ranks(curves_with_bounds, 1, [{"zero_stage": 0}])[0]
    layouts = [{"dp": 2, "zero_stage": stage} for stage in range(4)] + [{"pp": 2}, {"pp": 2, "zero_stage": 0}]
    for curve, layout in zip(run_ranks(curves_with_bounds, 2, layouts)[0], layouts, strict=True):
        off = max(abs(loss - wanted) for (loss, _), (wanted, _) in zip(curve, truth, strict=True))
        assert off <= LOSS_TOLERANCE, layout


def test_recent_norms_survive_a_restart():
    """The norms are in the state that checkpoints hold: the bound of the next step is the same after a restart."""
    clip = {"by": "percentile", "threshold": 50, "window": 16}
    config = tiny_config(optimizer={"clip": clip, "clip_grad_norm": None})
    nothing = {name: lambda state: None for name in ("set_loss_scaling", "set_averaging", "set_pacing")}
    engine = SimpleNamespace(loss_scaling=dict, averaging=dict, **nothing)
    nobody = {"axes": None, "device": None, "recorder": None}
    control, again = (AdaptiveControl(config, make_plan(config, 1), engine=engine, **nobody) for _ in range(2))
    for number in range(20):
        step = Step(number, [], range(0), None, 0, 0)
        control.after_step(step, StepResult(loss=1.0, grad_norm=float(number), lr=0.1, num_tokens=1))
    again.load_state(json.loads(json.dumps(control.state())))
    for each in (control, again):
        each.before_step(step)
        assert step.clip_norm == 11.5
