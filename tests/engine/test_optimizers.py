"""Every optimizer trains alike in every layout, goes on bit by bit from its checkpoint, and in another layout from the
same one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.architecture.weights import weight_table
from megalite.config.plan import make_plan
from megalite.optim.rules import state_bytes, state_shapes
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config, train

STEPS = 6
"""Three warm up, and three decay; a checkpoint is between them."""
SMALL = {"num_layers": 2}
ROWS = 8
"""Of a step, in at most two micro-batches: what is compared is what an optimizer makes of their gradients."""

TOLERANCES = {
    "adamw8bit": 2e-5,
    "lion": 2e-4,
    "adafactor": 1e-5,
    "muon": 2e-5,
    "soap": 2e-5,
    "muon8bit": 2e-4,
    "lion8bit": 2e-4,
    "sgd": 1e-5,
    "schedule_free_adamw": 2e-5,
}
"""Of the loss, near 4.6, fp32 sums in another order. Lion turns a rounding of a momentum near zero into a whole step,
and a number at the border of two codes of 8 bits into another code; Muon lifts small singular values."""

LR = {
    "adamw8bit": 2e-3,
    "lion": 5e-4,
    "adafactor": 2e-3,
    "muon": 2e-3,
    "soap": 2e-3,
    "sgd": 0.05,
    "muon8bit": 2e-3,
    "lion8bit": 5e-4,
    "schedule_free_adamw": 5e-3,
}

LIKE_OTHERS = ("muon8bit", "lion8bit", "schedule_free_adamw")
"""Made of parts that others are tested with, or more so elsewhere: a third of the layouts will do."""

SETTINGS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, "soap": {"precondition_every": 2}}

Curve = list[tuple[float, float]]


def case(name: str, **parallel: Any) -> dict[str, Any]:
    """Sections of a tiny run with an optimizer."""
    optimizer = {"name": name, "lr": LR[name], **SETTINGS.get(name, {})}
    few = {"micro_batch_size": min(4, ROWS // parallel.get("dp", 1))}
    return {"parallel": {"zero_stage": 1, **parallel}, "optimizer": optimizer, "model": SMALL, "batch": few}


LAYOUTS = {
    2: [
        {"tp": 2},
        {"tp": 2, "zero_stage": 0},
        {"dp": 2, "zero_stage": 0},
        {"dp": 2},
        {"dp": 2, "zero_stage": 2},
        {"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
        {"dp": 2, "zero_stage": 3, "engine": "fsdp2"},
        {"pp": 2},
    ],
    4: [
        {"cp": 2, "dp": 2},
        {"tp": 2, "dp": 2},
        {"tp": 2, "dp": 2, "zero_stage": 3, "engine": "deepspeed", "sequence_parallel": True},
        {"tp": 2, "dp": 2, "zero_stage": 3, "engine": "fsdp2"},
        {"dp": 4, "zero_stage": 3, "engine": "fsdp2", "dp_replicate": 2},
        {"pp": 2, "dp": 2},
    ],
}


EXPERTS = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "aux_loss": 0.02}}
LAYOUTS_OF_EXPERTS = {
    2: [{"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "zero_stage": 0}],
    4: [{"dp": 2, "ep": 2, "tp": 2}, {"dp": 4, "ep": 2}],
}


def sparse(sections: dict[str, Any]) -> dict[str, Any]:
    """The same of a model with experts."""
    return {**sections, "model": {**SMALL, **EXPERTS}}


def curves(cases: list[dict[str, Any]]) -> list[Curve]:
    return [train(tiny_config(**each), STEPS) for each in cases]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_layout_trains_like_one_process(world_size):
    """Loss of each step, as one process without ZeRO has it."""
    truth = dict(zip(LR, run_ranks(curves, 1, [case(name, zero_stage=0) for name in LR])[0], strict=True))
    cases = [(name, layout) for name in LR for layout in LAYOUTS[world_size][:: 3 if name in LIKE_OTHERS else 1]]
    found = run_ranks(curves, world_size, [case(name, **layout) for name, layout in cases])
    complaints = []
    for number, (name, layout) in enumerate(cases):
        off = max(
            abs(loss - wanted)
            for rank in found
            for (loss, _), (wanted, _) in zip(rank[number], truth[name], strict=True)
        )
        if not off <= TOLERANCES[name]:
            complaints.append(f"{name} {layout}: loss off by {off:.1e}")
    assert not complaints, "\n".join(complaints)


def test_every_optimizer_takes_experts(tmp_path):
    """Loss of each step, as one process without ZeRO has it: a rule that takes whole matrices takes each expert's. From
    a checkpoint of ep 2 the rest is repeated bit by bit."""
    names = [name for name in LR if name not in LIKE_OTHERS]
    truth = dict(zip(names, run_ranks(curves, 1, [sparse(case(name, zero_stage=0)) for name in names])[0], strict=True))
    for world_size, layouts in LAYOUTS_OF_EXPERTS.items():
        cases = [(name, layout) for name in names for layout in layouts]
        found = run_ranks(curves, world_size, [sparse(case(name, **layout)) for name, layout in cases])[0]
        for (name, layout), curve in zip(cases, found, strict=True):
            off = max(abs(loss - wanted) for (loss, _), (wanted, _) in zip(curve, truth[name], strict=True))
            assert off <= TOLERANCES[name], f"{name} {layout}: loss off by {off:.1e}"
    written = [sparse(case(name, dp=2, ep=2)) for name in names]
    whole = run_ranks(save_in_the_middle, 2, tmp_path, written)
    again = run_ranks(go_on, 2, tmp_path, list(enumerate(written)))
    for rank in range(2):
        for name, curve, rest in zip(names, whole[rank], again[rank], strict=True):
            assert rest == curve[STEPS // 2 :], name


def save_in_the_middle(root: Path, cases: list[dict[str, Any]]) -> list[Curve]:
    """Curves of all steps, with a checkpoint after half of them."""
    found = []
    for number, sections in enumerate(cases):
        rank = start_rank(tiny_config(**sections))
        curve = rank.train(0, STEPS // 2)
        rank.save(root / str(number), STEPS // 2)
        found.append(curve + rank.train(STEPS // 2, STEPS))
        rank.engine.close()
    return found


def go_on(root: Path, cases: list[tuple[int, dict[str, Any]]]) -> list[Curve]:
    """Curves from checkpoints, by number, to the end."""
    found = []
    for number, sections in cases:
        checkpoint = root / str(number) / f"step-{STEPS // 2:07d}"
        rank = start_rank(tiny_config(**sections), checkpoint)
        found.append(rank.train(STEPS // 2, STEPS))
        rank.engine.close()
    return found


def test_restart_is_bit_equal_and_reshards(tmp_path):
    """From a checkpoint of tp 2 with ZeRO-1, the same layout repeats the rest bit by bit, and dp 2 with ZeRO-3, a
    pipeline and one process have it to rounding."""
    written = [case(name, tp=2) for name in LR]
    whole = run_ranks(save_in_the_middle, 2, tmp_path, written)
    again = run_ranks(go_on, 2, tmp_path, list(enumerate(written)))
    for rank in range(2):
        for name, curve, rest in zip(LR, whole[rank], again[rank], strict=True):
            assert rest == curve[STEPS // 2 :], name
    divided = [{"dp": 2, "zero_stage": 3, "engine": engine} for engine in ("deepspeed", "fsdp2")]
    others = [*divided, {"pp": 2}, {"zero_stage": 0}]
    for layout in others:
        size = 1 if len(layout) == 1 and "zero_stage" in layout else 2
        cases = [(number, case(name, **layout)) for number, name in enumerate(LR)]
        for name, curve, rest in zip(LR, whole[0], run_ranks(go_on, size, tmp_path, cases)[0], strict=True):
            off = max(abs(a - b) for (a, _), (b, _) in zip(rest, curve[STEPS // 2 :], strict=True))
            assert off <= TOLERANCES[name], f"{name} {layout}: {off:.1e}"


def state_sizes(cases: list[dict[str, Any]]) -> list[tuple[int, dict[str, tuple[int, ...]]]]:
    """Of each case, the bytes of optimizer state that this rank holds, and what it writes, by tensor name."""
    found = []
    for sections in cases:
        rank = start_rank(tiny_config(**sections))
        rank.train(0, 1)
        optimizer = rank.engine._state.optimizer
        tensors = [t for part in optimizer.slices for kind, t in part.tensors.items() if kind != "weight"]
        rules = optimizer._rules.values()
        kept = [vars(rule).get(name, {}) for rule in rules for name in ("_states", "_moments")]
        kept += [
            {name: (packed,) for name, packed in rule._momenta.packed.items()}
            for rule in rules
            if hasattr(rule, "_momenta")
        ]
        tensors += [tensor for each in kept for value in each.values() for tensor in _tensors(value)]
        shapes = {
            f"{kind}/{state.unit.weight.name}": place.shape
            for state in rank.engine.owned_states()
            for kind, (place, _) in state.tensors.items()
        }
        found.append((sum(tensor.nbytes for tensor in tensors), shapes))
        rank.engine.close()
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return list(value.values())
    return [getattr(packed, field.name) for packed in value for field in dataclasses.fields(packed)[:2]]


def test_state_takes_the_bytes_that_are_planned():
    """One process holds what `rules.state_bytes` says, which is what `config check` prints; two ranks of ZeRO-1 hold
    that together."""
    cases = [case(name) for name in LR]
    shared = [case(name, dp=2) for name in LR]
    alone, both = run_ranks(state_sizes, 1, cases)[0], run_ranks(state_sizes, 2, shared)
    for number, sections in enumerate(cases):
        config = tiny_config(**sections)
        table = weight_table(make_plan(config, 1).model).values()
        planned = sum(state_bytes(weight, config.optimizer) for weight in table)
        assert alone[number][0] == planned, config.optimizer.name
        assert sum(rank[number][0] for rank in both) == planned, config.optimizer.name
        for name, shape in alone[number][1].items():
            kind, weight_name = name.split("/", 1)
            weight = next(weight for weight in table if weight.name == weight_name)
            assert state_shapes(weight, config.optimizer)[kind] == shape


def change_in_the_middle(root: Path, names: list[str]) -> list[tuple[Curve, Curve, Curve]]:
    """Curves after half of the steps: of an optimizer, of the one of 8 bits from its checkpoint, and that one's again
    from a checkpoint of its own, read by the first."""
    found = []
    for name in names:
        wide, narrow = (
            {"parallel": {"zero_stage": 1}, "optimizer": {"name": each, "lr": 2e-3}, "model": SMALL}
            for each in (name, f"{name}8bit")
        )
        (whole,) = save_in_the_middle(root / name, [wide])
        there = go_on(root / name, [(0, narrow)])[0]
        save_in_the_middle(root / f"{name}8bit", [narrow])
        found.append((whole[STEPS // 2 :], there, go_on(root / f"{name}8bit", [(0, wide)])[0]))
    return found


NEAR = 2e-3
"""What rounding moments to 8 bits may do to a loss near 4.6 in six steps."""


def test_runs_go_on_in_8_bits_and_back(tmp_path):
    """Those of 8 bits read the state of the others and go on nearly as these would, and the other way round."""
    for wide, narrow, back in run_ranks(change_in_the_middle, 1, tmp_path, ["adamw", "muon", "lion"])[0]:
        assert narrow[0] == wide[0]  # before the first update of the new one
        for other in (narrow, back):
            off = max(abs(a - b) for (a, _), (b, _) in zip(wide, other, strict=True))
            assert off < NEAR
