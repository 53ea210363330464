"""Stages of tiny models, filled with fresh weights, and streams to run them on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.fill import fill_model
from megalite.config.plan import split_blocks
from megalite.config.schema import BatchConfig, ModelConfig
from megalite.data.loader import Batch
from megalite.engine.batch_cut import documents_of_batch
from megalite.engine.steps import targets_of_batch
from megalite.layers.attention_blocks import attend_in_blocks
from megalite.layers.norm import LayerNorm, RMSNorm
from megalite.layers.parts import Parts
from megalite.layers.weight_gradients import TakeGradient
from megalite.model.initialize import FreshWeights, fill, local_weights
from megalite.model.spec import ChunkSpec, StageSpec
from megalite.model.transformer import Stage
from megalite.parallel.axes import SINGLE, Axis, connect
from megalite.parallel.mesh import Mesh
from tests.kit.batches import micro_batch

SEQ_LEN, VOCAB = 16, 101
SIZES = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": VOCAB,
    "init_std": 0.2,
}
"""Weights wide enough that all of the model matters to the logits."""

LATENTS = {
    "norm_eps": 1e-6,
    "rope": {"interleaved": True},
    "mla": {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
    },
}
GPT_STYLE = {"norm": "layernorm", "activation": "gelu_tanh", "bias": "all", "positions": "learned"}


def tiny_model(**settings: Any) -> ModelConfig:
    """A filled model that tp 4 divides."""
    return fill_model(ModelConfig(**{**SIZES, **settings}), BatchConfig(seq_len=SEQ_LEN))


def tensor_axis() -> Axis:
    """The whole world as the tensor-parallel axis."""
    return connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp


def make_stage(
    model: ModelConfig,
    *,
    tp: Axis = SINGLE,
    dtype: torch.dtype = torch.float64,
    pp: int = 1,
    pp_rank: int = 0,
    mlp_chunk_tokens: int | None = None,
    take_gradient: TakeGradient | None = None,
    **spec: Any,
) -> Stage:
    """A stage of the model with the weights of seed 1."""
    norm = LayerNorm if model.norm == "layernorm" else RMSNorm
    blocks = split_blocks((1.0,) * model.num_layers, pp, head_cost=0)[pp_rank]
    stage = Stage(
        StageSpec(
            model,
            (ChunkSpec(blocks, is_first=pp_rank == 0, is_last=pp_rank == pp - 1),),
            tp=tp,
            parts=Parts(
                norm=norm, attend=attend_in_blocks, mlp_chunk_tokens=mlp_chunk_tokens, take_gradient=take_gradient
            ),
            **spec,
        )
    ).to(dtype)
    fill(stage, FreshWeights(model, 1))
    return stage


def make_batch(first: int = 0, count: int = 2) -> Batch:
    """Sequences of random packed documents with uneven loss masks."""
    return micro_batch(range(first, first + count), seq_len=SEQ_LEN, vocab_size=VOCAB)


def run_stage(stage: Stage, batch: Batch) -> Tensor:
    """The loss of a whole model on a micro-batch."""
    return stage(batch.tokens, documents_of_batch(batch), targets_of_batch(batch))


def gradients(stage: Stage) -> dict[str, Tensor]:
    """This rank's part of every canonical weight's gradient, by name."""
    own = dict(stage.named_parameters())
    return {local.weight.name: local.view(own[local.parameter_name].grad) for local in local_weights(stage)}
