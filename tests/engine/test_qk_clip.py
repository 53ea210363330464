"""QK-clip: logits are those of brute force, heads above the threshold come down to it and no other head changes, and
every layout measures and clips alike."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.config.optimizers import LEAD
from megalite.monitor.attention_logits import AttentionLogits
from megalite.optim.averaging import average_of
from megalite.optim.groups import Pacing
from megalite.optim.qk_clip import row_scales, scale_rows
from tests.kit.batches import step_batches
from tests.kit.slices import whole_slices
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config
from tests.model.stages import make_stage, tiny_model

ROUNDING = 1e-5
"""fp32, of a loss near 4.6, or relative, of logits: sums in another order."""

LATENTS = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 8}

MODELS: dict[str, dict[str, Any]] = {
    "heads of their own": {},
    "shared keys, biases": {"num_kv_heads": 2, "bias": "qkv"},
    "a window": {"num_kv_heads": 1, "sliding_window": 3},
    "latents": {"num_kv_heads": None, "head_dim": None, "mla": LATENTS},
    "latents of queries too": {"num_kv_heads": None, "head_dim": None, "mla": {**LATENTS, "q_lora_rank": 24}},
}

ROUNDED = {"bits": 4, "group_size": 32, "learned_scales": True}

NO_LR = 1e-30


def brute_force(q: Tensor, k: Tensor, borders: list[int], window: int | None) -> Tensor:
    """The largest logit of each head, document by document, query by query."""
    found = torch.full((q.shape[1],), -torch.inf, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for start, stop in itertools.pairwise(borders):
        for place in range(start, stop):
            first = start if window is None else max(start, place - window + 1)
            for head in range(q.shape[1]):
                scores = k[first : place + 1, head // group].double() @ q[place, head].double() / q.shape[2] ** 0.5
                found[head] = max(found[head], scores.max())
    return found


def clip_once(model: dict[str, Any], qat: dict[str, Any] | None = None) -> tuple[Tensor, Tensor, Tensor, float]:
    """Of one block, the largest logits by brute force, as measured, and behind a clipped update of no other effect."""
    sections = {"num_layers": 1, "init_std": 0.3, **model}
    others = {"optimizer": {"weight_decay": 0.0}, "parallel": {"zero_stage": 0}, "precision": {"qat": qat}}
    rank = start_rank(tiny_config(model=sections, **others))
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "dp": 1, "dp_rank": 0, "seq_len": 16, "vocab_size": 101}
    batches = step_batches(0, **sizes)
    (block,) = rank.engine.stage.blocks_by_index().values()
    truth: list[Tensor] = []
    kernel = block.attention.attend

    def spy(q, k, v, documents, window, **of_heads):
        truth.append(brute_force(q, k, documents.cu_seqlens.tolist(), window))
        return kernel(q, k, v, documents, window, **of_heads)

    block.attention.attend = spy
    logits = AttentionLogits(rank.engine.stage, rank.axes)
    before = logits.measure(lambda: rank.engine.eval_step(batches))
    assert block.attention.attend is spy
    block.attention.attend = kernel
    threshold = before.median().item()
    rank.engine.set_pacing(Pacing(row_scales=row_scales(before, threshold, rank.plan.model)))
    rank.engine.train_step(batches, NO_LR)
    after = logits.measure(lambda: rank.engine.eval_step(batches))
    rank.engine.close()
    return torch.stack(truth).amax(0), before[0], after[0], threshold


def clip_each(models: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor, Tensor, float]]:
    return [*map(clip_once, models), clip_once({}, ROUNDED)]


def test_each_head_comes_down_to_the_threshold():
    """Of five kinds of attention, and of weights that are rounded by scales of their own, measured logits are brute
    force's, and behind the update min(logit, threshold)."""
    for name, found in zip([*MODELS, "rounded"], run_ranks(clip_each, 1, list(MODELS.values()))[0], strict=True):
        truth, before, after, threshold = found
        torch.testing.assert_close(before.double(), truth, rtol=ROUNDING, atol=0.0, msg=name)
        assert 0 < (before > threshold).sum() < len(before), name
        torch.testing.assert_close(after, before.clamp(max=threshold), rtol=ROUNDING, atol=0.0, msg=name)


def test_weights_in_bf16_are_rounded_by_chance():
    """The mean over many steps is the exact product, which no number in bf16 is."""
    stage = make_stage(tiny_model(), dtype=torch.bfloat16)
    (part,) = [part for part in whole_slices(stage) if part.local.weight.name == "blocks.0.attention.q.weight"]
    weight, exact = part.tensors["weight"], part.tensors["weight"].float() * 0.9
    before, total, count = weight.clone(), torch.zeros_like(exact), 200
    for step in range(count):
        weight.copy_(before)
        scale_rows([part], {part.local.weight.name: torch.full((32,), 0.9)}, rounds=True, seed=1, step=step)
        assert ((weight.float() - exact).abs() <= exact.abs() * 2**-7).all()
        total += weight.float()
    assert ((total / count - exact).abs().mean() / exact.abs().mean()).item() < 2**-7 / 6


def test_averages_shrink_as_the_weights_do():
    """Where an optimizer averages, rows of x and z are scaled as those of y are, and other weights' are not."""
    parts = [
        replace(part, tensors={**part.tensors, LEAD: torch.randn_like(part.tensors["weight"])})
        for part in whole_slices(make_stage(tiny_model(), dtype=torch.float32))
    ]
    name, rows = "blocks.1.attention.q.weight", torch.linspace(0.5, 1.0, 32)
    before = [average_of(part.tensors["weight"], part.tensors[LEAD], 0.9) for part in parts]
    scale_rows(parts, {name: rows}, rounds=False, seed=1, step=1)
    for part, former in zip(parts, before, strict=True):
        factor = rows.unsqueeze(1) if part.local.weight.name == name else torch.ones(1, 1)
        expected = (former.view(part.local.rectangle.shape) * factor).view(-1)
        found = average_of(part.tensors["weight"], part.tensors[LEAD], 0.9)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


STEPS = 6
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"tp": 2},
        {"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
        {"dp": 2, "zero_stage": 3, "engine": "fsdp2"},
        {"pp": 2},
        {"cp": 2, "cp_kind": "ring"},
    ],
    4: [{"tp": 2, "dp": 2, "sequence_parallel": True}, {"tp": 4, "zero_stage": 0}],
}

Curve = tuple[list[tuple[float, float]], list[dict[str, float]]]


def case(**parallel: Any) -> dict[str, Any]:
    """Muon with QK-clip in every second step, keys shared by two heads each."""
    return {
        "parallel": {"zero_stage": 1, **parallel},
        "optimizer": {"name": "muon", "qk_clip": {"threshold": 0.6, "every": 2}},
        "model": {"num_layers": 2, "num_kv_heads": 2, "init_std": 0.1},
        "batch": {"micro_batch_size": 8 // parallel.get("dp", 1) if parallel.get("cp") else 2},
    }


def curves(cases: list[dict[str, Any]], root: Path | None = None) -> list[Curve]:
    """Losses and what was measured; with a folder, a checkpoint of the first case in the middle."""
    found = []
    for number, sections in enumerate(cases):
        rank = start_rank(tiny_config(**sections))
        curve = rank.train(0, STEPS // 2)
        if root is not None and number == 0:
            rank.save(root, STEPS // 2)
        found.append((curve + rank.train(STEPS // 2, STEPS), [each for each in rank.figures if each]))
        rank.engine.close()
    return found


def go_on(checkpoint: Path, sections: dict[str, Any]) -> list[tuple[float, float]]:
    """The curve from a checkpoint to the end."""
    rank = start_rank(tiny_config(**sections), checkpoint)
    curve = rank.train(STEPS // 2, STEPS)
    rank.engine.close()
    return curve


def test_every_layout_clips_alike(tmp_path):
    """Losses, largest logits and numbers of clipped heads are one process's; a restart repeats the rest bit by bit."""
    ((truth, figures),) = run_ranks(curves, 1, [case(zero_stage=0)])[0]
    assert len(figures) == STEPS // 2
    assert figures[0]["qk_clipped_heads"] > figures[1]["qk_clipped_heads"] > 0, figures
    for world_size, layouts in LAYOUTS.items():
        root = tmp_path / str(world_size)
        ranks = run_ranks(curves, world_size, [case(**layout) for layout in layouts], root)
        for found in ranks:
            for layout, (curve, measured) in zip(layouts, found, strict=True):
                assert max(abs(a - b) for (a, _), (b, _) in zip(curve, truth, strict=True)) < ROUNDING, layout
                for each, wanted in zip(measured, figures, strict=True):
                    assert each["qk_clipped_heads"] == wanted["qk_clipped_heads"], layout
                    assert abs(each["qk_logit_max"] / wanted["qk_logit_max"] - 1) < 10 * ROUNDING, layout
        checkpoint = root / f"step-{STEPS // 2:07d}"
        assert run_ranks(go_on, world_size, checkpoint, case(**layouts[0]))[0] == ranks[0][0][0][STEPS // 2 :]
