"""The engine without a pipeline: a whole model on each rank, on DeepSpeed ZeRO 0-3."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data.loader import Batch
from megalite.engine import grad_norm
from megalite.engine.deepspeed_config import deepspeed_config
from megalite.engine.gate import UpdateGate
from megalite.engine.loss_scaling import LossScaling, loss_scaling, set_loss_scaling
from megalite.engine.one_look import OneLook
from megalite.engine.protocol import LocalState, NonFiniteLossError, StepResult, accept, make_update
from megalite.engine.runtime import quiet
from megalite.engine.stage_state import StageState
from megalite.engine.steps import (
    PRODUCT_DTYPES,
    count_valid_tokens,
    documents_of_batch,
    judged,
    set_accumulation,
    set_clipping,
    set_learning_rate,
    step_result,
    sums_on_host,
    targets_of_batch,
    token_weight,
)
from megalite.model.initialize import WeightSource
from megalite.model.transformer import Stage
from megalite.optim.optimizer import OwnedState
from megalite.optim.optimizers import build_optimizer
from megalite.optim.slices import Slice
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce


class ModelParallelUnit:
    """The names by which DeepSpeed asks for tensor- and data-parallel groups (its `mpu`). Collective."""

    def __init__(self, axes: Axes):
        self._tp, self._dp = axes.tp, axes.dp
        self._dp_group = axes.dp.group
        if axes.dp.size == 1:  # DeepSpeed wants a group even for one rank
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


class PlainEngine:
    """See `engine.protocol.Engine`. The stage is the whole model, already filled with weights."""

    def __init__(self, config: Config, plan: RunPlan, axes: Axes, stage: Stage):
        import deepspeed
        from deepspeed.utils import groups

        groups.mpu = None  # a former engine of this process leaves its own behind
        self.stage = stage
        self.before_update: list[Callable[[], None]] = []
        self.judge, self.around_update = accept, make_update
        self.clip_norm = config.optimizer.clip_grad_norm
        self._config, self._plan, self._axes = config, plan, axes
        self._parameters = list(stage.parameters())
        self._clip_here = config.parallel.zero_stage == 0
        with quiet():
            self._engine, *_ = deepspeed.initialize(
                model=stage,
                optimizer=build_optimizer(stage, config.optimizer, PRODUCT_DTYPES[config.precision.dtype]),
                config=deepspeed_config(config, plan),
                mpu=ModelParallelUnit(axes) if axes.tp.size > 1 else None,
                dist_init_required=False,
            )
        self._gate = UpdateGate(self._engine.optimizer)
        self._state = StageState(self._engine, stage, axes, config.parallel.zero_stage)
        self._look = OneLook(self._engine.optimizer, axes, config.parallel.zero_stage, self._see_loss)

    def train_step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        self._engine.train()
        set_learning_rate(self._engine.optimizer, lr)
        set_clipping(self._engine, self.clip_norm, zero_stage=self._config.parallel.zero_stage)
        set_accumulation(self._engine, len(batches))
        num_tokens = count_valid_tokens(batches, self._axes.dp)
        scale = token_weight(len(batches), self._axes.dp, num_tokens)
        total = torch.zeros((), dtype=torch.float32, device=self._engine.device)
        for index, batch in enumerate(batches):
            loss = self._engine(batch.tokens, documents_of_batch(batch), targets_of_batch(batch, scale))
            total += loss.detach()
            self._engine.backward(loss)
            if index + 1 < len(batches):
                self._engine.step()

        loss = all_reduce(total / (len(batches) * self._axes.dp.size), self._axes.dp)
        for hook in self.before_update:
            hook()
        self.stage.precision.end_step()
        self._look.expect(loss, num_tokens)
        norm = self._update()
        why = self._gate.why if self._engine.was_step_applied() else f"gradient norm is {norm}"
        return step_result(self._look.loss, norm, lr, self._look.num_tokens, why)

    def _update(self) -> float:
        """Clip and apply the accumulated gradients, unless the step is refused; return their norm."""
        if not self._clip_here:
            self._gate.prepare(lambda: self._judge(float(self._engine.optimizer._global_grad_norm)), self.around_update)
            self._engine.step()
            return float(self._engine.get_global_grad_norm())
        norm = self._look.fetch(grad_norm.global_grad_norm(self._parameters, self._axes, self._engine.device))
        grad_norm.drop_nonfinite(self._engine.optimizer, self._parameters, norm)
        if self.clip_norm is not None:
            grad_norm.clip(self._parameters, norm, self.clip_norm)
        self._gate.prepare(lambda: self._judge(norm.item()) if norm.isfinite() else "", self.around_update)
        self._engine.step()
        return norm.item()

    def _judge(self, norm: float) -> str:
        return judged(self.judge, self._look.num_tokens)(self._look.loss, norm)

    def _see_loss(self, loss: float) -> None:
        if not math.isfinite(loss) and self._config.health.stop_on_nonfinite:
            raise NonFiniteLossError(f"the loss is {loss}")

    @torch.no_grad()
    def eval_step(self, batches: Sequence[Batch]) -> tuple[float, int]:
        self._engine.eval()
        num_tokens = count_valid_tokens(batches, self._axes.dp)
        total = torch.zeros((), dtype=torch.float32, device=self._engine.device)
        for batch in batches:
            total += self._engine(batch.tokens, documents_of_batch(batch), targets_of_batch(batch))
        return sums_on_host(all_reduce(total, self._axes.dp), num_tokens)

    @torch.no_grad()
    def token_losses(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        self._engine.eval()
        found = []
        for batch in batches:
            targets = targets_of_batch(batch)
            targets.losses = torch.zeros_like(targets.weights)
            self._engine(batch.tokens, documents_of_batch(batch), targets)
            found.append(targets.losses)
        return found

    def slices(self) -> Sequence[Slice]:
        return self._state.slices

    def gradients(self) -> Sequence[torch.Tensor]:
        return self._state.optimizer.gradients()

    def owned_states(self) -> Iterator[OwnedState]:
        return self._state.owned_states()

    def local_weights(self) -> Iterator[LocalState]:
        return self._state.read()

    def loss_scaling(self) -> LossScaling:
        return loss_scaling(self._engine.optimizer)

    def set_loss_scaling(self, state: LossScaling) -> None:
        set_loss_scaling(self._engine.optimizer, state)

    def load(self, source: WeightSource, state: dict[str, WeightSource], num_updates: int) -> None:
        self._state.write(source, state, num_updates)

    def close(self) -> None:
        from deepspeed.utils import groups

        self._engine.destroy()
        groups.mpu = None
