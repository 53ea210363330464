"""fp16 with dynamic loss scaling: trains like fp32 in every layout, and gradients that overflow cost a step.

DeepSpeed takes fp16 on a CPU that has units for it. Others compute it too, slowly, so the tests answer for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.engine import runtime
from megalite.train.micro_gradients import MicroGradients
from tests.kit.batches import step_batches
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config, train

STEPS = 8
LOSS_TOLERANCE = 1e-3
"""Of a loss near 4.6; found were 2e-4."""

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3, "engine": "deepspeed"}],
    2: [
        {"dp": 2},
        {"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
        {"tp": 2, "zero_stage": 2, "sequence_parallel": True},
        {"pp": 2},
    ],
}


def allow_fp16() -> None:
    """Let a run and DeepSpeed take fp16 on any CPU."""
    from deepspeed.accelerator import get_accelerator

    runtime.has_fp16 = lambda device_type: True
    type(get_accelerator()).is_fp16_supported = lambda self: True


def case(dtype: str = "fp16", **parallel: Any) -> dict[str, Any]:
    """Sections of a tiny run."""
    return {"parallel": {"zero_stage": 1, **parallel}, "precision": {"dtype": dtype}, "model": {"num_layers": 2}}


def curves(cases: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    allow_fp16()
    return [train(tiny_config(**each), STEPS) for each in cases]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_trains_like_fp32(world_size):
    """Losses, and gradient norms without the scale in them, of one process in fp32."""
    (truth,) = run_ranks(curves, 1, [case("fp32")])[0]
    for layout, curve in zip(
        LAYOUTS[world_size],
        run_ranks(curves, world_size, [case(**layout) for layout in LAYOUTS[world_size]])[0],
        strict=True,
    ):
        for (loss, norm), (wanted, wanted_norm) in zip(curve, truth, strict=True):
            assert loss == pytest.approx(wanted, abs=LOSS_TOLERANCE), layout
            assert norm == pytest.approx(wanted_norm, rel=2e-3), layout


LARGE_POWER = 2.0**23
"""The same, and half of it too, as a power of two."""

LARGE = 1.5 * 2.0**22
"""A scale with which gradients of the tiny run are infinite in fp16."""


def overflows(layouts: list[dict[str, Any]]) -> list[tuple[list[tuple[bool, str, float]], bool, bool]]:
    """Steps from a scale that is too large: skipped, why, scale behind it; whether weights and moments stayed as they
    were through the first one, and whether they moved in the end."""
    allow_fp16()
    found = []
    for layout in layouts:
        rank = start_rank(tiny_config(**case(**layout)))
        engine, axes = rank.engine, rank.axes
        engine.set_loss_scaling({**engine.loss_scaling(), "scale": LARGE})

        def state(engine: Any = engine) -> list[torch.Tensor]:
            return [tensor.clone() for part in engine.slices() for tensor in part.tensors.values()]

        before, steps, stayed = state(), [], True
        for step in range(12):
            batches = step_batches(
                step,
                global_batch_size=8,
                micro_batch_size=2,
                dp=axes.batch.size,
                dp_rank=axes.batch.rank,
                seq_len=16,
                vocab_size=101,
            )
            result = engine.train_step(batches, 1e-3)
            steps.append((result.skipped, result.why, engine.loss_scaling()["scale"]))
            if step == 0:
                stayed = all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        moved = any(not torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        found.append((steps, stayed, moved))
        engine.close()
    return found


def test_an_overflow_costs_a_step():
    """Steps are left out until the scale, halved by each after the first, fits; the reason is said; then it trains."""
    layouts = LAYOUTS[2]
    for rank in run_ranks(overflows, 2, layouts):
        for layout, (steps, stayed, moved) in zip(layouts, rank, strict=True):
            num_skipped = sum(skipped for skipped, _, _ in steps)
            assert 2 <= num_skipped < 12, layout
            for number, (skipped, why, scale) in enumerate(steps):
                assert skipped == (number < num_skipped), layout
                assert ("gradient norm" in why) == skipped, layout
                assert scale == LARGE / 2 ** min(number, num_skipped - 1), layout
            assert stayed, layout
            assert moved, layout


SCALES: dict[str, dict[str, Any]] = {
    "fixed": {"fixed": LARGE_POWER},
    "bounded": {"initial": LARGE_POWER, "hysteresis": 1, "minimum": LARGE_POWER / 2},
    "searched": {"initial": LARGE_POWER, "hysteresis": 1, "window": 2},
}


NUM_SCALED = 9


def scales(layouts: list[dict[str, Any]]) -> dict[str, list[list[tuple[bool, float]]]]:
    """Of each step, whether it was left out and the scale behind it, by setting and layout."""
    allow_fp16()
    found: dict[str, list[list[tuple[bool, float]]]] = {}
    for name, settings in SCALES.items():
        for layout in layouts:
            sections = case(**layout)
            sections["precision"]["loss_scale"] = settings
            rank = start_rank(tiny_config(**sections))
            own, steps = {"dp": rank.axes.batch.size, "dp_rank": rank.axes.batch.rank}, []
            for step in range(NUM_SCALED):
                sizes = {"global_batch_size": 8, "micro_batch_size": 2, "seq_len": 16, "vocab_size": 101}
                result = rank.engine.train_step(step_batches(step, **sizes, **own), 1e-3)
                steps.append((result.skipped, rank.engine.loss_scaling()["scale"]))
            rank.engine.close()
            found.setdefault(name, []).append(steps)
    return found


def test_settings_of_the_scale():
    """A fixed one stays, and steps that overflow are left out for ever; a search begins, is halved, stops falling and
    rises where it is told to."""
    top = LARGE_POWER
    layouts = [{"dp": 2}, {"dp": 2, "zero_stage": 2}, {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}]
    found = run_ranks(scales, 2, layouts)[0]
    assert found["fixed"] == [[(True, top)] * NUM_SCALED] * len(layouts)
    assert found["bounded"] == [[(True, top / 2)] * NUM_SCALED] * len(layouts)
    for layout, steps in zip(layouts, found["searched"], strict=True):
        assert sum(skipped for skipped, _ in steps) >= 2, layout
        expected, scale, last = [], top, -1
        for number, (skipped, _) in enumerate(steps):
            num_good = number - last - 1
            if skipped:
                scale, last = scale / 2, number
            elif num_good > 0 and num_good % 2 == 0:
                scale *= 2
            expected.append((skipped, scale))
        assert steps == expected, layout


def noise_squares(dtypes: list[str]) -> list[float]:
    """The mean square of micro-batch gradients, as the noise scale takes it."""
    allow_fp16()
    found = []
    for dtype in dtypes:
        rank = start_rank(tiny_config(**case(dtype)))
        meter = MicroGradients(rank.engine, rank.axes)
        batches = step_batches(0, global_batch_size=8, micro_batch_size=2, dp=1, dp_rank=0, seq_len=16, vocab_size=101)
        meter.start(rank.engine.loss_scaling().get("scale", 1.0))
        found.append(meter.finish(batches, rank.engine.train_step(batches, 0.0)).small)
        rank.engine.close()
    return found


def test_the_noise_scale_knows_of_the_loss_scale():
    """Squares of micro-batch gradients in fp16 are those of fp32."""
    fp32, fp16 = run_ranks(noise_squares, 1, ["fp32", "fp16"])[0]
    assert fp16 == pytest.approx(fp32, rel=5e-3)
