"""What the engines on DeepSpeed share: weights and state by canonical name, loss scaling, hooks, the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from torch import Tensor, nn

from megalite.config.schema import Config
from megalite.engine.deepspeed.loss_scaling import loss_scaling, set_loss_scaling
from megalite.engine.deepspeed.partition import ZeroPartition
from megalite.engine.deepspeed.update import UpdateStep
from megalite.engine.hooks import UpdateHooks
from megalite.engine.parts import Part
from megalite.engine.protocol import GradientObserver, HeldWeight, LocalState, LossScaling
from megalite.engine.stage_state import StageState
from megalite.engine.steps import set_accumulation, set_learning_rate
from megalite.model.initialize import WeightSource
from megalite.model.transformer import Stage
from megalite.optim.optimizer import OwnedState
from megalite.optim.slices import Slice
from megalite.parallel.axes import Axes


def forget_former_engine() -> None:
    """DeepSpeed keeps groups of an engine in a global, where they would leak into the next."""
    from deepspeed.utils import groups

    groups.mpu = None


class DeepSpeedEngine:
    """See `engine.protocol.Engine`; what `PlainEngine` and `PipelineEngine` have in common.

    Args:
        engine: DeepSpeed's, made for the stage.
        stage: this rank's, already filled with weights.
    """

    def __init__(self, engine: Any, stage: Stage, config: Config, axes: Axes):
        self.stage = stage
        self.hooks = UpdateHooks()
        self.clip_norm = config.optimizer.clip_grad_norm
        self._engine, self._axes = engine, axes
        self.observed_weight = float(axes.replicas.size)  # DeepSpeed averages over them
        optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        partition = ZeroPartition(engine, stage, axes, config.parallel.zero_stage)
        self._state = StageState(optimizer, stage, axes, partition)
        self._update = UpdateStep(engine, list(stage.parameters()), config, axes, self.hooks)

    def _begin_step(self, lr: float, num_micro_batches: int) -> None:
        set_learning_rate(self._engine.optimizer, lr)
        self._update.set_clipping(self.clip_norm)
        set_accumulation(self._engine, num_micro_batches)

    def _end_gradients(self, loss: Tensor, num_tokens: Tensor) -> None:
        """All gradients of a step are there, and DeepSpeed's `step` follows."""
        self.stage.precision.end_step()
        self._update.prepare(loss, num_tokens)

    def observe_gradients(self, observer: GradientObserver) -> Callable[[], None]:
        def tell(parameter: nn.Parameter) -> Callable[[Tensor], None]:
            micro_batch = count()
            return lambda gradient: observer(parameter, gradient, next(micro_batch))

        handles = [parameter.register_hook(tell(parameter)) for parameter in self.stage.parameters()]

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    def slices(self) -> Sequence[Slice]:
        return self._state.slices

    def gradients(self) -> Sequence[Tensor]:
        return self._state.optimizer.gradients()

    def owned_states(self) -> Iterator[OwnedState]:
        return self._state.owned_states()

    def owned_parts(self) -> Iterator[Part]:
        return self._state.owned_parts()

    def held_weights(self) -> list[HeldWeight]:
        return self._state.held_weights()

    def local_weights(self) -> Iterator[LocalState]:
        return self._state.read()

    def loss_scaling(self) -> LossScaling:
        return loss_scaling(self._engine.optimizer)

    def set_loss_scaling(self, state: LossScaling) -> None:
        set_loss_scaling(self._engine.optimizer, state)

    def load(self, source: WeightSource, state: dict[str, WeightSource], num_updates: int) -> None:
        self._state.write(source, state, num_updates)

    def close(self) -> None:
        self._engine.destroy()
        forget_former_engine()
