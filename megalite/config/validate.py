"""What must hold between settings: every conflict of a config with itself and with the number of ranks, all at once.

Each check is a generator of sentences: the setting, what was found, the nearest values that are legal. Nothing here
looks at the machine or at files (but for a pipeline schedule of one's own), so a laptop validates a cluster's config.
Settings that would have no effect are refused too, because who sets them expects one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megalite.architecture.architecture import Architecture
from megalite.config.batch_sizes import steps_for_tokens
from megalite.config.checks_async_tp import check_async_tp
from megalite.config.checks_batch import check_batch
from megalite.config.checks_context import check_context
from megalite.config.checks_fp4 import check_fp4
from megalite.config.checks_fp8 import check_fp8
from megalite.config.checks_graphs import check_graphs
from megalite.config.checks_memory import check_chunks, check_memory
from megalite.config.checks_model import check_model
from megalite.config.checks_moe import check_moe
from megalite.config.checks_optimizer import check_optimizer
from megalite.config.checks_pipeline import check_pipeline
from megalite.config.checks_preference import check_preference
from megalite.config.checks_profile import check_profile
from megalite.config.checks_qat import check_qat
from megalite.config.checks_schedule import check_schedule
from megalite.config.checks_wire import check_wire
from megalite.config.engine import choose_engine
from megalite.config.evaluation import check_evaluation
from megalite.config.fill import fill
from megalite.config.length_stages import check_length_stages, length_stages
from megalite.config.plan import default_world_size, derive_dp, ends_apart, has_copies, needs_embedding_at_head
from megalite.config.recompute import check_recompute
from megalite.config.schema import Config
from megalite.config.sections.precision import PrecisionConfig
from megalite.config.stream import check_stream
from megalite.config.wording import divisors, near, or_, unused
from megalite.errors import ConfigError
from megalite.section import problems_of

ANY_VOCAB_SIZE = 1
"""Stands in for a tokenizer's; no check depends on it."""


def validate(config: Config, world_size: int) -> None:
    """Check a config for a number of ranks.

    Args:
        config: from `load_config`, or built in Python.
        world_size: ranks that will run it; `plan.default_world_size` when megalite starts them itself.

    Raises:
        ConfigError: everything that is wrong, one sentence each.
    """
    problems = _problems(config, world_size)
    problems += list(check_length_stages(config)) if not problems else []
    stages = length_stages(config) if not problems else ()
    for stage in stages if len(stages) > 1 else ():
        found = _problems(stage.config, world_size, is_stage=True)
        problems += [f"{each} (from step {stage.first_step} on, batch.stages)" for each in found]
    problems += check_chunks(stage.config for stage in stages) if stages else ()
    if problems:
        raise ConfigError(problems)


def _problems(config: Config, world_size: int, *, is_stage: bool = False) -> list[str]:
    """All complaints about a config, its stages left out; it may be that of one of them."""
    model = fill(config, ANY_VOCAB_SIZE)
    return [
        *(f"{'.'.join(keys)}: {sentence}" for keys, sentence in problems_of(config)),
        *_world(config, world_size),
        *_tensor_parallel(config, model),
        *check_async_tp(config),
        *check_stream(config),
        *check_context(config, model),
        *check_pipeline(config, world_size),
        *check_batch(config, world_size),
        *check_model(config, model),
        *check_moe(config, model, world_size),
        *_precision(config),
        *check_fp8(config, model),
        *check_fp4(config, model),
        *check_qat(config, model),
        *check_wire(config, world_size),
        *_flash_attention(config),
        *check_graphs(config, model),
        *_compile(config),
        *check_memory(config),
        *check_recompute(config, model),
        *check_preference(config, model),
        *_length(config),
        *check_evaluation(config),
        *check_optimizer(config, model),
        *check_profile(config, world_size),
        *_monitor(config),
        *check_schedule(config, is_stage=is_stage),
        *_periods(config),
        *_health(config, model, world_size),
    ]


def _world(config: Config, world_size: int) -> Iterator[str]:
    pp, dp, cp, tp = config.parallel.pp, config.parallel.dp, config.parallel.cp, config.parallel.tp
    shard, needed = pp * cp * tp, default_world_size(config)
    if dp is None and world_size % shard:
        yield (
            f"parallel.dp: null cannot be derived: {world_size} ranks are not a multiple of pp x cp x tp = {pp} x {cp} "
            f"x {tp} = {shard}; use {or_(near(world_size, shard))} ranks, or change pp or tp"
        )
    if dp is not None and world_size != needed:
        fitting = f", or set dp={world_size // shard}" if world_size % shard == 0 else ""
        yield (
            f"parallel.dp: found {world_size} ranks, expected pp x dp x cp x tp = {pp} x {dp} x {cp} x {tp} = "
            f"{needed}; use {needed} ranks{fitting}"
        )


def _tensor_parallel(config: Config, model: Architecture) -> Iterator[str]:
    tp = config.parallel.tp
    heads, kv_heads, ffn = model.num_heads, model.num_kv_heads, model.ffn_hidden_size
    fitting = [
        size
        for size in divisors(gcd(heads, ffn))
        if (kv_heads % size == 0 or size % kv_heads == 0) and kv_heads * model.head_dim % size == 0
    ]
    use = f"use tp={or_(fitting)}"
    if heads % tp:
        yield f"parallel.tp: num_heads={heads} is not divisible by tp={tp}; {use}"
    elif kv_heads % tp and tp % kv_heads:
        yield f"parallel.tp: tp={tp} neither divides num_kv_heads={kv_heads} nor is divisible by it; {use}"
    elif kv_heads * model.head_dim % tp:
        yield (
            f"parallel.tp: tp={tp} is larger than num_kv_heads={kv_heads}, and {tp // kv_heads} ranks cannot share a "
            f"head of head_dim={model.head_dim} evenly; {use}"
        )
    if ffn % tp and not all(model.sparse_blocks):  # experts have a width of their own
        yield (
            f"parallel.tp: ffn_hidden_size={ffn} is not divisible by tp={tp}; {use}, "
            f"or ffn_hidden_size={or_(near(ffn, tp))}"
        )


def _precision(config: Config) -> Iterator[str]:
    precision = config.precision
    engine = choose_engine(config)
    if precision.dtype != "fp32" and config.parallel.zero_stage == 0 and engine == "deepspeed":
        yield (
            f"parallel.zero_stage: found 0 with dtype={precision.dtype}, where DeepSpeed applies wrong updates; use "
            "zero_stage=1 (right with dp=1 too), or dtype=fp32"
        )
    yield from _products(precision)
    if precision.dtype != "bf16":
        yield from unused(precision, ("reduce_dtype",), "precision", f"dtype={precision.dtype}")
    if precision.master_dtype == "bf16":
        if precision.dtype != "bf16":
            yield f"precision.master_dtype: bf16 does not go with dtype={precision.dtype}; use dtype=bf16, or fp32 here"
        if config.parallel.zero_stage < 2:
            advice = "use pp=1 and zero_stage=2 or 3" if config.parallel.pp > 1 else "use zero_stage=2 or 3"
            yield (
                f"precision.master_dtype: with zero_stage={config.parallel.zero_stage} masters are kept in fp32; "
                f"{advice} (right with dp=1 too), or master_dtype=fp32"
            )
    if precision.dtype != "fp16":
        yield from unused(precision, ("loss_scale",), "precision", f"dtype={precision.dtype}")
    elif precision.loss_scale.fixed is not None:
        others = [name for name in type(precision.loss_scale).model_fields if name != "fixed"]
        yield from unused(precision.loss_scale, others, "precision.loss_scale", "a fixed scale")
    elif precision.loss_scale.initial < precision.loss_scale.minimum:
        yield (
            f"precision.loss_scale.initial: {precision.loss_scale.initial:g} is below "
            f"minimum={precision.loss_scale.minimum:g}; use {precision.loss_scale.minimum:g} or more"
        )
    if precision.dtype == "fp16" and config.train.device == "cpu":
        yield "precision.dtype: fp16 is for GPUs; use bf16, or fp32, which is faster without bf16 units"


def _products(precision: PrecisionConfig) -> Iterator[str]:
    if precision.dtype != "fp32":
        yield from unused(precision, ("products",), "precision", f"dtype={precision.dtype}")
    elif precision.products != "fp32" and (precision.fp8 is not None or precision.fp4 is not None):
        name = "fp4" if precision.fp4 is not None else "fp8"
        yield (
            f"precision.products: {precision.products} would round what precision.{name} has rounded once more, where "
            f"a device multiplies that in fp32; use products=fp32, or {name}=null"
        )


def _flash_attention(config: Config) -> Iterator[str]:
    kind = config.train.flash_attention
    if kind != "torch" and config.train.device == "cpu":
        yield f"train.flash_attention: {kind} is for GPUs; use torch"
    elif kind != "torch" and config.model.attention_dropout:
        yield (
            f"train.flash_attention: {kind} takes no mask of attention_dropout={config.model.attention_dropout:g}, and "
            "training would not call it; use torch, or model.attention_dropout=0"
        )
    elif kind != "torch" and config.precision.dtype == "fp32":
        yield f"train.flash_attention: {kind} has no kernels for fp32; use torch, or precision.dtype=bf16"


def _compile(config: Config) -> Iterator[str]:
    if config.train.compile == "on" and config.parallel.zero_stage == 3 and choose_engine(config) == "deepspeed":
        yield (
            "train.compile: on gains nothing with DeepSpeed's zero_stage=3, whose gathering hooks the compiler cannot "
            "follow; use compile=auto, engine=fsdp2, or a zero_stage of 2 or less"
        )


def _length(config: Config) -> Iterator[str]:
    train = config.train
    if train.epochs is not None:
        yield (
            f"train.epochs: {train.epochs:g} passes are a number of steps once the data is there, and it has not been "
            "looked at; see `megalite.data.run_config.fill_epochs`"
        )
    elif train.steps is None and train.tokens is None:
        yield "train.steps: null, and so are train.tokens and train.epochs; set one of them"
    if train.steps is not None and train.tokens is not None:
        equal = steps_for_tokens(config.batch, train.tokens)
        yield (
            f"train.tokens: found {train.tokens}, and train.steps={train.steps} too; set one of them to null "
            f"(these tokens are {equal} steps)"
        )
    if train.loss is not None and config.model.z_loss:
        yield f"model.z_loss: {config.model.z_loss:g} has no effect with train.loss={train.loss.name}; use 0"
    if train.branch_from is not None and train.init_from is not None:
        yield (
            "train.branch_from: found beside train.init_from; a branch has its checkpoint's weights, so set one of "
            "them to null"
        )


def _monitor(config: Config) -> Iterator[str]:
    if config.monitor.layers_every is None:
        yield from unused(config.monitor, ("attention_queries",), "monitor", "layers_every=null")


def _health(config: Config, model: Architecture, world_size: int) -> Iterator[str]:
    if config.health.check_replicas_every is None:
        return
    has_embedding_copy = needs_embedding_at_head(model) and ends_apart(config.parallel)
    if not has_copies(config.parallel, derive_dp(config, world_size), has_embedding_copy=has_embedding_copy):
        because = "a layout in which no weight is held by two ranks"
        yield from unused(config.health, ("check_replicas_every",), "health", because)


def _periods(config: Config) -> Iterator[str]:
    checkpoint, eval_every = config.checkpoint, config.train.eval_every
    every, keep_every = checkpoint.every, checkpoint.keep_every
    if keep_every is not None and every is None:
        yield f"checkpoint.keep_every: {keep_every} has no effect with every=null; set every too"
    elif keep_every is not None and every is not None and keep_every % every:
        yield (
            f"checkpoint.keep_every: {keep_every} is not a multiple of every={every}, so most of those steps are never "
            f"saved; use {or_(near(keep_every, every))}"
        )
    missing = [name for name, value in (("every", every), ("train.eval_every", eval_every)) if value is None]
    if checkpoint.keep_best is not None and missing:
        yield (
            f"checkpoint.keep_best: {checkpoint.keep_best} has no effect without {' and '.join(missing)}; set "
            f"{'both' if len(missing) == 2 else 'it'} too"
        )
    if not checkpoint.asynchronous:
        yield from unused(checkpoint, ("if_busy",), "checkpoint", "asynchronous=false")
