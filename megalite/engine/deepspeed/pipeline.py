"""The engine with a pipeline: one stage of the model a rank, on DeepSpeed's PipelineEngine (1F1B), ZeRO 0 or 1.

DeepSpeed sees each stage as a single layer, so that everything inside it (recomputation, names, rotary tables) is ours.
Between stages travels the stream alone. What every stage must know of a micro-batch's documents, it takes from its own
copy of the batch, which every rank has read: shapes may not change on the way from one micro-batch to the next, and
borders do.

    tokens [t] -> stage 0 -> stream [t, h] -> stage 1 -> ... -> the last stage -> loss
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.schedule import ForwardPass, OptimizerStep
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.data.loader import Batch
from megalite.engine.deepspeed.base import DeepSpeedEngine, forget_former_engine
from megalite.engine.deepspeed.config import deepspeed_config
from megalite.engine.grad_norm import TIED_COPY_MARK
from megalite.engine.protocol import StepResult
from megalite.engine.runtime import quiet
from megalite.engine.steps import (
    PRODUCT_DTYPES,
    count_valid_tokens,
    documents_of_batch,
    sums_on_host,
    targets_of_batch,
    token_weight,
)
from megalite.layers.documents import Documents, Targets
from megalite.model.transformer import Stage
from megalite.optim.optimizers import build_optimizer
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import all_reduce


class PipelineEngine(DeepSpeedEngine):
    """See `engine.protocol.Engine`. The stage is this rank's, already filled with weights."""

    def __init__(self, config: Config, plan: RunPlan, axes: Axes, stage: Stage):
        forget_former_engine()
        with quiet():
            module = _StagedModule(stage, axes)
            json = deepspeed_config(config, plan)
            engine = _SteppingEngine(
                args=None,
                model=module,
                optimizer=build_optimizer(stage, config.optimizer, PRODUCT_DTYPES[config.precision.dtype]),
                mpu=module.mpu(),
                config=json,
                config_class=DeepSpeedConfig(json, module.mpu()),
                dist_init_required=False,
            )
        super().__init__(engine, stage, config, axes)
        engine.before_update = self._end_losses
        self._num_tokens: Tensor | None = None
        """Valid tokens of the global batch at hand."""

    def train_step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        self._begin_step(lr, len(batches))
        self._num_tokens = count_valid_tokens(batches, self._axes.batch)
        scale = token_weight(len(batches), self._axes.replicas, self._num_tokens)
        self._engine.train_batch(self._feed(batches, scale))
        return self._update.result(lr)

    def _feed(self, batches: Sequence[Batch], scale: Tensor | float) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Micro-batches as the pipeline takes them: inputs for the first stage, targets for the last. Every stage is
        told of their documents."""
        self._layer.documents = deque(map(documents_of_batch, batches))
        targets = (targets_of_batch(batch, scale) for batch in batches)
        return ((batch.tokens, (each.labels, each.weights)) for batch, each in zip(batches, targets, strict=True))

    @property
    def _layer(self) -> _StageLayer:
        return self._engine.module.forward_funcs[0]

    def _end_losses(self, total_loss: Tensor | None) -> None:
        """The step's loss, which the last stages have in parts, the same on all ranks; then what comes before an
        update."""
        loss = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        if total_loss is not None and self._axes.tp.rank == 0:
            loss += total_loss.double() / (self._engine.gradient_accumulation_steps() * self._axes.replicas.size)
        assert self._num_tokens is not None
        self._end_gradients(all_reduce(loss, self._axes.world), self._num_tokens)

    def eval_step(self, batches: Sequence[Batch]) -> tuple[float, int]:
        num_tokens = count_valid_tokens(batches, self._axes.batch)
        mean = self._engine.eval_batch(self._feed(batches, 1.0), num_micro_batches=len(batches))
        loss, tokens = sums_on_host(mean.reshape(()), num_tokens)  # DeepSpeed's mean has one dim on some stages
        return loss * len(batches) * self._axes.replicas.size, tokens

    def token_losses(self, batches: Sequence[Batch]) -> list[Tensor]:
        layer = self._layer
        layer.token_losses = []
        self._engine.eval_batch(self._feed(batches, 1.0), num_micro_batches=len(batches))
        found, layer.token_losses = layer.token_losses, None
        if not self.stage.spec.is_last:
            found = [torch.zeros(batch.tokens.shape[0], device=batch.tokens.device) for batch in batches]
        return list(all_reduce(torch.stack(found), self._axes.pp))


class _StageLayer(nn.Module):
    """A stage as the one layer that DeepSpeed sees of it."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage
        self.documents: deque[Documents] = deque()
        """Of the micro-batches to come, in the order in which every stage gets them; set by the engine."""
        self.targets: tuple[Tensor, ...] = ()
        """Labels and weights of the micro-batch at hand, on the last stage; set by the engine."""
        self.token_losses: list[Tensor] | None = None
        """Gathers each micro-batch's `Targets.losses`, when set."""

    def forward(self, x: Tensor) -> Tensor:
        documents = self.documents.popleft()
        if not self.stage.spec.is_last:
            return self.stage(x, documents)
        targets = Targets(*self.targets)
        if self.token_losses is not None:
            targets.losses = torch.zeros_like(targets.weights)
            self.token_losses.append(targets.losses)
        return self.stage(x, documents, targets)


class _BuiltLayer(LayerSpec):
    """A layer spec whose layer exists already."""

    def __init__(self, layer: nn.Module):
        super().__init__(type(layer))
        self._layer = layer

    def build(self, log: bool = False) -> nn.Module:
        return self._layer


class _StagedModule(PipelineModule):
    """DeepSpeed's view of the pipeline: as many layers as stages, this rank's being ours."""

    def __init__(self, stage: Stage, axes: Axes):
        layer = _StageLayer(stage)
        mesh = axes.mesh
        super().__init__(
            layers=[_BuiltLayer(layer)] * mesh.pp,
            topology=PipeModelDataParallelTopology(num_pp=mesh.pp, num_dp=mesh.dp, num_mp=mesh.tp),
            partition_method="uniform",
            loss_fn=lambda loss, targets: loss,
        )

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Tie the embedding of the first stage to the head of the last, when the model says so.

        DeepSpeed sums the gradients of tied weights over the group, and counts only the first copy in norms.
        """
        stage: Stage = self.forward_funcs[0].stage
        if self.num_stages == 1 or not stage.spec.model.tie_embeddings:
            return {}
        topology, ties = self._topo, {}
        for data in range(topology.get_dim("data")):
            for model in range(topology.get_dim("model")):
                ranks = [topology.get_rank(pipe=pipe, data=data, model=model) for pipe in (0, self.num_stages - 1)]
                group = dist.new_group(ranks)
                if self.global_rank in ranks:
                    owner = stage.embedding if stage.spec.is_first else stage.head
                    assert owner is not None, "the first stage has an embedding, the last a head"
                    ties["embedding"] = {"ranks": ranks, "group": group, "weight_attr": ["weight"], "module": owner}
                    setattr(owner.weight, TIED_COPY_MARK, self.global_rank != ranks[0])
                    self.tied_modules["embedding"] = owner
        return ties


class _SteppingEngine(DeepSpeedPipelineEngine):
    """DeepSpeed's pipeline engine, which tells the loss before the update."""

    before_update: Callable[[Tensor | None], None]
    """Given the sum of the micro-batches' losses on the last stages, None on the others; set by our engine."""

    def _exec_forward_pass(self, buffer_id: int) -> None:
        """Hand the targets to the last stage, which makes the loss inside its forward pass.

        DeepSpeed's own way is a `loss_fn` after the module. Its bf16 optimizer clears gradients when the backward pass
        enters the module, and by then the head's would be there already: the head would never learn.
        """
        if self.is_last_stage():
            self.module.forward_funcs[0].targets = self.pipe_buffers["labels"][buffer_id]
        super()._exec_forward_pass(buffer_id)

    def _exec_optimizer_step(self, lr_kwargs: dict | None = None) -> None:
        self.before_update(self.total_loss if self.is_last_stage() else None)
        super()._exec_optimizer_step(lr_kwargs)

    def _aggregate_total_loss(self) -> None:
        """DeepSpeed's own mean of the losses, which nobody asks for: it sends zeros to the device first, and waits."""

    _INSTRUCTION_MAP = {  # noqa: RUF012  (DeepSpeed looks an instruction's method up here, not by name)
        **DeepSpeedPipelineEngine._INSTRUCTION_MAP,
        ForwardPass: _exec_forward_pass,
        OptimizerStep: _exec_optimizer_step,
    }
