"""Building an engine: the one place that asks whether there is a pipeline."""

from __future__ import annotations

import torch

from megalite.config.plan import RunPlan, compile_pays
from megalite.config.schema import Config
from megalite.engine.protocol import Engine
from megalite.layers.parts import choose_parts
from megalite.layers.precision import ONE_FORMAT, Precision
from megalite.model.initialize import WeightSource
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage
from megalite.parallel.axes import Axes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_stage(config: Config, plan: RunPlan, axes: Axes, device: torch.device, source: WeightSource) -> Stage:
    """Build this rank's stage of the model on a device and fill it with weights."""
    loss, dtype = config.train.loss, DTYPES[config.precision.dtype]
    spec = StageSpec(
        model=plan.model,
        blocks=plan.stage_blocks[axes.pp.rank],
        is_first=axes.pp.rank == 0,
        is_last=axes.pp.rank == axes.pp.size - 1,
        tp=axes.tp,
        sequence_parallel=config.parallel.sequence_parallel and axes.tp.size > 1,
        recompute=config.train.recompute,
        parts=choose_parts(
            plan.model,
            device.type,
            dtype,
            choose_precision(config, plan, axes, device),
            None if loss is None else loss.function(),
        ),
        seed=config.run.seed,
    )
    return Stage(spec, source).to(device)


def choose_precision(config: Config, plan: RunPlan, axes: Axes, device: torch.device) -> Precision:
    """The precision of a stage's linear layers."""
    fp8 = config.precision.fp8
    if fp8 is None:
        return ONE_FORMAT
    from megalite.layers.fp8.backends import choose_backend
    from megalite.layers.fp8.precision import Fp8

    keep_weights = not plan.sharding.weights
    backend = choose_backend(fp8, tp=axes.tp, replicas=axes.replicas, device=device, keep_weights=keep_weights)
    return Fp8(fp8, plan.model.num_layers, backend)


def build_engine(config: Config, plan: RunPlan, axes: Axes, device: torch.device, source: WeightSource) -> Engine:
    """Build the engine that a config asks for. Collective.

    Args:
        source: where the initial weights come from. Half-precision masters are made of them rounded, and are to be set
            by `Engine.load`.
    """
    stage = build_stage(config, plan, axes, device, source)
    if axes.pp.size > 1:
        from megalite.engine.deepspeed.pipeline import PipelineEngine

        engine: Engine = PipelineEngine(config, plan, axes, stage)
    else:
        from megalite.engine.deepspeed.plain import PlainEngine

        engine = PlainEngine(config, plan, axes, stage)
    if compile_pays(config, plan, device.type):
        stage.compile_blocks()
    return engine
