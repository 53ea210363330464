"""The engine on DeepSpeed ZeRO 0-3: a whole model on each rank, no pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count

import torch
from torch import Tensor, nn

from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.config.stream import stream_unit
from megalite.data.loader import Batch
from megalite.engine.batch_cut import BatchCut, documents_of_batch
from megalite.engine.deepspeed.config import deepspeed_config
from megalite.engine.deepspeed.frozen import clear_frozen
from megalite.engine.deepspeed.gathers import gather_unseen
from megalite.engine.deepspeed.loss_scaling import loss_scaling, set_loss_scaling, stay_at_minimum
from megalite.engine.deepspeed.partition import ZeroPartition
from megalite.engine.deepspeed.released import keep_no_weights
from megalite.engine.deepspeed.start import quiet, start_deepspeed
from megalite.engine.deepspeed.update import UpdateStep
from megalite.engine.evaluation import sum_losses, token_losses
from megalite.engine.hooks import UpdateHooks
from megalite.engine.protocol import Ask, GradientObserver, LossScaling, LossSum, StepResult, nothing
from megalite.engine.stage_state import EngineOfState, StageState
from megalite.engine.steps import (
    PRODUCT_DTYPES,
    count_loss,
    losses_of_step,
    set_accumulation,
    set_learning_rate,
    targets_of_batch,
    token_axes,
    token_weight,
)
from megalite.model.initialize import WeightSource
from megalite.model.transformer import Stage
from megalite.optim.optimizers import build_optimizer
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce
from megalite.spans import span


class ModelParallelUnit:
    """The names by which DeepSpeed asks for tensor- and data-parallel groups (its `mpu`). Collective."""

    def __init__(self, axes: Axes):
        self._tp, self._dp = axes.tp, axes.replicas
        self._dp_group = axes.replicas.group
        if axes.replicas.size == 1:  # DeepSpeed wants a group even for one rank
            alone = [torch.distributed.new_group([rank]) for rank in range(axes.world.size)]
            self._dp_group = alone[axes.global_rank]

    def get_model_parallel_rank(self) -> int:
        return self._tp.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tp.size

    def get_model_parallel_group(self) -> torch.distributed.ProcessGroup | None:
        return self._tp.group

    def get_data_parallel_rank(self) -> int:
        return self._dp.rank

    def get_data_parallel_world_size(self) -> int:
        return self._dp.size

    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup | None:
        return self._dp_group


def forget_former_engine() -> None:
    """DeepSpeed keeps groups of an engine in a global, where they would leak into the next."""
    from deepspeed.utils import groups

    groups.mpu = None


class DeepSpeedEngine(EngineOfState):
    """See `engine.protocol.Engine`.

    Args:
        stage: the whole model, already filled with weights.
    """

    def __init__(self, config: Config, plan: RunPlan, axes: Axes, stage: Stage):
        start_deepspeed(next(stage.parameters()).device.type)
        import deepspeed

        forget_former_engine()
        with quiet():
            engine, *_ = deepspeed.initialize(
                model=stage,
                optimizer=build_optimizer(stage, config.optimizer, PRODUCT_DTYPES[config.precision.dtype]),
                config=deepspeed_config(config, plan),
                mpu=ModelParallelUnit(axes) if axes.tp.size > 1 else None,
                dist_init_required=False,
            )
        self.stage = stage
        self.hooks = UpdateHooks()
        self.clip_norm = config.optimizer.clip_grad_norm
        clear_frozen(stage, config.optimizer)
        stay_at_minimum(engine.optimizer)
        self._keeping: Callable[[], AbstractContextManager[None]] = nullcontext
        if config.parallel.zero_stage == 3:
            gather_unseen(engine.optimizer)
            self._keeping = keep_no_weights
        self._engine, self._axes = engine, axes
        self._cut = BatchCut(axes.cp, config.parallel.cp_kind, plan.model, stream_unit(config))
        self.observed_weight = float(axes.replicas.size)  # DeepSpeed averages over them
        optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        partition = ZeroPartition(engine, stage, axes, config.parallel.zero_stage)
        self._state = StageState(optimizer, stage, axes, partition)
        self._update = UpdateStep(engine, list(stage.parameters()), config, axes, self.hooks)

    def train_step(self, batches: Sequence[Batch], lr: float, ask: Ask = nothing) -> StepResult:
        self._engine.train()
        set_learning_rate(self._engine.optimizer, lr)
        self._update.set_clipping(self.clip_norm)
        set_accumulation(self._engine, len(batches))
        count = count_loss(batches, self._axes.batch)
        scale = token_weight(len(batches), self._axes.replicas, count)
        total = torch.zeros((), dtype=torch.float32, device=self._engine.device)
        for index, batch in enumerate(map(self._cut.own, batches)):
            documents, targets = documents_of_batch(batch), targets_of_batch(batch, scale)
            documents.loss_share = 1.0 / len(batches)  # as DeepSpeed divides the loss it is given
            documents.loss_weights = targets.weights * documents.loss_share
            with span("forward"), self._keeping():
                loss = self._engine(batch.tokens, documents, targets)
            total += loss.detach()
            with span("backward"):
                self._engine.backward(loss)
                if index + 1 < len(batches):
                    self._engine.step()

        self.stage.precision.end_step()
        replicas = self._axes.replicas
        losses = losses_of_step(total, self.stage) / (len(batches) * replicas.size)
        with span("optimizer"):
            self._update.prepare(all_reduce(losses, replicas), count.num_tokens, ask)
            self._engine.step()
        result = self._update.result(lr)
        self.stage.routers.end_step(token_axes(self.stage, self._axes), is_skipped=result.skipped)
        return result

    def eval_step(self, batches: Sequence[Batch]) -> LossSum:
        self._engine.eval()
        with span("evaluate"):
            return sum_losses(self._engine, self._cut, batches, self._axes, self._engine.device)

    def token_losses(self, batches: Sequence[Batch]) -> list[Tensor]:
        self._engine.eval()
        return token_losses(self._engine, self._cut, batches)

    def observe_gradients(self, observer: GradientObserver) -> Callable[[], None]:
        def tell(parameter: nn.Parameter) -> Callable[[Tensor], None]:
            micro_batch = count()
            return lambda gradient: observer(parameter, gradient, next(micro_batch))

        handles = [parameter.register_hook(tell(parameter)) for parameter in self.stage.parameters()]

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    def loss_scaling(self) -> LossScaling:
        return loss_scaling(self._engine.optimizer)

    def set_loss_scaling(self, state: LossScaling) -> None:
        set_loss_scaling(self._engine.optimizer, state)

    def load(self, source: WeightSource, state: dict[str, WeightSource], num_updates: int) -> None:
        self._state.write(source, state, num_updates)

    def close(self) -> None:
        self._engine.destroy()
        forget_former_engine()
