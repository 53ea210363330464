"""A checkpoint of any layout goes on in any other: weights and moments bit for bit, losses to float tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.checkpoint.reader import CheckpointReader
from megalite.model.weights import Rectangle
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

SAVED_STEP, LAST_STEP = 3, 8
LOSS_TOLERANCE = 1e-5
"""fp32 sums in another order."""

TIED = {"model": {"tie_embeddings": True}}


def layout(**parallel):
    return {"parallel": {"zero_stage": 1, **parallel}}


LAYOUTS = {
    1: {"one": layout(zero_stage=0), "one-zero3": layout(zero_stage=3)},
    2: {
        "tp2-zero1": layout(tp=2),
        "tp2-zero3": layout(tp=2, zero_stage=3),
        "dp2-zero2": layout(dp=2, zero_stage=2),
        "dp2-zero0": layout(dp=2, zero_stage=0),
        "pp2-zero1": layout(pp=2),
        "pp2-zero0": layout(pp=2, zero_stage=0, blocks_per_stage=[4, 0]),
    },
    4: {
        "tp4-zero1-sp": layout(tp=4, sequence_parallel=True),
        "dp4-zero3": layout(dp=4, zero_stage=3),
        "tp2-dp2-zero3": layout(tp=2, dp=2, zero_stage=3),
        "tp2-pp2-zero1": layout(tp=2, pp=2),
        "pp4-zero1": layout(pp=4),
    },
}
SAVED_AT = ("one", "tp2-zero3", "dp2-zero2", "pp2-zero1", "tp2-dp2-zero3", "tp2-pp2-zero1")


def train_on(folder: Path, cases: dict[str, dict]) -> dict[str, list[tuple[float, float]]]:
    """Train each layout to the last step, saving on the way those that others load."""
    curves = {}
    for name, case in cases.items():
        rank = start_rank(tiny_config(**case))
        curves[name] = rank.train(0, SAVED_STEP)
        if name in SAVED_AT:
            rank.save(folder / name, SAVED_STEP)
        curves[name] += rank.train(SAVED_STEP, LAST_STEP)
        rank.engine.close()
    return curves


def go_on(folder: Path, cases: dict[str, dict]) -> list[str]:
    """Load every saved layout in each of these layouts; return complaints about the state read back or lost."""
    curves = {}
    for name, case in cases.items():
        for saved in SAVED_AT:
            checkpoint = folder / saved / f"step-{SAVED_STEP:07d}"
            rank = start_rank(tiny_config(**case), checkpoint)
            reader = CheckpointReader(checkpoint)
            for state in rank.engine.local_weights():
                for kind, tensor in state.tensors.items():
                    want = reader.read(f"{kind}/{state.local.weight.name}", state.local.rectangle)
                    assert torch.equal(tensor, want), f"{saved} -> {name}: {kind} of {state.local.weight.name} changed"
            curves[f"{saved} -> {name}"] = rank.train(SAVED_STEP, LAST_STEP)
            rank.engine.close()
    return curves


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_any_layout_to_any_layout(tmp_path, tied):
    """Six layouts saved, thirteen loaded: state bit-equal after resharding, the next five losses to 1e-5."""
    worlds = {
        size: {name: {**case, **(TIED if tied else {})} for name, case in cases.items()}
        for size, cases in LAYOUTS.items()
    }
    if tied:  # the untied matrix is whole; tied pairs differ only in who holds the head
        keep = (
            "one",
            "tp2-zero1",
            "pp2-zero1",
            "pp4-zero1",
            "tp2-pp2-zero1",
            "tp2-dp2-zero3",
            "dp2-zero2",
            "tp2-zero3",
        )
        worlds = {size: {n: c for n, c in cases.items() if n in keep} for size, cases in worlds.items()}
    undisturbed = {}
    for size, cases in worlds.items():
        undisturbed |= run_ranks(train_on, size, tmp_path, cases)[0]
    truth = undisturbed["one"][SAVED_STEP:]
    complaints = []
    for size, cases in worlds.items():
        for name, curve in run_ranks(go_on, size, tmp_path, cases, timeout_seconds=400)[0].items():
            worst = max(abs(loss - want) for (loss, _), (want, _) in zip(curve, truth, strict=True))
            if worst > LOSS_TOLERANCE:
                complaints.append(f"{name}: losses differ by {worst:.1e}")
    assert not complaints, "\n".join(complaints)


def test_reader_joins_pieces_of_any_rectangle(tmp_path):
    """Every rectangle asked of a tensor cut by tp 2 equals the slice of the whole."""
    run_ranks(train_on, 2, tmp_path, {"tp2-zero3": LAYOUTS[2]["tp2-zero3"]})
    reader = CheckpointReader(tmp_path / "tp2-zero3" / f"step-{SAVED_STEP:07d}")
    for name in ("weight/embedding.weight", "exp_avg/blocks.1.mlp.down.weight"):
        shape = reader.manifest.tensors[name].shape
        whole = reader.read(name, Rectangle((0, 0), shape))
        for rows, columns in ((1, 1), (7, 5), (shape[0], 3), (2, shape[1])):
            for start in ((0, 0), (shape[0] - rows, shape[1] - columns), ((shape[0] - rows) // 2, 0)):
                rectangle = Rectangle(start, (rows, columns))
                assert torch.equal(reader.read(name, rectangle), whole[rectangle.slices])
