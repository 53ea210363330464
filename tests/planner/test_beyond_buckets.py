"""Models of which DeepSpeed's ZeRO-3 cannot have all weights at once, nor one gradient in its bucket: what a step takes
where single weights are larger than either bound, as those of 500B are."""

from __future__ import annotations

import pytest

from megalite.engine.deepspeed import config as deepspeed
from tests.kit.spawn import run_ranks
from tests.planner.measured import Case, measure_rank, planned

BOUNDS = {"GATHERED_ELEMENTS": 10**5, "PREFETCHED_ELEMENTS": 5000, "BUCKET_ELEMENTS": 20_000}
WIDE = {"hidden_size": 512, "num_heads": 8, "ffn_hidden_size": 2048, "vocab_size": 1024, "num_layers": 3}
DIVIDED = {"dp": 2, "zero_stage": 3, "engine": "deepspeed"}
MOST = 0.05


def case(recompute: str, dtype: str, seq_len: int) -> Case:
    sections = {
        "model": WIDE,
        "batch": {"seq_len": seq_len, "global_batch_size": 8},
        "parallel": DIVIDED,
        "precision": {"dtype": dtype},
        "train": {"recompute": recompute},
    }
    return Case(f"{recompute} {dtype} {seq_len}", 2, sections)


CASES = [
    case("none", "bf16", 256),  # its activations take most, beside which there is no room for weights
    case("none", "fp32", 256),
    case("selective", "bf16", 256),
    case("full", "fp32", 512),
    case("full", "bf16", 32),  # its update takes most
]


@pytest.mark.parametrize("each", CASES, ids=[each.name for each in CASES])
def test_tensors_at_the_peak_are_as_planned(each: Case, monkeypatch: pytest.MonkeyPatch):
    """Without a moment in which all weights are there: what is kept for the backward pass has none of them."""
    for name, bound in BOUNDS.items():
        monkeypatch.setattr(deepspeed, name, bound)
    (expected,) = planned(each)
    off = [expected / taken - 1 for _, taken in run_ranks(_within_bounds, each.ranks, each)]
    assert max(map(abs, off)) < MOST


def _within_bounds(each: Case) -> tuple[int, int]:
    for name, bound in BOUNDS.items():
        setattr(deepspeed, name, bound)
    return measure_rank(each)
