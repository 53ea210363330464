"""Masters and optimizer state in the host's memory: the same bits as beside the weights, for every optimizer."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.test_optimizers import LR, STEPS, case
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

LAYOUTS = [{"dp": 2}, {"dp": 2, "zero_stage": 0}, {"pp": 2}]
OPTIMIZERS = ["adamw", *LR]


def sections(name: str, *, offload: bool, dtype: str = "fp32", **parallel: Any) -> dict[str, Any]:
    """Of a tiny run, clipped by blocks, whose sums over ranks are the host's then too."""
    found = case(name if name in LR else "sgd", **parallel)
    own = {"offload": offload, "clip": {"by": "layer", "threshold": 0.3}}
    if name not in LR:
        found["optimizer"] = {"name": name, "lr": 2e-3}
    return {**found, "optimizer": {**found["optimizer"], **own}, "precision": {"dtype": dtype}}


def trained(cases: list[dict[str, Any]]) -> list[tuple[list[tuple[float, float]], list[torch.Tensor], bool]]:
    """Curve, weights and state of each run, and whether masters lie beside what computes."""
    found = []
    for each in cases:
        rank = start_rank(tiny_config(**each))
        curve = rank.train(0, STEPS)
        state = [tensor.clone() for part in rank.engine.slices() for tensor in part.tensors.values()]
        weights = {parameter.data.untyped_storage().data_ptr() for parameter in rank.engine.stage.parameters()}
        masters = {part.tensors["weight"].untyped_storage().data_ptr() for part in rank.engine.slices()}
        found.append((curve, state, bool(weights & masters)))
        rank.engine.close()
    return found


def test_the_same_bits():
    """Losses, norms, masters and state, with every optimizer in fp32 and AdamW in bf16."""
    kinds = [(name, "fp32", layout) for name in OPTIMIZERS for layout in LAYOUTS[:1]]
    kinds += [("adamw", dtype, layout) for dtype in ("fp32", "bf16") for layout in LAYOUTS[1:]]
    cases = [
        sections(name, offload=offload, dtype=dtype, **layout)
        for name, dtype, layout in kinds
        for offload in (False, True)
    ]
    for rank in run_ranks(trained, 2, cases):
        for number, kind in enumerate(kinds):
            (curve, state, _), (again, there, is_shared) = rank[2 * number : 2 * number + 2]
            assert again == curve, kind
            assert len(state) == len(there) > 0, kind
            assert all(torch.equal(a, b) for a, b in zip(state, there, strict=True)), kind
            assert not is_shared, kind
