"""Conflicts between a pipeline, its schedule, its chunks and its engine: each is found and worded with legal values."""

from __future__ import annotations

import pytest

from megalite.config.schema import Config
from tests.config.configs import complaints, config

CONFLICTS = {
    "more stages than blocks": (
        config(parallel={"pp": 5}),
        5,
        "parallel.pp: num_layers=4 cannot fill pp=5 stages; use pp=4 or less",
    ),
    "blocks that are not the model's": (
        config(parallel={"pp": 2, "blocks_per_stage": [4, 1]}),
        2,
        "parallel.blocks_per_stage: found [4, 1], expected pp=2 numbers whose sum is num_layers=4, of which only the "
        "last may be 0; correct it, or use null",
    ),
    "a stage without blocks before the last": (
        config(parallel={"pp": 3, "blocks_per_stage": [4, 0, 0]}),
        3,
        "parallel.blocks_per_stage: found [4, 0, 0], expected pp=3 numbers whose sum is num_layers=4, of which only "
        "the last may be 0; correct it, or use null",
    ),
    "a schedule that nobody knows": (
        config(parallel={"pp": 2, "schedule": "gpipe"}),
        2,
        "parallel.schedule: found 'gpipe', expected 1f1b, interleaved, zb-h1, zb-v or dualpipe-v, or a file of one's "
        "own, NAME.csv",
    ),
    "a schedule without a pipeline": (
        config(parallel={"schedule": "zb-v"}),
        1,
        "parallel.schedule: found zb-v, but it has no effect with pp=1; leave it at 1f1b",
    ),
    "two chunks for 1F1B": (
        config(parallel={"pp": 2, "chunks": 2}),
        2,
        "parallel.chunks: 1f1b has 1 on each stage, found 2; use 1 or null (interleaved takes more)",
    ),
    "one chunk to interleave": (
        config(parallel={"pp": 2, "chunks": 1, "schedule": "interleaved"}),
        2,
        "parallel.chunks: interleaved has two or more on each stage, found 1; use 2, or schedule=1f1b",
    ),
    "more chunks than blocks": (
        config(parallel={"pp": 2, "chunks": 3, "schedule": "interleaved"}),
        2,
        "parallel.chunks: pp=2 stages with 3 each are 6 chunks, more than num_layers=4; use chunks=2",
    ),
    "more chunks of a V than blocks": (
        config(parallel={"pp": 4, "schedule": "zb-v"}),
        4,
        "parallel.chunks: pp=4 stages with 2 each are 8 chunks, more than num_layers=4; use pp=2 or "
        "schedule=1f1b or zb-h1, which have one chunk a stage",
    ),
    "too few micro-batches for DualPipe": (
        config(parallel={"pp": 2, "schedule": "dualpipe-v"}, batch={"micro_batch_size": 2, "global_batch_size": 12}),
        4,
        "batch.global_batch_size: 12 is 3 micro-batches of 2 on each of dp=2 ranks, and schedule=dualpipe-v with pp=2 "
        "needs 4 or more; use 16, a smaller micro_batch_size, or schedule=zb-v",
    ),
    "blocks of stages that have two chunks": (
        config(parallel={"pp": 2, "schedule": "zb-v", "blocks_per_stage": [2, 2]}),
        2,
        "parallel.blocks_per_stage: schedule=zb-v has 4 chunks on pp=2 stages; use blocks_per_chunk",
    ),
    "blocks of chunks that are not the model's": (
        config(parallel={"pp": 2, "schedule": "zb-v", "blocks_per_chunk": [2, 2]}),
        2,
        "parallel.blocks_per_chunk: found [2, 2], expected 4 numbers whose sum is num_layers=4, of which only the last "
        "may be 0; correct it, or use null",
    ),
    "blocks given twice": (
        config(parallel={"pp": 2, "blocks_per_stage": [2, 2], "blocks_per_chunk": [2, 2]}),
        2,
        "parallel.blocks_per_chunk: found beside blocks_per_stage; give one of them",
    ),
    "a schedule that is not there": (
        config(parallel={"pp": 2, "schedule": "nowhere.csv"}),
        2,
        "parallel.schedule: nowhere.csv: cannot be read ([Errno 2] No such file or directory: 'nowhere.csv')",
    ),
    "a split schedule with Transformer Engine": (
        config(
            parallel={"pp": 2, "schedule": "zb-h1"},
            precision={"fp8": {"backend": "te"}},
            train={"steps": 100, "device": "cuda"},
        ),
        2,
        "parallel.schedule: zb-h1 makes gradients of weights later than those of inputs, and precision.fp8.backend=te "
        "makes both in one; use schedule=1f1b or interleaved, or backend=scaled_mm",
    ),
    "DeepSpeed with a pipeline": (
        config(parallel={"pp": 2, "engine": "deepspeed"}),
        2,
        "parallel.engine: deepspeed has no pipelines here, found pp=2; use engine=native or null, or pp=1",
    ),
    "the native engine with ZeRO-3": (
        config(parallel={"engine": "native", "zero_stage": 3}),
        1,
        "parallel.engine: native has zero_stage=0 or 1, found 3; use engine=deepspeed or null, or zero_stage=1",
    ),
    "FSDP2 with ZeRO-1": (
        config(parallel={"engine": "fsdp2"}),
        1,
        "parallel.engine: fsdp2 divides weights, zero_stage=3, found 1; use that, or engine=native or null",
    ),
    "FSDP2 with a pipeline": (
        config(parallel={"engine": "fsdp2", "pp": 2, "zero_stage": 1}),
        2,
        "parallel.engine: fsdp2 has no pipelines here, found pp=2; use engine=native or null, or pp=1",
    ),
    "FSDP2 with masters in bf16": (
        config(parallel={"engine": "fsdp2", "zero_stage": 3}, precision={"dtype": "bf16", "master_dtype": "bf16"}),
        1,
        "precision.master_dtype: engine=fsdp2 keeps masters in fp32; use that, or engine=deepspeed",
    ),
    "groups of replicas that are not equal": (
        config(
            parallel={"engine": "fsdp2", "zero_stage": 3, "dp": 4, "dp_replicate": 3}, batch={"global_batch_size": 4}
        ),
        4,
        "parallel.dp_replicate: dp x cp = 4 replicas are not 3 equal groups; use 1, 2 or 4",
    ),
    "groups of replicas without FSDP2": (
        config(parallel={"dp": 2, "dp_replicate": 2}, batch={"global_batch_size": 4}),
        2,
        "parallel.dp_replicate: found 2, but it has no effect with engine=native; leave it at 1",
    ),
    "few bits with DeepSpeed": (
        config(parallel={"zero_stage": 3, "engine": "deepspeed"}, precision={"dtype": "fp32", "reduce_bits": 8}),
        1,
        "precision.reduce_bits: found 8, but engine=deepspeed sends whole numbers; use engine=fsdp2 with "
        "zero_stage=3, engine=native with zero_stage=1, or null",
    ),
    "weights in few bits that are not gathered": (
        config(parallel={"zero_stage": 0}, precision={"dtype": "fp32", "gather_bits": 8}),
        1,
        "precision.gather_bits: found 8, but it has no effect with zero_stage=0, which gathers no weights; leave it at "
        "null",
    ),
    "a format of sums that do not travel": (
        config(precision={"dtype": "bf16", "reduce_bits": 4, "reduce_dtype": "bf16"}),
        1,
        "precision.reduce_dtype: found bf16, but it has no effect with reduce_bits=4, whose sums are fp32; leave it at "
        "null",
    ),
    "products that round numbers of another format": (
        config(precision={"dtype": "bf16", "products": "tf32"}),
        1,
        "precision.products: found tf32, but it has no effect with dtype=bf16; leave it at fp32",
    ),
    "products that round what is rounded": (
        config(precision={"dtype": "fp32", "products": "bf16", "fp8": {"backend": "scaled_mm"}}),
        1,
        "precision.products: bf16 would round what precision.fp8 has rounded once more, where a device multiplies that "
        "in fp32; use products=fp32, or fp8=null",
    ),
    "few bits within copies": (
        config(
            parallel={"engine": "fsdp2", "zero_stage": 3, "dp": 4, "dp_replicate": 2},
            precision={"dtype": "fp32", "reduce_bits": 8},
            batch={"global_batch_size": 4},
        ),
        4,
        "precision.reduce_bits: 8 bits would travel within each of dp_replicate=2 groups, and fp32 between them, which "
        "is the longer way; use dp_replicate=1, with hpz_size where gathers should stay near, or null",
    ),
    "weights rounded twice": (
        config(precision={"dtype": "fp32", "gather_bits": 8, "qat": {"bits": 4, "group_size": 32}}),
        1,
        "precision.gather_bits: precision.qat rounds weights as they are exported, and these would be rounded ones "
        "already; use null, or qat=null",
    ),
    "hops of nothing": (
        config(parallel={"dp": 4, "reduce_within": 2}, batch={"global_batch_size": 4}),
        4,
        "parallel.reduce_within: found 2, but it has no effect with precision.reduce_bits=null; leave it at null",
    ),
    "neighbours that do not divide the ranks": (
        config(parallel={"engine": "fsdp2", "zero_stage": 3, "dp": 4, "hpz_size": 4}, batch={"global_batch_size": 4}),
        4,
        "parallel.hpz_size: 4 ranks divide the work, not into smaller groups of 4; use 2 or null",
    ),
    "neighbours without FSDP2": (
        config(parallel={"dp": 4, "hpz_size": 2}, batch={"global_batch_size": 4}),
        4,
        "parallel.hpz_size: found 2, but it has no effect with engine=native; leave it at null",
    ),
    "settings for DeepSpeed without it": (
        config(engine={"deepspeed_extra": {"wall_clock_breakdown": True}}),
        1,
        "engine.deepspeed_extra: found wall_clock_breakdown, but it has no effect with parallel.engine=native, which "
        "is taken here; set parallel.engine=deepspeed, or leave it out",
    ),
    "pipeline with ZeRO-2": (
        config(parallel={"pp": 2, "tp": 2, "zero_stage": 2}),
        8,
        "parallel.zero_stage: found 2 with pp=2, but a pipeline keeps gradients and weights whole over dp; use "
        "zero_stage=1, or pp=1 (then dp=4)",
    ),
    "pipeline with ZeRO-3": (
        config(parallel={"pp": 2, "zero_stage": 3}),
        2,
        "parallel.zero_stage: found 3 with pp=2, but a pipeline keeps gradients and weights whole over dp; use "
        "zero_stage=1, or pp=1 (then dp=2)",
    ),
}


@pytest.mark.parametrize(("checked", "world_size", "complaint"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict(checked: Config, world_size: int, complaint: str):
    """One complaint, and no other."""
    assert complaints(checked, world_size) == (complaint,)


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [((1, 0), "the first chunk on stage 1 and the last one on stage 0"), ((0, 2, 1), "stage 0 and the last one on")],
)
def test_files_with_ends_in_the_middle(tmp_path, ranks, stages):
    """What both ends hold is kept equal between the first stage and the last, so they have to be there."""
    lines = {rank: f"{chunk}F0,{chunk}B0" for chunk, rank in enumerate(ranks)}
    path = tmp_path / "mine.csv"
    path.write_text("\ufeff" + "".join(f"{lines[rank]}\n" for rank in sorted(lines)), encoding="utf-8")
    parallel = {"pp": len(ranks), "schedule": str(path)}
    (found,) = complaints(config(parallel=parallel), len(ranks))
    assert stages in found


GROWING = {
    "ramp": {"ramp": {"start_size": 2, "samples": 8}},
    "noise_scale.max_batch_size": {"noise_scale": {"max_batch_size": 8}},
}


def test_a_file_is_for_one_number_of_micro_batches(tmp_path):
    """The batch that fits is named; one that grows has none."""
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    parallel = {"pp": 2, "schedule": str(path)}
    batch = {"micro_batch_size": 1, "global_batch_size": 4}
    assert complaints(config(parallel=parallel, batch={**batch, "global_batch_size": 2}), 2) == ()
    (found,) = complaints(config(parallel=parallel, batch=batch), 2)
    assert found.startswith(
        f"batch.global_batch_size: 4 is 4 micro-batches of 1 on each of dp=1 ranks, and {path} is for 2; use 2, or "
    )
    for key, growth in GROWING.items():
        (found,) = complaints(config(parallel=parallel, batch={**batch, **growth}), 2)
        assert found.startswith(f"batch.{key}: the batch grows, and {path} is for 2 micro-batches in every step; use ")


@pytest.mark.parametrize(
    ("lines", "holds"), [("0F0,1F0,1B0,0B0\n2F0,2B0\n", True), ("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", False)]
)
def test_a_file_says_whether_a_tied_table_is_held_twice(tmp_path, lines, holds):
    """In a V it is not: then there is nothing to compare, and each micro-batch has its whole gradient."""
    path = tmp_path / "mine.csv"
    path.write_text(lines)
    sections = {
        "parallel": {"pp": 2, "schedule": str(path)},
        "batch": {"micro_batch_size": 1, "global_batch_size": 1},
        "model": {"tie_embeddings": True},
    }
    compared = complaints(config(**sections, health={"check_replicas_every": 5}), 2)
    assert [found.split(":")[0] for found in compared] == ([] if holds else ["health.check_replicas_every"])
