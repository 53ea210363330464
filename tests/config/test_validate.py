"""Conflicts between settings: each is found, worded with legal values, and reported together with the others."""

from __future__ import annotations

import pytest

from megalite.config.plan import default_world_size
from megalite.config.schema import Config
from megalite.config.validate import validate
from tests.config.configs import complaints, config

VALID_SOURCE = {"valid": [{"path": "data/v"}]}


CONFLICTS = {
    "an adapter that is larger than what it adapts": (
        config(model={"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "lora": {"rank": 33, "targets": ["k"]}}),
        1,
        "model.lora.rank: 33, and what is adapted has rank 32 at most; use less, or set model.lora=null, "
        "which trains them whole",
    ),
    "dp that cannot be derived": (
        config(parallel={"tp": 2, "pp": 2}),
        6,
        "parallel.dp: null cannot be derived: 6 ranks are not a multiple of pp x cp x tp = 2 x 1 x 2 = 4; use 4 or 8 "
        "ranks, or change pp or tp",
    ),
    "fewer ranks than one model needs": (
        config(parallel={"tp": 4}),
        1,
        "parallel.dp: null cannot be derived: 1 ranks are not a multiple of pp x cp x tp = 1 x 1 x 4 = 4; use 4 ranks, "
        "or change pp or tp",
    ),
    "dp for another world size": (
        config(parallel={"tp": 2, "dp": 2}),
        8,
        "parallel.dp: found 8 ranks, expected pp x dp x cp x tp = 1 x 2 x 1 x 2 = 4; use 4 ranks, or set dp=4",
    ),
    "dp for a world size that nothing fits": (
        config(parallel={"tp": 2, "dp": 2}),
        5,
        "parallel.dp: found 5 ranks, expected pp x dp x cp x tp = 1 x 2 x 1 x 2 = 4; use 4 ranks",
    ),
    "tokens over cp": (
        config(parallel={"cp": 3}, batch={"seq_len": 32, "micro_batch_size": 1}),
        3,
        "batch.seq_len: micro_batch_size x seq_len = 32 tokens are not divisible by 6, as cp=3 wants; use seq_len=30 "
        "or 36, or parallel.pad_tokens=true",
    ),
    "tokens over cp and tp": (
        config(
            parallel={"cp": 2, "tp": 4, "sequence_parallel": True, "cp_kind": "ulysses"},
            batch={"seq_len": 36, "micro_batch_size": 1},
            model={"num_heads": 8, "num_kv_heads": 8, "ffn_hidden_size": 96},
        ),
        8,
        "batch.seq_len: micro_batch_size x seq_len = 36 tokens are not divisible by 8, as cp=2 and sequence_parallel "
        "over tp=4 want; use seq_len=32 or 40, or parallel.pad_tokens=true",
    ),
    "chunks that selective recomputation has kept": (
        config(train={"steps": 10, "recompute": "selective", "mlp_chunk_tokens": 8}),
        1,
        "train.mlp_chunk_tokens: recompute=selective keeps the results of the MLP's products, which chunks would make "
        "again; use recompute=full or none, or null here",
    ),
    "a chunk of everything": (
        config(
            train={"steps": 10, "mlp_chunk_tokens": 64},
            batch={"seq_len": 64, "micro_batch_size": 2},
            parallel={"cp": 2},
        ),
        2,
        "train.mlp_chunk_tokens: 64 has no effect, a rank's MLP has 64 tokens of a micro-batch; use fewer, or null",
    ),
    "nothing to offload": (
        config(train={"steps": 10, "offload_activations": True}),
        1,
        "train.offload_activations: found with recompute=none; what full recomputation keeps is what waits in the "
        "host's memory: use recompute=full, or false",
    ),
    "heads over ulysses": (
        config(parallel={"cp": 4, "cp_kind": "ulysses"}, model={"num_heads": 6, "head_dim": 8, "num_kv_heads": 2}),
        4,
        "parallel.cp_kind: ulysses gives each of cp=4 ranks as many heads, and a tensor-parallel rank has 6, with 2 "
        "for keys and values; use cp=1, 2 or 6, or cp_kind=allgather",
    ),
    "bounded scores around a ring": (
        config(parallel={"cp": 2, "cp_kind": "ring"}, model={"attention_soft_cap": 30.0}),
        2,
        "parallel.cp_kind: ring does not bound scores, which attention_soft_cap=30 asks for; use cp_kind=allgather or "
        "ulysses",
    ),
    "a kind without cp": (
        config(parallel={"cp_kind": "ulysses"}),
        1,
        "parallel.cp_kind: found ulysses, but it has no effect with cp=1; leave it at allgather",
    ),
    "heads over tp": (
        config(
            model={"hidden_size": 768, "num_heads": 12, "ffn_hidden_size": 3072},
            parallel={"tp": 8},
            batch={"seq_len": 8},
        ),
        8,
        "parallel.tp: num_heads=12 is not divisible by tp=8; use tp=1, 2, 3, 4, 6 or 12",
    ),
    "kv heads beside tp": (
        config(
            model={"num_heads": 12, "hidden_size": 96, "num_kv_heads": 4, "ffn_hidden_size": 96}, parallel={"tp": 6}
        ),
        6,
        "parallel.tp: tp=6 neither divides num_kv_heads=4 nor is divisible by it; use tp=1, 2 or 4",
    ),
    "a kv head that its ranks cannot share": (
        config(model={"num_heads": 16, "num_kv_heads": 2, "head_dim": 6, "ffn_hidden_size": 64}, parallel={"tp": 16}),
        16,
        "parallel.tp: tp=16 is larger than num_kv_heads=2, and 8 ranks cannot share a head of head_dim=6 evenly; use "
        "tp=1, 2 or 4",
    ),
    "kv heads over tp": (
        config(model={"num_heads": 24, "head_dim": 8, "num_kv_heads": 6, "ffn_hidden_size": 96}, parallel={"tp": 4}),
        4,
        "parallel.tp: tp=4 neither divides num_kv_heads=6 nor is divisible by it; use tp=1, 2, 3, 6, 12 or 24",
    ),
    "MLP width over tp": (
        config(model={"num_heads": 6, "hidden_size": 384, "ffn_hidden_size": 1000}, parallel={"tp": 3}),
        3,
        "parallel.tp: ffn_hidden_size=1000 is not divisible by tp=3; use tp=1 or 2, or ffn_hidden_size=999 or 1002",
    ),
    "tokens over tp with sequence parallelism": (
        config(parallel={"tp": 4, "sequence_parallel": True}, batch={"seq_len": 511, "micro_batch_size": 2}),
        4,
        "batch.seq_len: micro_batch_size x seq_len = 1022 tokens are not divisible by 4, as sequence_parallel over "
        "tp=4 wants; use seq_len=510 or 512, or parallel.pad_tokens=true",
    ),
    "global batch": (
        config(batch={"micro_batch_size": 2, "global_batch_size": 10}),
        3,
        "batch.global_batch_size: 10 is not a multiple of micro_batch_size x dp = 2 x 3 = 6; use 6 or 12",
    ),
    "global batch below one micro-batch a rank": (
        config(batch={"micro_batch_size": 4, "global_batch_size": 8}),
        4,
        "batch.global_batch_size: 8 is not a multiple of micro_batch_size x dp = 4 x 4 = 16; use 16",
    ),
    "derived head_dim": (
        config(model={"hidden_size": 100, "num_heads": 12}),
        1,
        "model.head_dim: null stands for hidden_size / num_heads, but 100 / 12 is not whole; use hidden_size=96 or "
        "108, or set head_dim",
    ),
    "more heads than width": (
        config(model={"hidden_size": 8, "num_heads": 12}),
        1,
        "model.head_dim: null stands for hidden_size / num_heads, but 8 / 12 is not whole; use hidden_size=12, or set "
        "head_dim",
    ),
    "query heads over kv heads": (
        config(model={"hidden_size": 768, "num_heads": 12, "num_kv_heads": 5}),
        1,
        "model.num_kv_heads: num_heads=12 is not a multiple of num_kv_heads=5; use 1, 2, 3, 4, 6 or 12",
    ),
    "sequence beyond the positions": (
        config(model={"max_positions": 128}, batch={"seq_len": 256}),
        1,
        "batch.seq_len: 256 is longer than model.max_positions=128; use a shorter sequence or more positions",
    ),
    "rotary settings with learned positions": (
        config(model={"positions": "learned", "rope": {"theta": 5e5}}),
        1,
        "model.rope.theta: found 500000.0, but it has no effect with positions=learned; leave it at 10000.0",
    ),
    "rotary scaling with learned positions": (
        config(model={"positions": "learned", "rope": {"scaling": {"type": "linear"}}}),
        1,
        "model.rope.scaling: found a group, but it has no effect with positions=learned; leave it at null",
    ),
    "odd rotated channels": (
        config(model={"head_dim": 20, "rope": {"fraction": 0.25}}),
        1,
        "model.rope.fraction: 0.25 of head_dim=20 rotates 5 channels, and they turn in pairs; use fraction=0.2 or 0.3",
    ),
    "no rotated channels": (
        config(model={"head_dim": 8, "rope": {"fraction": 0.1}}),
        1,
        "model.rope.fraction: 0.1 of head_dim=8 rotates 0 channels, and they turn in pairs; use fraction=0.25",
    ),
    "head of one channel": (
        config(model={"head_dim": 1}),
        1,
        "model.rope.fraction: 1.0 of head_dim=1 rotates 1 channels, and they turn in pairs; use head_dim=2 or more",
    ),
    "kinds of layers without a window": (
        config(model={"layer_types": ["sliding_attention", "full_attention"]}),
        1,
        "model.layer_types: sliding_attention needs sliding_window, which is null; set it, or take the kind out",
    ),
    "more kinds than layers": (
        config(model={"num_layers": 2, "sliding_window": 8, "layer_types": ["full_attention"] * 3}),
        1,
        "model.layer_types: found 3 kinds for num_layers=2 blocks; name one for each, or a shorter pattern that is "
        "repeated",
    ),
    "rotation of a window that is not there": (
        config(model={"sliding_rope": {"theta": 100.0}}),
        1,
        "model.sliding_rope: found a group, but it has no effect with sliding_window=null; leave it at null",
    ),
    "llama3 settings with yarn": (
        config(model={"rope": {"scaling": {"type": "yarn", "low_freq_factor": 2}}}),
        1,
        "model.rope.scaling.low_freq_factor: found 2.0, but it has no effect with type=yarn; leave it at 1.0",
    ),
    "yarn's ramp": (
        config(model={"rope": {"scaling": {"type": "yarn", "beta_slow": 40}}}),
        1,
        "model.rope.scaling: beta_slow=40 must be below beta_fast=32; the paper has 1 and 32",
    ),
    "longrope's factors": (
        config(model={"head_dim": 8, "rope": {"scaling": {"type": "longrope", "short_factor": [1.0] * 4}}}),
        1,
        "model.rope.scaling.long_factor: found 0 numbers, expected 4: one for each rotated pair of channels",
    ),
    "llama3 settings with linear scaling": (
        config(model={"rope": {"scaling": {"type": "linear", "low_freq_factor": 2}}}),
        1,
        "model.rope.scaling.low_freq_factor: found 2.0, but it has no effect with type=linear; leave it at 1.0",
    ),
    "llama3 bands": (
        config(model={"rope": {"scaling": {"type": "llama3", "low_freq_factor": 4}}}),
        1,
        "model.rope.scaling: low_freq_factor=4 must be below high_freq_factor=4; Llama 3.1 has 1 and 4",
    ),
    "ZeRO-0 in bf16": (
        config(parallel={"zero_stage": 0, "engine": "deepspeed"}),
        1,
        "parallel.zero_stage: found 0 with dtype=bf16, where DeepSpeed applies wrong updates; use zero_stage=1 (right "
        "with dp=1 too), or dtype=fp32",
    ),
    "bf16 masters in fp32": (
        config(precision={"dtype": "fp32", "master_dtype": "bf16"}, parallel={"zero_stage": 2}),
        1,
        "precision.master_dtype: bf16 does not go with dtype=fp32; use dtype=bf16, or fp32 here",
    ),
    "bf16 masters with ZeRO-1": (
        config(precision={"master_dtype": "bf16"}),
        1,
        "precision.master_dtype: with zero_stage=1 masters are kept in fp32; use zero_stage=2 or 3 (right with dp=1 "
        "too), or master_dtype=fp32",
    ),
    "bf16 masters in a pipeline": (
        config(precision={"master_dtype": "bf16"}, parallel={"pp": 2}),
        2,
        "precision.master_dtype: with zero_stage=1 masters are kept in fp32; use pp=1 and zero_stage=2 or 3 (right "
        "with dp=1 too), or master_dtype=fp32",
    ),
    "fp16 on a CPU": (
        config(precision={"dtype": "fp16"}, train={"steps": 1, "device": "cpu"}),
        1,
        "precision.dtype: fp16 is for GPUs; use bf16, or fp32, which is faster without bf16 units",
    ),
    "no length": (config(train={}), 1, "train.steps: null, and so are train.tokens and train.epochs; set one of them"),
    "two lengths": (
        config(train={"steps": 100, "tokens": 10**6}, batch={"seq_len": 512, "global_batch_size": 8}),
        1,
        "train.tokens: found 1000000, and train.steps=100 too; set one of them to null (these tokens are 245 steps)",
    ),
    "validation without data": (
        config(train={"steps": 100, "eval_every": 10}),
        1,
        "train.eval_every: found 10, but data.valid is empty; add a source to it, or set null",
    ),
    "a watched set that is not there": (
        config(data={"valid": [{"path": "a/prose"}, {"path": "b", "name": "code"}]}, train={"steps": 1, "watch": "x"}),
        1,
        "train.watch: found 'x', but data.valid has prose or code; name one of its sets, or use null",
    ),
    "early stopping without validations": (
        config(train={"steps": 100, "early_stopping": {}}),
        1,
        "train.early_stopping: it has no effect without train.eval_every and data.valid; set both too, or use null",
    ),
    "early stopping by nothing": (
        config(
            data={"valid": [{"path": "a"}]},
            train={"steps": 100, "eval_every": 5, "early_stopping": {"patience": None}},
        ),
        1,
        "train.early_stopping: patience, slope and target are all null; set one of them, or use null",
    ),
    "progress that nobody waits for": (
        config(
            data={"valid": [{"path": "a"}]},
            train={
                "steps": 100,
                "eval_every": 5,
                "early_stopping": {"patience": None, "target": 2.0, "min_delta": 0.1},
            },
        ),
        1,
        "train.early_stopping.min_delta: found 0.1, but it has no effect with patience=null; leave it at 0.0",
    ),
    "early stopping by a set that is not there": (
        config(
            data={"valid": [{"path": "a", "name": "prose"}, {"path": "b"}]},
            train={"steps": 100, "eval_every": 5, "early_stopping": {"set": "code"}},
        ),
        1,
        "train.early_stopping.set: found 'code', but data.valid has prose or b; name one of its sets",
    ),
    "queries that nobody looks at": (
        config(monitor={"layers_every": None, "attention_queries": 16}),
        1,
        "monitor.attention_queries: found 16, but it has no effect with layers_every=null; leave it at 512",
    ),
    "two tasks of one name": (
        config(train={"steps": 100, "tasks": [{"path": "a/qa.jsonl"}, {"path": "b/qa.jsonl"}]}),
        1,
        "train.tasks: 2 tasks are called 'qa'; give each a name of its own",
    ),
    "the best by no loss": (
        config(
            train={"steps": 100, "eval_every": 3, "tasks": [{"path": "a"}]}, checkpoint={"every": 3, "keep_best": 1}
        ),
        1,
        "checkpoint.keep_best: 1 has no effect without data.valid; add a source to it, or use null",
    ),
    "warmup beyond the run": (
        config(schedule={"warmup_steps": 101}),
        1,
        "schedule.warmup_steps: 101 is more than the 100 steps of the run; use 100 or less",
    ),
    "warmup beyond the tokens": (
        config(schedule={"warmup_steps": 300}, train={"tokens": 10**6}),
        1,
        "schedule.warmup_steps: 300 is more than the 245 steps of the run; use 245 or less",
    ),
    "last rate above the peak": (
        config(schedule={"min_lr": 1e-3}),
        1,
        "schedule.min_lr: 0.001 is above optimizer.lr=0.0003; use 0.0003 or less",
    ),
    "last rate of a constant schedule": (
        config(schedule={"name": "constant", "min_lr": 1e-5}),
        1,
        "schedule.min_lr: found 1e-05, but it has no effect with name=constant; leave it at 0.0",
    ),
    "decay of a cosine": (
        config(schedule={"decay_steps": 10}),
        1,
        "schedule.decay_steps: found 10, but it has no effect with name=cosine; leave it at null",
    ),
    "decay beyond the run": (
        config(schedule={"name": "wsd", "decay_steps": 200}),
        1,
        "schedule.decay_steps: 200 do not fit behind a warmup of 0 into the 100 steps of the run; use 100 or less",
    ),
    "warmup and decay beyond the run": (
        config(schedule={"name": "wsd", "decay_steps": 60, "warmup_steps": 50}),
        1,
        "schedule.decay_steps: 60 do not fit behind a warmup of 50 into the 100 steps of the run; use 50 or less",
    ),
    "decay behind a warmup of the whole run": (
        config(schedule={"name": "wsd", "decay_steps": 1, "warmup_steps": 100}),
        1,
        "schedule.decay_steps: 1 do not fit behind a warmup of 100 into the 100 steps of the run; use a shorter warmup",
    ),
    "keeping what is never saved": (
        config(checkpoint={"every": 400, "keep_every": 1000}),
        1,
        "checkpoint.keep_every: 1000 is not a multiple of every=400, so most of those steps are never saved; use 800 "
        "or 1200",
    ),
    "keeping without saving": (
        config(checkpoint={"keep_every": 1000}),
        1,
        "checkpoint.keep_every: 1000 has no effect with every=null; set every too",
    ),
}


@pytest.mark.parametrize(("checked", "world_size", "complaint"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict(checked: Config, world_size: int, complaint: str):
    """Each conflict alone gives this one sentence."""
    assert complaints(checked, world_size) == (complaint,)


def test_all_at_once():
    """One error holds the conflicts of every section."""
    broken = config(
        model={"num_heads": 6, "hidden_size": 384, "num_layers": 2},
        parallel={"tp": 4, "pp": 3, "zero_stage": 3},
        batch={"global_batch_size": 7, "micro_batch_size": 2},
        schedule={"warmup_steps": 1000},
        train={"steps": 5, "eval_every": 1},
    )
    keys = [problem.partition(":")[0] for problem in complaints(broken, 12)]
    assert keys == [
        "parallel.tp",
        "parallel.pp",
        "parallel.zero_stage",
        "batch.global_batch_size",
        "train.eval_every",
        "schedule.warmup_steps",
    ]


ALLOWED = {
    "the defaults": config(),
    "sequence parallelism over one rank does nothing": config(parallel={"sequence_parallel": True}),
    "an odd stream over one rank": config(parallel={"sequence_parallel": True}, batch={"seq_len": 511}),
    "ZeRO-0 in fp32": config(parallel={"zero_stage": 0}, precision={"dtype": "fp32"}),
    "a pipeline with ZeRO-0 in fp32": config(parallel={"zero_stage": 0, "pp": 2}, precision={"dtype": "fp32"}),
    "ZeRO-3 with tensor parallelism": config(parallel={"zero_stage": 3, "tp": 4}),
    "fewer micro-batches than stages": config(parallel={"pp": 4}, batch={"global_batch_size": 1}),
    "one kv head": config(model={"num_kv_heads": 1}),
    "heads narrower than the width": config(model={"hidden_size": 100, "num_heads": 12, "head_dim": 16}),
    "normalised heads with biases and LayerNorm": config(model={"qk_norm": True, "bias": "all", "norm": "layernorm"}),
    "a window wider than the sequence": config(model={"sliding_window": 10**6}),
    "learned positions beyond the sequence": config(model={"positions": "learned", "max_positions": 4096}),
    "warmup over the whole run": config(schedule={"warmup_steps": 100}),
    "decay over the whole run": config(schedule={"name": "wsd", "decay_steps": 100}),
    "a short wsd run": config(schedule={"name": "wsd", "warmup_steps": 1}, train={"steps": 1}),
    "a constant rate": config(schedule={"name": "constant", "warmup_steps": 10}),
    "a validation of given data": config(data=VALID_SOURCE, train={"steps": 5, "eval_every": 100}),
    "kept checkpoints": config(checkpoint={"every": 100, "keep_every": 1000}),
    "fp16 on an unnamed device": config(precision={"dtype": "fp16"}),
}


@pytest.mark.parametrize("checked", ALLOWED.values(), ids=ALLOWED)
def test_allowed(checked: Config):
    """What looks odd but works is not refused."""
    validate(checked, default_world_size(checked))


def test_derived_dp():
    """A world size that is a multiple of one model's ranks needs no dp."""
    validate(config(parallel={"tp": 2, "pp": 2}, batch={"global_batch_size": 12}), 12)
