"""Every layout trains like plain PyTorch: loss and gradient norm against transformers, over 12 steps of a plain model
on one and two ranks, and 6 of all others."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.engine.plain_curves import Curve, plain_curves
from tests.kit.spawn import run_ranks
from tests.kit.train import tiny_config, train

STEPS = 12
FEWER_STEPS = 6
"""Of models, settings and worlds whose engines and optimizer are those of the others: what is their own differs from
the first step on, or from the second. Three warm up, and three decay."""
LINEAR = torch.nn.functional.linear
LOSS_TOLERANCE = 1e-5
"""fp32 sums in another order, over 12 steps at a high learning rate."""
NORM_TOLERANCE = 1e-4
"""Relative."""


FEW = {"batch": {"micro_batch_size": 4}}
"""Two micro-batches a step in place of four: under tp and cp each costs some twenty collectives, and these the time."""


def layout(**parallel):
    """A named case: parallel settings, and under `more` other sections. Where blocks are computed again, which takes a
    block four times as long, or ranks cut a sequence, two micro-batches a step are enough."""
    more = parallel.pop("more", {})
    is_slow = "cp" in parallel or more.get("train", {}).get("recompute", "none") != "none"
    if is_slow and "batch" not in more and not {"dp", "pp"} & parallel.keys():
        more = {**more, **FEW}
    return {"parallel": {"zero_stage": 1, **parallel}, **more}


TIED = {"model": {"tie_embeddings": True}}
ODD = {"batch": {"micro_batch_size": 1, "global_batch_size": 3, "seq_len": 15}}
"""Tokens that no layout divides."""

ACCUM = {"batch": {"micro_batch_size": 1}}
SIX = {"batch": {"micro_batch_size": 1, "global_batch_size": 6}}
FIVE = {"batch": {"micro_batch_size": 1, "global_batch_size": 5}}
DEEP = {"model": {"num_layers": 8}}
DEEP_TIED = {"model": {"num_layers": 8, "tie_embeddings": True}}
SELECTIVE, FULL = {"train": {"recompute": "selective"}}, {"train": {"recompute": "full"}}
CHUNKS = {"train": {"mlp_chunk_tokens": 5, "recompute": "full", "offload_activations": True}}
ONE_KV_HEAD = {"model": {"num_kv_heads": 1}}
GROUPED = {"model": {"num_kv_heads": 2, "qk_norm": True}}

EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}


def experts(**moe):
    """A model with experts."""
    qk_norm = moe.pop("qk_norm", False)
    return {"model": {"moe": {**EXPERTS, **moe}, "qk_norm": qk_norm}}


MIXTRAL = experts(aux_loss=0.02, z_loss=0.01)
BY_SEQUENCE = experts(aux_loss=0.02, aux_loss_over="sequence", qk_norm=True, normalize=False, num_experts=8)
FSDP2 = {"engine": "fsdp2", "zero_stage": 3}
WITH_DROPS = experts(aux_loss=0.02, capacity_factor=0.75, qk_norm=True)
BY_MICRO_BATCH = experts(aux_loss=0.02, aux_loss_over="micro_batch")
SHARED = experts(shared_ffn_hidden_size=16, shared_gate=True, top_k=1, normalize=False)

CASES = {
    1: [
        layout(zero_stage=0),
        layout(),
        layout(zero_stage=2),
        layout(zero_stage=3, engine="deepspeed"),
        layout(engine="deepspeed", zero_stage=0),
        layout(engine="deepspeed", more=TIED),
        layout(more=TIED),
        layout(more=GROUPED),
        layout(more={"batch": {"micro_batch_size": 8}}),
        layout(more={"train": {"recompute": "selective"}}),
        layout(more={"train": {"recompute": "full"}}),
        layout(zero_stage=2, more={**TIED, **CHUNKS}),
        layout(more={"train": {"mlp_chunk_tokens": 7}}),
    ],
    2: [
        *(layout(dp=2, zero_stage=stage) for stage in range(4)),
        layout(dp=2, more={**TIED, "train": {"recompute": "full"}}),
        layout(engine="deepspeed", dp=2, zero_stage=0),
        layout(engine="deepspeed", dp=2),
        layout(tp=2, zero_stage=0),
        *(layout(tp=2, zero_stage=stage, more=FEW) for stage in range(1, 4)),
        layout(engine="deepspeed", tp=2, sequence_parallel=True, more=FEW),
        layout(tp=2, sequence_parallel=True, more=FEW),
        layout(tp=2, sequence_parallel=True, more={**TIED, **FEW, "train": {"recompute": "selective"}}),
        layout(tp=2, more={**GROUPED, **FEW, "train": {"recompute": "full"}}),
        layout(tp=2, sequence_parallel=True, more={**GROUPED, **FEW}),
        layout(tp=2, zero_stage=2, more={**ONE_KV_HEAD, **FEW, **SELECTIVE}),
        layout(tp=2, sequence_parallel=True, more={**ONE_KV_HEAD, **FEW, **FULL}),
        layout(tp=2, sequence_parallel=True, pad_tokens=True, zero_stage=2, more=ODD),
        layout(dp=2, zero_stage=3, engine="deepspeed", more={**TIED, "train": {"recompute": "selective"}}),
        layout(dp=2, zero_stage=3, engine="deepspeed", more={"train": {"recompute": "full"}}),
        layout(pp=2, zero_stage=0),
        layout(pp=2),
        layout(pp=2, more=TIED),
        layout(pp=2, zero_stage=0, more=TIED),
        layout(pp=2, more={**ACCUM, "train": {"recompute": "full"}}),
        layout(pp=2, blocks_per_stage=[4, 0]),
        layout(pp=2, blocks_per_stage=[1, 3], more=TIED),
        layout(pp=2, schedule="interleaved", more=TIED),
        layout(pp=2, schedule="interleaved", zero_stage=0, blocks_per_chunk=[1, 2, 1, 0], more={**FIVE, **FULL}),
        layout(pp=2, schedule="zb-h1", zero_stage=0, more=SELECTIVE),
        layout(pp=2, schedule="zb-h1", more={**TIED, **FULL}),
        layout(pp=2, schedule="zb-v", more=TIED),
        layout(pp=2, schedule="zb-v", more={**TIED, **CHUNKS}),
        layout(dp=2, zero_stage=3, engine="deepspeed", more={**TIED, **CHUNKS}),
        layout(pp=2, schedule="zb-v", zero_stage=0, more={**FIVE, **FULL}),
        layout(pp=2, schedule="dualpipe-v", zero_stage=0, more={**TIED, **SELECTIVE}),
        layout(pp=2, schedule="dualpipe-v", more=FIVE),
    ],
    3: [layout(dp=3, zero_stage=stage, more={**TIED, **SIX}) for stage in range(4)],  # which leaves padding behind
    4: [
        layout(tp=4, more=FEW),
        layout(tp=4, sequence_parallel=True, more={**TIED, **FEW}),
        layout(tp=4, more={**GROUPED, **FEW}),
        layout(tp=2, dp=2, sequence_parallel=True, more={**FEW, **CHUNKS}),
        layout(pp=2, tp=2, schedule="zb-v", more={**ONE_KV_HEAD, **FEW}),
        layout(pp=2, tp=2, sequence_parallel=True, pad_tokens=True, more={**ODD, **TIED}),
        layout(dp=4, zero_stage=2, more=ACCUM),
        layout(dp=4, zero_stage=3, engine="deepspeed"),
        layout(dp=4, more={**TIED, **ACCUM}),
        layout(pp=4),
        layout(pp=4, blocks_per_stage=[1, 2, 1, 0], more={**TIED, **ACCUM}),
        layout(tp=2, dp=2, zero_stage=3, engine="deepspeed", sequence_parallel=True),
        layout(tp=2, dp=2, zero_stage=2, more=TIED),
        layout(pp=2, tp=2, sequence_parallel=True, more=TIED),
        layout(pp=2, dp=2, zero_stage=0, more=TIED),
        layout(pp=2, dp=2),
        layout(pp=4, schedule="interleaved", more={**DEEP_TIED, **ACCUM}),
        layout(pp=4, schedule="zb-h1", more={**TIED, **SELECTIVE}),
        layout(pp=4, schedule="zb-v", more={**DEEP_TIED, **SELECTIVE}),
        layout(pp=4, schedule="dualpipe-v", zero_stage=0, more={**DEEP, **ACCUM}),
        layout(pp=2, dp=2, schedule="interleaved", zero_stage=0, more={**TIED, **SELECTIVE}),
        layout(pp=2, dp=2, schedule="zb-h1", more=FULL),
        layout(pp=2, dp=2, schedule="dualpipe-v", more={**TIED, **ACCUM, **FULL}),
        layout(pp=2, tp=2, schedule="interleaved", more=FEW),
        layout(pp=2, tp=2, schedule="zb-h1", sequence_parallel=True, more={**GROUPED, **FEW}),
        layout(pp=2, tp=2, schedule="zb-v", sequence_parallel=True, more={**TIED, **FEW, **SELECTIVE}),
    ],
    8: [
        layout(pp=2, dp=2, tp=2, sequence_parallel=True, more={"train": {"recompute": "selective"}}),
        layout(pp=2, dp=2, tp=2, schedule="zb-v", more=TIED),
    ],
}

SPARSE = {
    1: [
        layout(more=MIXTRAL),
        layout(more=BY_SEQUENCE),
        layout(more={**BY_MICRO_BATCH, **FULL}),
        layout(zero_stage=0, more={**SHARED, **SELECTIVE}),
        layout(engine="deepspeed", more=MIXTRAL),
        layout(zero_stage=3, engine="deepspeed", more=SHARED),
    ],
    2: [
        layout(dp=2, more=MIXTRAL),
        layout(dp=2, ep=2, more=MIXTRAL),
        layout(dp=2, ep=2, zero_stage=0, more={**BY_SEQUENCE, **FULL}),
        layout(dp=2, ep=2, more={**SHARED, **SELECTIVE}),
        layout(cp=2, ep=2, more=BY_SEQUENCE),
        layout(tp=2, more={**MIXTRAL, **FEW}),
        layout(tp=2, sequence_parallel=True, more={**BY_SEQUENCE, **FEW, **FULL}),
        layout(tp=2, sequence_parallel=True, more={**SHARED, **FEW, **SELECTIVE}),
        layout(engine="deepspeed", dp=2, zero_stage=2, more=BY_MICRO_BATCH),
        layout(dp=2, zero_stage=3, engine="deepspeed", more=MIXTRAL),
        layout(pp=2, schedule="zb-v", more=MIXTRAL),
        layout(pp=2, schedule="interleaved", more={**SHARED, **FULL}),
    ],
    4: [
        layout(dp=4, ep=4, more={**BY_SEQUENCE, **ACCUM}),
        layout(dp=4, ep=2, more=MIXTRAL),
        layout(dp=4, ep=2, zero_stage=0, more={**SHARED, **ACCUM}),
        layout(dp=2, ep=2, tp=2, more={**MIXTRAL, **FEW}),
        layout(dp=2, ep=2, tp=2, sequence_parallel=True, more={**BY_SEQUENCE, **FEW, **SELECTIVE}),
        layout(dp=2, cp=2, ep=4, more=MIXTRAL),
        layout(dp=2, ep=2, pp=2, schedule="zb-v", more=BY_MICRO_BATCH),
        layout(dp=2, ep=2, pp=2, schedule="zb-h1", more={**SHARED, **FULL}),
        layout(tp=2, pp=2, sequence_parallel=True, more={**BY_SEQUENCE, **FEW}),
    ],
}

MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}


def latent(moe: dict | None = None, mtp: int = 0, **mla):
    """A model with latent attention."""
    model = {"num_kv_heads": None, "norm_eps": 1e-6, "rope": {"interleaved": True}, "mla": {**MLA, **mla}}
    model |= {} if moe is None else {"moe": {**EXPERTS, **moe}}
    return {"model": {**model, "mtp": {"num_layers": mtp, "loss_weight": 0.3}} if mtp else model}


BY_BIAS = {"scores": "sigmoid", "bias_rate": 0.01, "shared_ffn_hidden_size": 64, "first_dense": 1, "scale": 2.5}
DEEPSEEK = latent({**BY_BIAS, "num_experts": 8, "num_groups": 4, "top_groups": 2, "group_score": "sum_of_two"})
BOTH_WAYS = latent({**BY_BIAS, "aux_loss": 0.01, "aux_loss_over": "sequence"}, v_head_dim=20)
ONE_FURTHER, TWO_FURTHER = latent(BY_BIAS, mtp=1), latent({**BY_BIAS, "first_dense": 0}, mtp=2)
DENSE, LITE = latent(), latent(q_lora_rank=None)

FURTHER_DROPS = latent({**BY_BIAS, "capacity_factor": 0.75}, mtp=2)
DROPPING = {
    1: [
        layout(more=WITH_DROPS),
        layout(more={**WITH_DROPS, **FULL}),
        layout(**FSDP2, more={**WITH_DROPS, **SELECTIVE}),
    ],
    2: [
        layout(dp=2, ep=2, more=WITH_DROPS),
        layout(cp=2, ep=2, more={**WITH_DROPS, **FULL}),
        layout(tp=2, sequence_parallel=True, more={**WITH_DROPS, **FEW}),
        layout(dp=2, ep=2, **FSDP2, more={**WITH_DROPS, **SELECTIVE}),
        layout(pp=2, schedule="zb-v", more=WITH_DROPS),
        layout(pp=2, more=FURTHER_DROPS),
        layout(cp=2, ep=2, pad_tokens=True, more={**FURTHER_DROPS, **FULL}),
    ],
    4: [
        layout(dp=2, ep=2, tp=2, sequence_parallel=True, more={**WITH_DROPS, **FEW, **SELECTIVE}),
        layout(cp=2, ep=2, tp=2, sequence_parallel=True, more={**WITH_DROPS, **FEW}),
        layout(dp=2, cp=2, ep=4, more=WITH_DROPS),
    ],
}

FURTHER = {
    1: [
        layout(more=TWO_FURTHER),
        layout(zero_stage=0, more={**ONE_FURTHER, **FULL}),
        layout(zero_stage=3, engine="deepspeed", more={**TWO_FURTHER, **SELECTIVE}),
        layout(more={**ONE_FURTHER, "model": {**ONE_FURTHER["model"], "tie_embeddings": True}}),
    ],
    2: [
        layout(dp=2, ep=2, more={**TWO_FURTHER, **ACCUM}),
        layout(engine="deepspeed", dp=2, more=ONE_FURTHER),
        layout(tp=2, more={**ONE_FURTHER, **FEW}),
        layout(tp=2, sequence_parallel=True, more={**TWO_FURTHER, **FEW}),
        layout(cp=2, more=TWO_FURTHER),
        layout(cp=2, cp_kind="ring", more={**ONE_FURTHER, **SELECTIVE}),
        layout(pp=2, schedule="zb-v", more=TWO_FURTHER),
        layout(pp=2, schedule="dualpipe-v", zero_stage=0, more={**ONE_FURTHER, **FULL}),
        layout(pp=2, schedule="zb-v", more={"model": {**ONE_FURTHER["model"], "tie_embeddings": True}}),
        layout(pp=2, more=TWO_FURTHER),
        layout(pp=2, zero_stage=0, more={"model": {**TWO_FURTHER["model"], "tie_embeddings": True}, **FULL}),
        layout(pp=2, schedule="interleaved", more={**ONE_FURTHER, **SELECTIVE}),
        layout(pp=2, schedule="zb-h1", blocks_per_stage=[3, 1], more=ONE_FURTHER),
    ],
    4: [
        layout(pp=4, schedule="zb-h1", more={**TWO_FURTHER, **ACCUM}),
        layout(pp=2, tp=2, sequence_parallel=True, more={**TWO_FURTHER, **FEW}),
        layout(pp=2, dp=2, ep=2, more={"model": {**ONE_FURTHER["model"], "tie_embeddings": True}}),
    ],
}

LATENT = {
    1: [
        layout(more=DEEPSEEK),
        layout(zero_stage=0, more={**BOTH_WAYS, **FULL}),
        layout(zero_stage=2, more={**DENSE, **SELECTIVE}),
        layout(zero_stage=3, engine="deepspeed", more=LITE),
    ],
    2: [
        layout(dp=2, ep=2, more=DEEPSEEK),
        layout(tp=2, more={**DENSE, **FEW}),
        layout(tp=2, more={**LITE, **FEW, **FULL}),
        layout(tp=2, sequence_parallel=True, more={**DEEPSEEK, **FEW, **SELECTIVE}),
        layout(tp=2, sequence_parallel=True, zero_stage=2, more={**LITE, **FEW}),
        layout(tp=2, sequence_parallel=True, zero_stage=0, more={**DENSE, **FEW, **FULL}),
        *(layout(cp=2, cp_kind=kind, more=BOTH_WAYS) for kind in ("allgather", "ring", "ulysses")),
        layout(cp=2, more={**LITE, **SELECTIVE}),
        layout(pp=2, schedule="zb-v", more=BOTH_WAYS),
    ],
    4: [
        layout(dp=2, ep=2, tp=2, sequence_parallel=True, more={**DEEPSEEK, **FEW, **FULL}),
        layout(dp=2, cp=2, ep=4, more=DEEPSEEK),
        layout(cp=2, tp=2, sequence_parallel=True, more={**LITE, **FEW}),
        layout(dp=2, tp=2, zero_stage=3, engine="deepspeed", more={**DENSE, **FEW}),
        layout(dp=2, ep=2, pp=2, schedule="zb-h1", more={**DEEPSEEK, **SELECTIVE}),
    ],
}
DIVIDED = {
    1: [layout(**FSDP2), layout(**FSDP2, more={**TIED, **FULL})],
    2: [
        layout(dp=2, **FSDP2),
        layout(dp=2, **FSDP2, more={**TIED, **SELECTIVE, **ACCUM}),
        layout(dp=2, **FSDP2, more={**GROUPED, **CHUNKS}),
        layout(cp=2, **FSDP2, more=FULL),
        layout(tp=2, sequence_parallel=True, **FSDP2, more=FEW),
        layout(dp=2, ep=2, **FSDP2, more=BY_SEQUENCE),
        layout(dp=2, ep=2, **FSDP2, more={**DEEPSEEK, **FULL}),
        layout(dp=2, **FSDP2, more={**SHARED, **SELECTIVE}),
        layout(dp=2, **FSDP2, more=TWO_FURTHER),
    ],
    3: [layout(dp=3, **FSDP2, more={**TIED, **SIX})],
    4: [
        layout(dp=4, **FSDP2, more=ACCUM),
        layout(tp=2, dp=2, **FSDP2, more=TIED),
        layout(dp=4, ep=2, **FSDP2, more=MIXTRAL),
        layout(dp=4, dp_replicate=2, **FSDP2, more={**TIED, **ACCUM}),
        layout(dp=2, tp=2, dp_replicate=2, **FSDP2, more={**GROUPED, **FEW}),
        layout(dp=2, cp=2, dp_replicate=2, **FSDP2, more=SHARED),
        layout(dp=2, ep=2, tp=2, sequence_parallel=True, **FSDP2, more={**DEEPSEEK, **FEW}),
        layout(dp=2, cp=2, ep=4, **FSDP2, more={**BY_SEQUENCE, **SELECTIVE}),
    ],
}

GPT_OSS = {
    "model": {
        "activation": "swiglu_clamped",
        "bias": "all",
        "num_kv_heads": 2,
        "attention_sinks": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "moe": {**EXPERTS, "logit_bias": True, "aux_loss": 0.02, "aux_loss_over": "sequence"},
    }
}
SINKS = {
    1: [
        layout(more=GPT_OSS),
        layout(zero_stage=3, engine="deepspeed", more={**GPT_OSS, **SELECTIVE}),
        layout(more={**GPT_OSS, **FULL}),
    ],
    2: [
        layout(dp=2, ep=2, more=GPT_OSS),
        layout(tp=2, more={**GPT_OSS, **FEW}),
        layout(tp=2, sequence_parallel=True, more={**GPT_OSS, **FEW, **SELECTIVE}),
        layout(cp=2, more=GPT_OSS),
        layout(cp=2, cp_kind="ulysses", ep=2, more={**GPT_OSS, **FULL}),
        layout(dp=2, ep=2, **FSDP2, more=GPT_OSS),
        layout(pp=2, schedule="zb-v", more=GPT_OSS),
    ],
    4: [
        layout(dp=2, ep=2, tp=2, sequence_parallel=True, more={**GPT_OSS, **FEW}),
        layout(tp=4, more={**GPT_OSS, **FEW}),
        layout(dp=2, cp=2, ep=4, zero_stage=0, more=GPT_OSS),
    ],
}

OVER_GLOO = [
    layout(dp=2),
    layout(dp=2, zero_stage=3, engine="deepspeed"),
    layout(tp=2, sequence_parallel=True, more=FEW),
    layout(pp=2, more=TIED),
    layout(pp=2, schedule="zb-v"),
    layout(dp=2, ep=2, more=MIXTRAL),
    layout(dp=2, ep=2, **FSDP2, more=MIXTRAL),
]


def train_cases(cases: list[dict], steps: int) -> list[Curve]:
    curves = [train(tiny_config(**case), steps) for case in cases]
    assert torch.nn.functional.linear is LINEAR, "an engine left its own linear behind in torch"
    return curves


@pytest.mark.parametrize("world_size", CASES)
def test_layouts_equal_plain_pytorch(world_size):
    """Loss to 1e-5 and gradient norm to 1e-4 over clipped steps, with uneven masks and packed documents."""
    compare_dense(CASES[world_size], world_size)


@pytest.mark.parametrize("world_size", SPARSE)
def test_layouts_of_experts_equal_plain_pytorch(world_size):
    """The same with experts, whose routers have losses of each kind: against transformers' Mixtral, Qwen2-MoE and
    Qwen3-MoE."""
    compare(SPARSE[world_size], world_size, FEWER_STEPS)


@pytest.mark.parametrize("world_size", DROPPING)
def test_layouts_that_drop_choices_equal_plain_pytorch(world_size):
    """The same where experts have room for three quarters of their share: against Qwen3-MoE's block, where weights of
    choices without room are 0."""
    compare(DROPPING[world_size], world_size, FEWER_STEPS)


@pytest.mark.parametrize("world_size", LATENT)
def test_layouts_of_latent_attention_equal_plain_pytorch(world_size):
    """The same with latent attention, and routers that a bias keeps in balance: against transformers' DeepSeek-V3."""
    compare(LATENT[world_size], world_size, FEWER_STEPS)


@pytest.mark.parametrize("world_size", FURTHER)
def test_layouts_that_predict_further_equal_plain_pytorch(world_size):
    """The same with layers that predict one and two tokens further: against transformers' own."""
    compare(FURTHER[world_size], world_size, FEWER_STEPS)


@pytest.mark.parametrize("world_size", DIVIDED)
def test_layouts_of_fsdp2_equal_plain_pytorch(world_size):
    """The same where FSDP2 divides weights, dense and of experts."""
    compare(DIVIDED[world_size], world_size, FEWER_STEPS)


@pytest.mark.parametrize("world_size", SINKS)
def test_layouts_of_sinks_equal_plain_pytorch(world_size):
    """The same with sinks, windows in every other block, and experts and routers with biases: against gpt-oss."""
    compare(SINKS[world_size], world_size, FEWER_STEPS)


def test_layouts_over_gloo():
    """The same over the network that CPUs train over: one layout of each way to talk."""
    compare(OVER_GLOO, 2, FEWER_STEPS, backend="gloo")


def compare_dense(cases: list[dict], world_size: int) -> None:
    """More steps of the plain model on few ranks."""
    plain = [case for case in cases if world_size <= 2 and case.keys() <= {"parallel", "batch"}]
    compare(plain, world_size, STEPS)
    compare([case for case in cases if case not in plain], world_size, FEWER_STEPS)


def compare(cases: list[dict], world_size: int, steps: int, **options: str) -> None:
    truth = plain_curves(cases, steps)
    ranks = run_ranks(train_cases, world_size, cases, steps, **options)
    complaints = []
    for number, case in enumerate(cases):
        for rank, curves in enumerate(ranks):
            for step, ((loss, norm), (want_loss, want_norm)) in enumerate(
                itertools.zip_longest(curves[number], truth[number]), start=1
            ):
                if abs(loss - want_loss) > LOSS_TOLERANCE or abs(norm / want_norm - 1) > NORM_TOLERANCE:
                    off = f"loss {loss - want_loss:+.1e}, norm {norm / want_norm - 1:+.1e}"
                    complaints.append(f"{case} rank {rank} step {step}: {off}")
                    break
    assert not complaints, "\n".join(complaints)
