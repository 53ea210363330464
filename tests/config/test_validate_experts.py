"""What validation says of experts that cannot be."""

from __future__ import annotations

import pytest

from megalite.config.schema import Config
from tests.config.configs import complaints, config

CONFLICTS = {
    "experts over replicas": (
        config(parallel={"dp": 3, "ep": 2}, model={"moe": {"num_experts": 8}}, batch={"global_batch_size": 3}),
        3,
        "parallel.ep: experts are divided among the replicas, and dp x cp = 3 x 1 is not divisible by ep=2; use ep=1, "
        "or dp=2 or 4",
    ),
    "experts over ranks": (
        config(parallel={"dp": 4, "ep": 4}, model={"moe": {"num_experts": 6}}, batch={"global_batch_size": 4}),
        4,
        "parallel.ep: num_experts=6 is not divisible by ep=4; use ep=1 or 2",
    ),
    "experts under DeepSpeed": (
        config(
            parallel={"dp": 2, "ep": 2, "zero_stage": 3, "engine": "deepspeed"},
            model={"moe": {}},
            batch={"global_batch_size": 2},
        ),
        2,
        "parallel.ep: DeepSpeed has all experts on each rank here; use ep=1, or engine=native with zero_stage=1 or "
        "engine=fsdp2 with zero_stage=3 for ep=2",
    ),
    "ranks for experts that are not": (
        config(parallel={"dp": 2, "ep": 2}, batch={"global_batch_size": 2}),
        2,
        "parallel.ep: found 2, but it has no effect with moe=null; leave it at 1",
    ),
    "more experts than there are": (
        config(model={"moe": {"num_experts": 4, "top_k": 5}}),
        1,
        "model.moe.top_k: a token cannot go to 5 of num_experts=4; use 4 or less",
    ),
    "one expert of weight 1": (
        config(model={"moe": {"top_k": 1}}),
        1,
        "model.moe.normalize: with top_k=1 a token's weight is always 1, and its router learns nothing from the loss; "
        "use false",
    ),
    "no sparse block": (
        config(model={"num_layers": 2, "moe": {"first_dense": 2}}),
        1,
        "model.moe: first_dense=2 and every=1 leave none of num_layers=2 blocks for experts; use less, or moe=null",
    ),
    "groups of experts": (
        config(model={"moe": {"num_experts": 8, "num_groups": 3}}),
        1,
        "model.moe.num_groups: 8 experts are not 3 equal groups; use 1, 2, 4 or 8",
    ),
    "too few groups": (
        config(model={"moe": {"num_experts": 8, "top_k": 3, "num_groups": 4}}),
        1,
        "model.moe.top_k: top_groups=1 groups of 2 experts leave fewer than 3 to choose from; use top_k=2 or less, or "
        "top_groups=2",
    ),
    "groups of none": (
        config(model={"moe": {"top_groups": 2}}),
        1,
        "model.moe.top_groups: found 2, but it has no effect with num_groups=1; leave it at 1",
    ),
    "a gate of nothing": (
        config(model={"moe": {"shared_gate": True}}),
        1,
        "model.moe.shared_gate: has no effect with shared_ffn_hidden_size=0; take it out",
    ),
    "a loss that is off": (
        config(model={"moe": {"aux_loss_over": "sequence"}}),
        1,
        "model.moe.aux_loss_over: found sequence, but it has no effect with aux_loss=0; leave it at global_batch",
    ),
    "biases of experts": (
        config(model={"bias": "all", "moe": {"shared_ffn_hidden_size": 16}}),
        1,
        "model.bias: an MLP that all tokens go through has none here; use bias=attention, or no shared MLP",
    ),
    "chunks of experts": (
        config(model={"moe": {}}, train={"steps": 10, "mlp_chunk_tokens": 5}),
        1,
        "train.mlp_chunk_tokens: experts have their tokens all at once; use null, or a model without experts",
    ),
    "experts over tp": (
        config(model={"moe": {"ffn_hidden_size": 33}}, parallel={"tp": 2}),
        2,
        "model.moe.ffn_hidden_size: 33 is not divisible by tp=2; use 32 or 34, or tp=1, 3, 11 or 33",
    ),
    "layers of experts": (
        config(
            parallel={"dp": 2, "ep": 2, "zero_stage": 0},
            model={"moe": {}},
            batch={"global_batch_size": 2},
            optimizer={"clip": {"by": "layer", "threshold": 1.0}},
        ),
        2,
        "optimizer.clip.by: layer needs the experts of all ranks together, as zero_stage=1 has them; use that",
    ),
    "noise of experts": (
        config(
            parallel={"dp": 2, "ep": 2},
            model={"moe": {}},
            batch={"global_batch_size": 4, "micro_batch_size": 1, "noise_scale": {}},
        ),
        2,
        "batch.noise_scale: with ep=2 an expert's gradient is of several ranks' micro-batches, and cannot be measured "
        "for each; use null, or ep=1",
    ),
    "one scale for all tokens": (
        config(model={"moe": {}}, precision={"fp8": {"backend": "emulate"}}),
        1,
        "precision.fp8.recipe: current has one scale for all tokens that an expert gets, whatever ranks they come "
        "from; use rowwise, block or mxfp8",
    ),
    "experts in layers of another library": (
        config(model={"moe": {}, "num_layers": 2}, precision={"fp8": {"backend": "te", "recipe": "block"}}),
        1,
        "precision.fp8.backend: te has layers of its own, and the experts of a block lie in one matrix; use "
        "backend=scaled_mm with recipe=rowwise, or emulate",
    ),
    "room for all": (
        config(model={"moe": {"num_experts": 8, "top_k": 2, "capacity_factor": 4.5}}),
        1,
        "model.moe.capacity_factor: 4.5 times an even share, top_k=2 of num_experts=8, is room for all tokens: nothing "
        "would be dropped; use less than 4, or null",
    ),
}


@pytest.mark.parametrize(("checked", "world_size", "complaint"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict(checked: Config, world_size: int, complaint: str):
    """Each conflict alone gives this one sentence."""
    assert complaints(checked, world_size) == (complaint,)
