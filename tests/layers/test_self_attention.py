"""Self-attention with its heads cut over ranks against the whole layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.architecture.architecture import Architecture
from megalite.layers.attention import attend_by_document
from megalite.layers.documents import Documents
from megalite.layers.parts import Parts
from megalite.layers.rope import frequencies, rotation
from megalite.layers.self_attention import SelfAttention
from megalite.parallel.axes import SINGLE, Axis, connect, connect_sharers
from megalite.parallel.mesh import Mesh
from tests.layers.parity import (
    NUM_TOKENS,
    Case,
    assert_equal_to_one_process,
    columns,
    complaints,
    fused_rows,
    rows,
    whole,
)
from tests.layers.small import small_model

BORDERS = torch.tensor([0, 5, 6, 16, NUM_TOKENS])
POSITIONS = torch.cat([torch.arange(n) for n in BORDERS.diff().tolist()])

SETTINGS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped-query": {"num_heads": 8, "num_kv_heads": 4},
    "q and k norm": {"num_heads": 8, "num_kv_heads": 4, "qk_norm": True},
    "q and k norm of all heads": {"num_heads": 8, "num_kv_heads": 4, "qk_norm": "whole"},
    "zero-centered": {"norm": "zero_centered_rmsnorm", "qk_norm": True},
    "zero-centered, all heads": {"norm": "zero_centered_rmsnorm", "qk_norm": "whole"},
    "scale of its own": {"attention_scale": 0.3},
    "one head for all": {"num_kv_heads": 1},
    "two heads for all": {"num_heads": 8, "num_kv_heads": 2, "qk_norm": True},
    "heads shared, norm of all": {"num_kv_heads": 1, "qk_norm": "whole"},
    "heads shared, zero-centered norm of all": {"num_kv_heads": 1, "norm": "zero_centered_rmsnorm", "qk_norm": "whole"},
    "heads shared, biases": {"num_kv_heads": 1, "bias": "all", "sliding_window": 3},
    "bounded scores": {"attention_soft_cap": 2.0, "num_heads": 8, "num_kv_heads": 4},
    "bounded scores in a window": {"attention_soft_cap": 2.0, "sliding_window": 3},
    "qkv bias": {"bias": "qkv"},
    "all biases": {"bias": "all", "num_heads": 8, "num_kv_heads": 4},
    "wide heads": {"head_dim": 12},
    "sliding window": {"sliding_window": 3},
    "window beyond documents": {"sliding_window": 50},
    "partial rotation": {"rope": {"fraction": 0.5}},
    "llama3 scaling": {"rope": {"scaling": {"type": "llama3", "original_max_positions": 8}}},
    "linear scaling": {"rope": {"scaling": {"type": "linear", "factor": 4.0}}},
    "no rotation": {"positions": "learned"},
}


def sharers_of(tp: Axis, num_kv_heads: int) -> Axis:
    return SINGLE if tp.size == 1 else connect_sharers(connect(Mesh(tp=tp.size), tp.rank), num_kv_heads)


def documents_for(model: Architecture) -> Documents:
    rotary = model.positions == "rope"
    turn = rotation(POSITIONS, frequencies(model.rope, model.head_dim)) if rotary else None
    return Documents(POSITIONS, BORDERS.int(), NUM_TOKENS, torch.arange(NUM_TOKENS), turn)


def case(settings: dict[str, Any]) -> Case:
    model = small_model(**settings)
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    qkv = fused_rows(q, kv, kv)

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x, documents_for(model))

    return Case(
        build=lambda axis, sp: SelfAttention(
            model.hidden_size,
            model.blocks[0],
            tp=axis,
            sequence_parallel=sp,
            sharers=sharers_of(axis, model.num_kv_heads),
            attend=Parts(attend=attend_by_document).attend_within(model.blocks[0].attention.soft_cap),
        ),
        cuts={
            "qkv.weight": qkv,
            "qkv.bias": qkv,
            "o.weight": columns,
            "o.bias": whole,
            "q_norm.weight": rows if model.qk_norm == "whole" else whole,
            "k_norm.weight": rows if model.qk_norm == "whole" else whole,
        },
        input_shape=(NUM_TOKENS, model.hidden_size),
        output_shape=(NUM_TOKENS, model.hidden_size),
        run=run,
    )


def check() -> list[str]:
    return complaints({name: case(settings) for name, settings in SETTINGS.items()})


@pytest.mark.parametrize("world_size", [2, 4])
def test_self_attention_equals_one_process(world_size):
    """Output and all gradients are those of the whole layer for grouped-query heads, head norms, biases, windows and
    every form of rotation, with and without sequence parallelism: heads are cut before q, k and v are fused."""
    assert_equal_to_one_process(check, world_size)
