"""A run that grows and shrinks on its way is the run that did not; and any rectangle comes out of any pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.architecture.weights import Rectangle
from megalite.checkpoint.reader import CheckpointReader
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

LOSS_TOLERANCE = 1e-5
"""fp32 sums in another order."""
STEPS_PER_LEG = 2

JOURNEY = (
    (1, {"zero_stage": 0}, 2),
    (2, {"tp": 2, "zero_stage": 3, "engine": "deepspeed"}, 1),
    (4, {"tp": 2, "dp": 2, "zero_stage": 3, "engine": "deepspeed", "sequence_parallel": True}, 2),
    (2, {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}, 2),
    (4, {"pp": 4, "zero_stage": 1}, 1),
    (2, {"pp": 2, "zero_stage": 0}, 4),
    (4, {"pp": 2, "dp": 2, "zero_stage": 1}, 2),
    (2, {"dp": 2, "zero_stage": 2}, 4),
    (1, {"zero_stage": 1}, 8),
)
"""World size, layout and micro-batch size of each leg: from one rank to four and back, through every stage of ZeRO and
both engines."""


def travel(root: Path, first: int, parallel: dict, micro_batch_size: int, sections: dict) -> list[tuple[float, float]]:
    """One leg: load what the last one saved, train, save."""
    checkpoint = root / f"step-{first:07d}" if first else None
    config = tiny_config(parallel=parallel, batch={"micro_batch_size": micro_batch_size}, **sections)
    rank = start_rank(config, checkpoint)
    curve = rank.train(first, first + STEPS_PER_LEG)
    rank.save(root, first + STEPS_PER_LEG)
    return curve


def undisturbed(sections: dict, steps: int) -> list[tuple[float, float]]:
    return start_rank(tiny_config(parallel=JOURNEY[0][1], **sections)).train(0, steps)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_world_grows_and_shrinks(tmp_path, tied):
    """Eight legs on eight layouts: every loss is that of the run on one rank."""
    sections = {"model": {"tie_embeddings": tied}}
    curve = []
    for number, (world_size, parallel, micro_batch_size) in enumerate(JOURNEY):
        first = number * STEPS_PER_LEG
        curve += run_ranks(travel, world_size, tmp_path, first, parallel, micro_batch_size, sections)[0]
    truth = run_ranks(undisturbed, 1, sections, len(curve))[0]
    worst = max(abs(loss - want) for (loss, _), (want, _) in zip(curve, truth, strict=True))
    assert worst <= LOSS_TOLERANCE


def test_reader_joins_pieces_of_any_rectangle(tmp_path):
    """Every rectangle asked of a tensor cut by tp 2 and by ZeRO equals the slice of the whole."""
    run_ranks(travel, 4, tmp_path, 0, {"tp": 2, "dp": 2, "zero_stage": 3, "engine": "deepspeed"}, 2, {})
    reader = CheckpointReader(tmp_path / f"step-{STEPS_PER_LEG:07d}")
    for name in ("weight/embedding.weight", "exp_avg/blocks.1.mlp.down.weight"):
        record = reader.manifest.tensors[name]
        assert len(record.pieces) >= 4
        shape = record.shape
        whole = reader.read(name, Rectangle((0, 0), shape))
        for rows, columns in ((1, 1), (7, 5), (shape[0], 3), (2, shape[1])):
            for start in ((0, 0), (shape[0] - rows, shape[1] - columns), ((shape[0] - rows) // 2, 0)):
                rectangle = Rectangle(start, (rows, columns))
                assert torch.equal(reader.read(name, rectangle), whole[rectangle.slices])
