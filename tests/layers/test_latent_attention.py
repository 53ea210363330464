"""Latent attention with its heads cut over ranks against the whole layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.layers.attention import attend_by_document
from megalite.layers.context import own
from megalite.layers.documents import Documents
from megalite.layers.latent_attention import LatentAttention
from megalite.layers.rope import frequencies, rotation
from tests.layers.parity import NUM_TOKENS, Case, assert_equal_to_one_process, columns, complaints, fused_rows, rows
from tests.layers.parity import whole as uncut
from tests.layers.small import small_model

BORDERS = torch.tensor([0, 5, 6, 16, NUM_TOKENS])
POSITIONS = torch.cat([torch.arange(n) for n in BORDERS.diff().tolist()])

MLA = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}

SETTINGS: dict[str, dict[str, Any]] = {
    "both latents": {"mla": MLA},
    "queries of the stream": {"mla": {**MLA, "q_lora_rank": None}},
    "neighbours turn": {"mla": MLA, "rope": {"interleaved": True}},
    "window and bounded scores": {"mla": {**MLA, "v_head_dim": 10}, "sliding_window": 3},
    "zero-centered": {"mla": MLA, "norm": "zero_centered_rmsnorm", "attention_scale": 0.2},
}


def case(settings: dict[str, Any]) -> Case:
    model = small_model(**settings)
    mla, heads = model.mla, model.num_heads
    turn = rotation(POSITIONS, frequencies(model.rope, model.turned_dim))
    documents = Documents(POSITIONS, BORDERS.int(), NUM_TOKENS, torch.arange(NUM_TOKENS), turn)

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x, documents)

    return Case(
        build=lambda axis, sp: LatentAttention(
            model.hidden_size, model.blocks[0], tp=axis, sequence_parallel=sp, attend=attend_by_document, whole=own
        ),
        cuts={
            "q.weight": rows,
            "a.weight": uncut,
            "q_a_norm.weight": uncut,
            "q_b.weight": rows,
            "kv_a_norm.weight": uncut,
            "kv_b.weight": fused_rows(heads * mla.qk_nope_head_dim, heads * mla.v_head_dim),
            "o.weight": columns,
        },
        input_shape=(NUM_TOKENS, model.hidden_size),
        output_shape=(NUM_TOKENS, model.hidden_size),
        run=run,
    )


def check() -> list[str]:
    return complaints({name: case(settings) for name, settings in SETTINGS.items()})


@pytest.mark.parametrize("world_size", [2, 4])
def test_latent_attention_equals_one_process(world_size):
    """Output and all gradients are those of the whole layer, with and without sequence parallelism: heads are cut
    before keys and values are fused, latents are not."""
    assert_equal_to_one_process(check, world_size)
