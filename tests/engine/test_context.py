"""Context parallelism trains like plain PyTorch: 12 steps of a plain model on two ranks and 6 of all others, in every
kind of layout."""

from __future__ import annotations

import pytest

from tests.engine.test_layouts import (
    ACCUM,
    FEW,
    FEWER_STEPS,
    FULL,
    GROUPED,
    ODD,
    ONE_KV_HEAD,
    SELECTIVE,
    TIED,
    compare,
    compare_dense,
    layout,
)

ULYSSES, RING = "ulysses", "ring"

CASES = {
    2: [
        *(layout(cp=2, zero_stage=stage) for stage in range(4)),
        *(layout(cp=2, cp_kind=ULYSSES, zero_stage=stage) for stage in range(4)),
        layout(engine="deepspeed", cp=2, more={**TIED, **FULL}),
        layout(cp=2, more={**GROUPED, **SELECTIVE}),
        layout(cp=2, more={**TIED, **FULL}),
        layout(cp=2, more={**ONE_KV_HEAD, **ACCUM}),
        layout(cp=2, cp_kind=ULYSSES, more={**GROUPED, **SELECTIVE}),
        layout(cp=2, cp_kind=ULYSSES, more={**ONE_KV_HEAD, **FULL}),
        layout(cp=2, cp_kind=ULYSSES, more=TIED),
        *(layout(cp=2, cp_kind=RING, zero_stage=stage) for stage in (0, 3)),
        layout(cp=2, cp_kind=RING, more={**GROUPED, **SELECTIVE}),
        layout(cp=2, cp_kind=RING, more={**ONE_KV_HEAD, **FULL}),
        layout(cp=2, pad_tokens=True, zero_stage=2, more=ODD),
        layout(cp=2, cp_kind=ULYSSES, pad_tokens=True, more=ODD),
    ],
    4: [
        layout(cp=4),
        layout(cp=4, more={**ONE_KV_HEAD, **FULL}),
        layout(cp=4, cp_kind=ULYSSES, more={**ONE_KV_HEAD, **SELECTIVE}),
        layout(cp=4, cp_kind=ULYSSES, zero_stage=3, engine="deepspeed"),
        layout(cp=4, cp_kind=RING, more=GROUPED),
        layout(cp=4, cp_kind=RING, pad_tokens=True, more=ODD),
        layout(cp=2, tp=2, sequence_parallel=True, pad_tokens=True, more={**ODD, **FULL}),
        layout(cp=2, tp=2, sequence_parallel=True, cp_kind=RING, zero_stage=2, more={**FEW, **TIED}),
        layout(cp=2, pp=2, schedule="zb-h1", cp_kind=RING, more=SELECTIVE),
        *(layout(cp=2, dp=2, zero_stage=stage, more=TIED) for stage in range(4)),
        layout(cp=2, dp=2, cp_kind=ULYSSES, zero_stage=2, more=GROUPED),
        layout(cp=2, tp=2, zero_stage=0, more={**GROUPED, **FEW}),
        layout(cp=2, tp=2, sequence_parallel=True, more={**TIED, **FEW, **SELECTIVE}),
        layout(cp=2, tp=2, sequence_parallel=True, zero_stage=3, engine="deepspeed", more=FEW),
        layout(cp=2, tp=2, sequence_parallel=True, more={**ONE_KV_HEAD, **FEW}),
        layout(cp=2, tp=2, cp_kind=ULYSSES, more={**ONE_KV_HEAD, **FEW}),
        layout(cp=2, tp=2, cp_kind=RING, more={**ONE_KV_HEAD, **FEW}),
        layout(cp=2, tp=2, sequence_parallel=True, cp_kind=ULYSSES, more={**FEW, **FULL}),
        layout(cp=2, pp=2, more={**TIED, **ACCUM}),
        layout(cp=2, pp=2, schedule="zb-v", cp_kind=ULYSSES, more={**GROUPED, **SELECTIVE}),
        layout(cp=2, pp=2, schedule="interleaved", zero_stage=0, more=FULL),
    ],
    8: [layout(cp=2, pp=2, tp=2, sequence_parallel=True, schedule="zb-h1", more={**TIED, **FEW})],
}


@pytest.mark.parametrize("world_size", CASES)
def test_layouts_equal_plain_pytorch(world_size):
    """Loss to 1e-5 and gradient norm to 1e-4 over clipped steps, with documents that cross the cuts."""
    compare_dense(CASES[world_size], world_size)


def test_layouts_over_gloo():
    """Over the network that CPUs train over."""
    compare([layout(cp=2), layout(cp=2, cp_kind=ULYSSES), layout(cp=2, cp_kind=RING)], 2, FEWER_STEPS, backend="gloo")
