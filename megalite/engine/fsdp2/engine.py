"""The engine on torch's FSDP2: ZeRO-3 that compiles, and that divides experts; see `engine.protocol.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.config.stream import stream_unit
from megalite.data.loader import Batch
from megalite.engine.batch_cut import BatchCut, documents_of_batch
from megalite.engine.evaluation import sum_losses, token_losses
from megalite.engine.fsdp2.modules import Divided, Traffic
from megalite.engine.fsdp2.shards import Shard, ShardPartition
from megalite.engine.hooks import UpdateHooks
from megalite.engine.loss_scaling import choose_scaler
from megalite.engine.protocol import Ask, GradientObserver, LossScaling, LossSum, StepResult, nothing
from megalite.engine.stage_state import EngineOfState, StageState
from megalite.engine.steps import (
    PRODUCT_DTYPES,
    count_loss,
    losses_of_step,
    targets_of_batch,
    token_axes,
)
from megalite.engine.still import still_and_trained
from megalite.engine.update import Update
from megalite.engine.wire import choose_wire
from megalite.errors import UserError
from megalite.model.initialize import EXPERT_MARK, WeightSource
from megalite.model.transformer import Stage
from megalite.optim.optimizers import build_optimizer
from megalite.parallel.axes import Axes, connect_groups
from megalite.spans import span

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REDUCE_DTYPES = {None: torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}


class Fsdp2Engine(EngineOfState):
    """ZeRO 3 without a pipeline. Gradients are added up in fp32 where they are divided, micro-batch by micro-batch.

    Args:
        stage: the whole model in fp32, its parameters unset: no rank ever has all of them in its memory.
        source: of the weights.
    """

    observed_weight = 1.0

    def __init__(
        self, config: Config, plan: RunPlan, axes: Axes, stage: Stage, source: WeightSource, device: torch.device
    ):
        self.stage, self.hooks = stage, UpdateHooks()
        self.clip_norm = config.optimizer.clip_grad_norm
        self._axes, self._device = axes, device
        self._scaler = choose_scaler(config)
        self._cut = BatchCut(axes.cp, config.parallel.cp_kind, plan.model, stream_unit(config))
        reduce_dtype = REDUCE_DTYPES[config.precision.reduce_dtype]
        groups = connect_groups(axes, config.parallel.dp_replicate)
        parallel = config.parallel
        for parameter in still_and_trained(stage, config.optimizer)[0]:
            parameter.requires_grad_(False)
        wire, on_host = choose_wire(config.precision), config.optimizer.offload
        traffic = Traffic(wire, parallel.reduce_within, parallel.hpz_size, on_host)
        self._divided = Divided(stage, axes, groups, device, DTYPES[config.precision.dtype], reduce_dtype, traffic)
        optimizer = build_optimizer(stage, config.optimizer, PRODUCT_DTYPES[config.precision.dtype])
        self._shards = {
            parameter: Shard(
                parameter,
                axes.expert_replicas if getattr(parameter, EXPERT_MARK) and axes.ep.size > 1 else groups.shards,
            )
            for parameter in stage.parameters()
        }
        self._state = StageState(optimizer, stage, axes, ShardPartition(self._shards, self._divided, axes, groups))
        for shard in self._shards.values():
            shard.rows.zero_()  # what no weight has, padding, stays so
        self._state.set_weights(source)
        self._update = Update(
            optimizer,
            [shard for parameter, shard in self._shards.items() if parameter.requires_grad],
            axes,
            self.hooks,
            counted=[index for index, part in enumerate(self._state.slices) if not part.is_copy],
            scaler=self._scaler,
            stop_on_nonfinite=config.health.stop_on_nonfinite,
        )

    def train_step(self, batches: Sequence[Batch], lr: float, ask: Ask = nothing) -> StepResult:
        self.stage.train()
        count = count_loss(batches, self._axes.batch)
        scale = (1.0 if self._scaler is None else self._scaler.scale) / count.divisor.float()
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for batch in map(self._cut.own, batches):
            documents, targets = documents_of_batch(batch), targets_of_batch(batch, scale)
            documents.loss_weights = targets.weights
            with span("forward"):
                loss = self.stage(batch.tokens, documents, targets)
            total += loss.detach()
            with span("backward"):
                loss.backward()
        self.stage.precision.end_step()
        losses = losses_of_step(total, self.stage)
        if self._axes.tp.rank:
            losses = torch.zeros_like(losses)  # all tp ranks have the same
        with span("optimizer"):
            result = self._update.make(losses, count.num_tokens, lr=lr, clip_norm=self.clip_norm, ask=ask)
        self.stage.routers.end_step(token_axes(self.stage, self._axes), is_skipped=result.skipped)
        for shard in self._shards.values():
            shard.forget_gradients()
        return result

    def eval_step(self, batches: Sequence[Batch]) -> LossSum:
        self.stage.eval()
        with span("evaluate"):
            found = sum_losses(self.stage, self._cut, batches, self._axes, self._device)
        self._divided.let_go()
        return found

    def token_losses(self, batches: Sequence[Batch]) -> list[Tensor]:
        self.stage.eval()
        found = token_losses(self.stage, self._cut, batches)
        self._divided.let_go()
        return found

    def observe_gradients(self, observer: GradientObserver) -> Callable[[], None]:
        raise UserError(
            "parallel.engine: fsdp2 reduces a gradient before anybody can see it whole; use null, and zero_stage=1"
        )

    def loss_scaling(self) -> LossScaling:
        return {} if self._scaler is None else self._scaler.state()

    def set_loss_scaling(self, state: LossScaling) -> None:
        if self._scaler is not None:
            self._scaler.load(state)

    def load(self, source: WeightSource, state: dict[str, WeightSource], num_updates: int) -> None:
        self._state.write(source, state, num_updates)

    def close(self) -> None:
        """Nothing is held but memory."""
