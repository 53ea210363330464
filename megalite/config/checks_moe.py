"""What must hold where a model has experts."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megalite.architecture.architecture import Architecture
from megalite.architecture.settings import MoeConfig
from megalite.config.engine import choose_engine
from megalite.config.plan import derive_dp
from megalite.config.schema import Config, Fp8Config
from megalite.config.wording import divisors, near, or_, unused

ROW_RECIPES = ("rowwise", "block", "mxfp8")
"""Recipes of FP8 whose scales are of rows, or of pieces of them (`layers.fp8.recipes`)."""


def check_moe(config: Config, model: Architecture, world_size: int) -> Iterator[str]:
    """Complaints about experts and the rest of a run."""
    moe = model.moe
    if moe is None:
        yield from unused(config.parallel, ("ep",), "parallel", "moe=null")
        yield from unused(config.health, ("experts",), "health", "model.moe=null")
        return
    yield from _expert_parallel(config, moe, world_size)
    tp = config.parallel.tp
    for name, width in (
        ("ffn_hidden_size", moe.ffn_hidden_size or 0),
        ("shared_ffn_hidden_size", moe.shared_ffn_hidden_size),
    ):
        if width % tp:
            yield (
                f"model.moe.{name}: {width} is not divisible by tp={tp}; use {or_(near(width, tp))}, or "
                f"tp={or_(divisors(width))}"
            )
    if moe.top_k == 1 and moe.normalize:
        yield (
            "model.moe.normalize: with top_k=1 a token's weight is always 1, and its router learns nothing from the "
            "loss; use false"
        )
    if config.train.mlp_chunk_tokens is not None:
        yield "train.mlp_chunk_tokens: experts have their tokens all at once; use null, or a model without experts"
    if config.precision.fp8 is not None:
        yield from _fp8(config.precision.fp8)
    if config.precision.dtype == "fp16" and choose_engine(config) == "deepspeed" and _has_losses(moe):
        yield (
            "precision.dtype: losses of routers are not scaled as DeepSpeed scales the loss in fp16; use dtype=bf16, "
            "engine=native with zero_stage=1, or aux_loss=0 and z_loss=0"
        )


def _fp8(fp8: Fp8Config) -> Iterator[str]:
    if fp8.backend == "te":
        yield (
            "precision.fp8.backend: te has layers of its own, and the experts of a block lie in one matrix; use "
            "backend=scaled_mm with recipe=rowwise, or emulate"
        )
    elif fp8.recipe not in ROW_RECIPES:
        yield (
            f"precision.fp8.recipe: {fp8.recipe} has one scale for all tokens that an expert gets, whatever ranks they "
            f"come from; use {or_(ROW_RECIPES)}"
        )


def _expert_parallel(config: Config, moe: MoeConfig, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    ep, dp = parallel.ep, derive_dp(config, world_size)
    fitting = or_(divisors(gcd(moe.num_experts, dp * parallel.cp)))
    if moe.num_experts % ep:
        yield f"parallel.ep: num_experts={moe.num_experts} is not divisible by ep={ep}; use ep={fitting}"
    if dp * parallel.cp % ep:
        yield (
            f"parallel.ep: experts are divided among the replicas, and dp x cp = {dp} x {parallel.cp} is not divisible "
            f"by ep={ep}; use ep={fitting}, or dp={or_(near(dp, ep // gcd(ep, parallel.cp)))}"
        )
    clip = config.optimizer.clip
    if ep > 1 and parallel.zero_stage == 0 and clip is not None and clip.by == "layer":
        yield "optimizer.clip.by: layer needs the experts of all ranks together, as zero_stage=1 has them; use that"
    if ep > 1 and config.batch.noise_scale is not None:
        yield (
            f"batch.noise_scale: with ep={ep} an expert's gradient is of several ranks' micro-batches, and cannot be "
            "measured for each; use null, or ep=1"
        )
    if ep > 1 and choose_engine(config) == "deepspeed":
        yield (
            "parallel.ep: DeepSpeed has all experts on each rank here; use ep=1, or engine=native with zero_stage=1 or "
            f"engine=fsdp2 with zero_stage=3 for ep={ep}"
        )


def check_experts(model: Architecture) -> Iterator[str]:
    """Complaints about a model's experts by themselves."""
    moe = model.moe
    if moe is None:
        return
    if not any(model.sparse_blocks):
        yield (
            f"model.moe: first_dense={moe.first_dense} and every={moe.every} leave none of "
            f"num_layers={model.num_layers} blocks for experts; use less, or moe=null"
        )
    if model.bias == "all" and moe.shared_ffn_hidden_size:
        yield "model.bias: an MLP that all tokens go through has none here; use bias=attention, or no shared MLP"
    if model.mup is not None:
        yield "model.mup: no rule is known here for the width of experts and routers; use mup=null, or moe=null"
    if moe.top_k > moe.num_experts:
        yield (
            f"model.moe.top_k: a token cannot go to {moe.top_k} of num_experts={moe.num_experts}; use "
            f"{moe.num_experts} or less"
        )
    if moe.shared_gate and not moe.shared_ffn_hidden_size:
        yield "model.moe.shared_gate: has no effect with shared_ffn_hidden_size=0; take it out"
    if not moe.aux_loss:
        yield from unused(moe, ("aux_loss_over",), "model.moe", "aux_loss=0")
    factor = moe.capacity_factor
    if factor is not None and factor * moe.top_k >= moe.num_experts:
        yield (
            f"model.moe.capacity_factor: {factor:g} times an even share, top_k={moe.top_k} of "
            f"num_experts={moe.num_experts}, is room for all tokens: nothing would be dropped; use less than "
            f"{moe.num_experts / moe.top_k:g}, or null"
        )
    yield from _groups(moe)


def _groups(moe: MoeConfig) -> Iterator[str]:
    if moe.num_groups == 1:
        yield from unused(moe, ("top_groups", "group_score"), "model.moe", "num_groups=1")
        return
    if moe.num_experts % moe.num_groups:
        fitting = or_(divisors(moe.num_experts))
        yield f"model.moe.num_groups: {moe.num_experts} experts are not {moe.num_groups} equal groups; use {fitting}"
        return
    size = moe.num_experts // moe.num_groups
    if moe.top_groups > moe.num_groups:
        yield f"model.moe.top_groups: found {moe.top_groups} of num_groups={moe.num_groups}; use that or less"
    elif moe.top_k > moe.top_groups * size:
        yield (
            f"model.moe.top_k: top_groups={moe.top_groups} groups of {size} experts leave fewer than {moe.top_k} to "
            f"choose from; use top_k={moe.top_groups * size} or less, or top_groups={-(-moe.top_k // size)}"
        )


def _has_losses(moe: MoeConfig) -> bool:
    return moe.aux_loss > 0.0 or moe.z_loss > 0.0
