"""Building an engine: the one place that asks which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from megalite.config.engine import choose_engine
from megalite.config.plan import RunPlan, compile_pays, has_embedding_copy
from megalite.config.recompute import recompute_by_block
from megalite.config.schema import Config, OptimizerConfig
from megalite.config.sections.optimizer import WeightGroupConfig
from megalite.config.stream import stream_tokens
from megalite.engine.preference import FrozenModel, PreferenceEngine, WithoutAdapters
from megalite.engine.protocol import Engine
from megalite.layers.context import choose_context, choose_latent_context
from megalite.layers.parts import choose_parts
from megalite.layers.precision import ONE_FORMAT, Precision
from megalite.layers.weight_gradients import TakeGradient
from megalite.model.initialize import WeightSource
from megalite.model.spec import ChunkSpec, StageSpec
from megalite.model.transformer import Stage
from megalite.parallel.axes import SINGLE, Axes, connect_ends, connect_sharers

OpenWeights = Callable[[], WeightSource]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_stage(
    config: Config,
    plan: RunPlan,
    axes: Axes,
    device: torch.device,
    source: WeightSource,
    take_gradient: TakeGradient | None = None,
    *,
    is_filled: bool = True,
) -> Stage:
    """Build this rank's stage of the model on a device and fill it with weights, in fp32.

    Args:
        take_gradient: gets the gradients of the weights that products make; None leaves them to autograd.
        is_filled: False leaves parameters unset, and in the host's memory.
    """
    loss, dtype = config.train.loss, DTYPES[config.precision.dtype]
    parts = choose_parts(
        plan.model,
        device.type,
        dtype,
        choose_precision(config, plan, axes, device),
        None if loss is None else loss.function(),
        take_gradient,
        stream_tokens(config),
    )
    over_context, again = (choose_context(axes.cp, config.parallel.cp_kind, keeps_all=each) for each in (True, False))
    spec = StageSpec(
        model=plan.model,
        chunks=tuple(
            ChunkSpec(plan.chunk_blocks[chunk], is_first=chunk == 0, is_last=chunk == len(plan.chunk_blocks) - 1)
            for chunk in plan.chunks_of(axes.pp.rank)
        ),
        tp=axes.tp,
        sharers=connect_sharers(axes, plan.model.num_kv_heads),
        cp=axes.cp,
        ep=axes.ep,
        sequence_parallel=config.parallel.sequence_parallel and axes.tp.size > 1,
        async_tp=config.parallel.async_tp,
        recompute=recompute_by_block(config, plan),
        parts=replace(
            parts,
            over_context=over_context,
            over_context_again=again,
            over_latents=choose_latent_context(axes.cp, config.parallel.cp_kind),
            mlp_chunk_tokens=config.train.mlp_chunk_tokens,
        ),
        offload=config.train.offload_activations,
        seed=config.run.seed,
    )
    stage = Stage(spec, source, is_filled=is_filled)
    if is_filled:
        stage.to(device)
    stage.routers.to(device)
    return stage


def choose_precision(config: Config, plan: RunPlan, axes: Axes, device: torch.device) -> Precision:
    """The precision of a stage's linear layers."""
    fp8, qat = config.precision.fp8, config.precision.qat
    keep_weights = not plan.sharding.weights
    if qat is not None:
        from megalite.layers.qat.precision import Qat

        return Qat(qat, plan.model.num_layers, keep_weights)
    if config.precision.fp4 is not None:
        from megalite.layers.fp4.precision import Fp4

        return Fp4(config.precision.fp4, plan.model, device, keep_weights, config.run.seed)
    if fp8 is None:
        return ONE_FORMAT
    from megalite.layers.fp8.backends import choose_backend
    from megalite.layers.fp8.precision import Fp8

    backend = choose_backend(
        fp8,
        tp=axes.tp,
        replicas=axes.replicas,
        device=device,
        keep_weights=keep_weights,
        is_compiled=compile_pays(config, plan, device.type),
    )
    return Fp8(fp8, plan.model.num_layers, backend)


def build_engine(config: Config, plan: RunPlan, axes: Axes, device: torch.device, source: WeightSource) -> Engine:
    """Build the engine that a config asks for. Collective.

    Args:
        source: where the initial weights come from. Half-precision masters are made of them rounded, and are to be set
            by `Engine.load`.
    """
    if choose_engine(config) == "native":
        from megalite.engine.native.engine import NativeEngine
        from megalite.engine.native.sums import GradientSums

        sums = GradientSums()
        stage = build_stage(config, plan, axes, device, source, sums.take).to(DTYPES[config.precision.dtype])
        ends = connect_ends(axes) if has_embedding_copy(plan) else SINGLE
        engine: Engine = NativeEngine(config, plan, axes, stage, sums, ends)
    elif choose_engine(config) == "fsdp2":
        from megalite.engine.fsdp2.engine import Fsdp2Engine

        stage = build_stage(config, plan, axes, device, source, is_filled=False)
        engine = Fsdp2Engine(config, plan, axes, stage, source, device)
    else:
        from megalite.engine.deepspeed.engine import DeepSpeedEngine

        stage = build_stage(config, plan, axes, device, source)
        engine = DeepSpeedEngine(config, plan, axes, stage)
    if compile_pays(config, plan, device.type):
        stage.compile_blocks()
    return engine


def with_preference(
    engine: Engine, config: Config, plan: RunPlan, axes: Axes, device: torch.device, reference: OpenWeights
) -> Engine:
    """The engine as a run trains with it: over pairs of answers where the config asks for that. Collective.

    Args:
        reference: opens the weights that the run began with.
    """
    settings = config.train.preference
    if settings is None:
        return engine
    frozen: FrozenModel = WithoutAdapters(engine)
    if config.model.lora is None:
        nothing_trained = OptimizerConfig(groups=(WeightGroupConfig(match=("*",), frozen=True),))
        frozen = build_engine(config.model_copy(update={"optimizer": nothing_trained}), plan, axes, device, reference())
    return cast("Engine", PreferenceEngine(engine, frozen, settings, axes.batch))
