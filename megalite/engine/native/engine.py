"""The engine of our own; see `engine.protocol.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.config.stream import own_tokens, stream_unit
from megalite.data.loader import Batch
from megalite.engine.batch_cut import BatchCut
from megalite.engine.grad_norm import END_COPY_MARK
from megalite.engine.hooks import UpdateHooks
from megalite.engine.loss_scaling import choose_scaler
from megalite.engine.native.buckets import BUCKET_NUMBERS, Bucket, FlatWeights, StillBucket, plan_buckets
from megalite.engine.native.graphs import MicroBatchGraphs
from megalite.engine.native.replication import Replication
from megalite.engine.native.sums import GradientSums
from megalite.engine.partition import OverReplicas
from megalite.engine.programs import Programs
from megalite.engine.protocol import Ask, GradientObserver, HeldWeight, LossScaling, LossSum, StepResult, nothing
from megalite.engine.runner import ProgramRunner
from megalite.engine.stage_state import EngineOfState, StageState
from megalite.engine.steps import PRODUCT_DTYPES, count_loss, losses_of_step, sums_on_host, token_axes
from megalite.engine.still import still_and_trained
from megalite.engine.update import Update
from megalite.engine.wire import choose_wire
from megalite.errors import UnavailableError
from megalite.layers.mlp import MLP
from megalite.model.initialize import EXPERT_MARK, WeightSource
from megalite.model.transformer import Stage
from megalite.optim.optimizers import build_optimizer
from megalite.parallel.axes import Axes, Axis, connect_hops
from megalite.parallel.collectives import all_reduce
from megalite.spans import span

BucketT = TypeVar("BucketT", bound=FlatWeights)


class NativeEngine(EngineOfState):
    """ZeRO 0 and 1, of whole models and of pipelines.

    A token has its weight in the mean over the global batch, and gradients are summed over the replicas.

    Args:
        stage: this rank's, filled with weights; its gradients go to `sums`.
        sums: made before the stage.
        ends: the first and the last stage of this rank's pipeline, where both have the embedding.
    """

    observed_weight = 1.0

    def __init__(self, config: Config, plan: RunPlan, axes: Axes, stage: Stage, sums: GradientSums, ends: Axis):
        self.stage, self.hooks = stage, UpdateHooks()
        self.clip_norm = config.optimizer.clip_grad_norm
        self._axes, self._sums = axes, sums
        self._scaler = choose_scaler(config)
        self._programs = Programs(config, plan, axes.pp.rank)
        self._cut = BatchCut(axes.cp, config.parallel.cp_kind, plan.model, stream_unit(config))
        optimizer = build_optimizer(stage, config.optimizer, PRODUCT_DTYPES[config.precision.dtype])
        is_sharded = plan.sharding.optimizer
        still, trained = still_and_trained(stage, config.optimizer)
        at_ends = _held_at_ends(stage) if ends.size > 1 else None
        if at_ends is not None:
            setattr(at_ends, END_COPY_MARK, not stage.spec.has_embedding)
            at_ends = None if at_ends in frozenset(still) else at_ends
        wire = choose_wire(config.precision)
        ours = partial(Bucket, on_host=config.optimizer.offload, wire=wire)
        self._buckets = _make_buckets(ours, trained, axes, is_sharded=is_sharded, first=at_ends)
        still_buckets = _make_buckets(StillBucket, still, axes, is_sharded=is_sharded)
        self._replication = Replication(
            self._buckets,
            is_sharded=is_sharded,
            end_sums=[self._buckets[0].views[0]] if at_ends is not None else [],
            ends=ends,
            wire=wire,
            hops=connect_hops(axes, config.parallel.reduce_within),
        )
        uses, num_at_end = _uses(stage, own_tokens(config)), int(at_ends is not None)
        sums.bind(self._buckets, uses, self._replication.reduce, num_at_end=num_at_end)
        partition = BucketPartition(self._buckets, still_buckets, self._replication, axes, is_sharded=is_sharded)
        self._state = StageState(optimizer, stage, axes, partition)
        counted = [index for index, part in enumerate(self._state.slices) if not part.is_copy]
        self._update = Update(
            optimizer,
            self._buckets,
            axes,
            self.hooks,
            counted=counted,
            scaler=self._scaler,
            stop_on_nonfinite=config.health.stop_on_nonfinite,
        )
        self._runner = ProgramRunner(
            stage,
            axes,
            plan.chunks_of(axes.pp.rank),
            len(plan.chunk_ranks),
            hold_back=sums.held_back,
            make_held=sums.add,
            on_micro_batch=sums.now_at,
        )
        self._graphs = self._plan_graphs() if config.train.cuda_graphs else None
        if wire.gather_bits is not None:
            self._replication.gather()  # a run computes with rounded weights from its first step on
        stage.before_layer = self._await_weights
        self._bucket_of_layer = _layers_of(stage, self._buckets)

    def train_step(self, batches: Sequence[Batch], lr: float, ask: Ask = nothing) -> StepResult:
        self._be_in_mode(training=True)
        count = count_loss(batches, self._axes.batch)
        scale = (1.0 if self._scaler is None else self._scaler.scale) / count.divisor.float()
        own = [self._cut.own(batch) for batch in batches]
        losses = self._passes(own, scale)
        self._sums.finish()
        self.stage.precision.end_step()
        with span("reduce"):
            self._replication.wait_for_sums()
        if self._axes.tp.rank:
            losses = torch.zeros_like(losses)  # all tp ranks have the same
        with span("optimizer"):
            result = self._update.make(losses, count.num_tokens, lr=lr, clip_norm=self.clip_norm, ask=ask)
        self.stage.routers.end_step(token_axes(self.stage, self._axes), is_skipped=result.skipped)
        if not result.skipped:
            with span("reduce"):
                self._replication.gather()
        return result

    def eval_step(self, batches: Sequence[Batch]) -> LossSum:
        self._be_in_mode(training=False)
        count = count_loss(batches, self._axes.batch)
        own = [self._cut.own(batch) for batch in batches]
        total = self._runner.evaluate(self._programs.evaluation(len(own)), own)
        for axis in (self._axes.pp, self._axes.replicas):
            total = all_reduce(total, axis)
        return sums_on_host(total, count)

    def token_losses(self, batches: Sequence[Batch]) -> list[Tensor]:
        self._be_in_mode(training=False)
        own = [self._cut.own(batch) for batch in batches]
        found = self._runner.token_losses(self._programs.evaluation(len(own)), own)
        of_rank = all_reduce(torch.stack(found), self._axes.pp)
        return [self._cut.whole(*each) for each in zip(of_rank, own, batches, strict=True)]

    def observe_gradients(self, observer: GradientObserver) -> Callable[[], None]:
        self._sums.observer = observer

        def end() -> None:
            self._sums.observer = None

        return end

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        self._replication.wait_for_weights()
        with super().averaged_weights():
            yield
            self._replication.wait_for_weights()

    def held_weights(self) -> list[HeldWeight]:
        self._replication.wait_for_weights()
        return super().held_weights()

    def loss_scaling(self) -> LossScaling:
        return {} if self._scaler is None else self._scaler.state()

    def set_loss_scaling(self, state: LossScaling) -> None:
        if self._scaler is not None:
            self._scaler.load(state)

    def load(self, source: WeightSource, state: dict[str, WeightSource], num_updates: int) -> None:
        self._replication.wait_for_weights()
        self._state.write(source, state, num_updates)
        self._forget_graphs()

    def close(self) -> None:
        self._replication.wait_for_weights()
        self._forget_graphs()

    def _plan_graphs(self) -> MicroBatchGraphs:
        stage, train, program = self.stage, self._runner.train, self._programs.training(1)
        if next(stage.parameters()).device.type == "cpu":
            raise UnavailableError("train.cuda_graphs: it is for GPUs, and this run is on the CPU; use false")

        def run(batch: Batch, scale: Tensor) -> Tensor:
            return losses_of_step(train(program, [batch], scale), stage)

        def totals() -> list[Tensor]:
            return [*sums, *(router.noted for router in stage.routers.by_name.values())]

        sums = [bucket.sums for bucket in self._buckets]
        return MicroBatchGraphs(run, totals, lambda: stage.further.weight)

    def _passes(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """All passes of a step: its losses (`losses_of_step`), this rank's."""
        if self._graphs is None or self._sums.observer is not None:  # a graph tells nobody anything
            self._sums.begin(len(batches))
            loss = self._runner.train(self._programs.training(len(batches)), batches, scale)
            return losses_of_step(loss, self.stage)
        self._replication.wait_for_weights()
        self._sums.begin_with_zeros()
        with span("backward"):  # both passes, which a record has as one
            return self._graphs.train(batches, scale)

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()

    def _be_in_mode(self, *, training: bool) -> None:
        if self.stage.training != training:  # it goes through all modules
            self.stage.train(training)

    def _await_weights(self, layer: str) -> None:
        self._replication.wait_for_weights(self._bucket_of_layer[layer])


class BucketPartition(OverReplicas):
    """See `engine.partition.Partition`."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        still: Sequence[StillBucket],
        replication: Replication,
        axes: Axes,
        *,
        is_sharded: bool,
    ):
        super().__init__(axes, divides_state=is_sharded, divides_weights=False)
        self._buckets, self._still, self._replication = buckets, still, replication
        self._places: dict[nn.Parameter, tuple[FlatWeights, int]] = {
            parameter: (bucket, number)
            for bucket in (*buckets, *still)
            for number, parameter in enumerate(bucket.parameters)
        }

    def updates(self, parameter: nn.Parameter) -> bool:
        return not isinstance(self._places[parameter][0], StillBucket)

    def part_of(self, parameter: nn.Parameter) -> tuple[int, Tensor] | None:
        bucket, number = self._places[parameter]
        return bucket.part_of(number)

    def flat_weights(self) -> list[Tensor]:
        return [bucket.master for bucket in self._buckets]

    def held(self, parameter: nn.Parameter) -> Tensor:
        return parameter

    def refresh(self, weights: WeightSource, *, with_still: bool = True) -> None:
        for bucket in self._buckets:
            bucket.round_weights()
        if with_still:
            self._replication.gather_still(self._still)
        self._replication.gather()

    def spare(self) -> list[Tensor]:
        return [bucket.spare for bucket in self._buckets]


def _make_buckets(
    kind: Callable[..., BucketT],
    parameters: Sequence[nn.Parameter],
    axes: Axes,
    *,
    is_sharded: bool,
    first: nn.Parameter | None = None,
) -> list[BucketT]:
    """Parameters in buckets, in their order; those of experts, which other ranks share, apart.

    Args:
        first: one that has the first bucket for itself.
    """
    found = [(0, [first])] if first is not None else []
    places = {parameter: place for place, parameter in enumerate(parameters) if parameter is not first}
    for is_expert in (False, True):
        members = [parameter for parameter in places if getattr(parameter, EXPERT_MARK) == is_expert]
        for bucket in plan_buckets([parameter.numel() for parameter in members], BUCKET_NUMBERS):
            group = [members[number] for number in bucket]
            found.append((places[group[0]] + 1, group))
    found.sort(key=lambda each: each[0])
    return [kind(group, _replicas_of(group, axes), is_sharded=is_sharded) for _, group in found]


def _replicas_of(group: Sequence[nn.Parameter], axes: Axes) -> Axis:
    return axes.replicas_of(is_expert=getattr(group[0], EXPERT_MARK))


def _uses(stage: Stage, num_tokens: int) -> dict[nn.Parameter, int]:
    """How often a micro-batch makes a gradient of a weight, where that is not once.

    Args:
        num_tokens: that an MLP is given.
    """
    uses: dict[nn.Parameter, int] = {}
    of_head = 1 + len(stage.mtp)
    if stage.head is not None and of_head > 1:
        uses[stage.head.weight] = of_head
    if stage.embedding is not None:
        passes = 2 if stage.mtp and len(stage.spec.chunks) > 1 else 1  # the first chunk's and the last one's
        if stage.embedding.hands_over:
            passes = int(stage.spec.has_embedding) + len(stage.mtp)  # each lookup by itself
        uses[stage.embedding.weight] = passes + (of_head if _shares_head(stage) else 0)
    for block in stage.all_blocks():
        if isinstance(block.mlp, MLP) and block.mlp.chunk_tokens is not None:
            count = -(-num_tokens // block.mlp.chunk_tokens)
            uses |= dict.fromkeys(block.mlp.handed_over(), count)
    return uses


def _shares_head(stage: Stage) -> bool:
    """Whether the embedding's parameter is the head's as well."""
    return stage.embedding is not None and stage.head is not None and stage.head.weight is stage.embedding.weight


def _held_at_ends(stage: Stage) -> nn.Parameter | None:
    """The embedding, or the head that is tied to it, which first and last stage both have."""
    if stage.embedding is not None:
        return stage.embedding.weight
    return stage.head.weight if stage.head is not None else None


def _layers_of(stage: Stage, buckets: Sequence[Bucket]) -> dict[str, list[int]]:
    """The buckets that each layer of a stage has weights in, by the layer's name."""
    homes = {parameter: number for number, bucket in enumerate(buckets) for parameter in bucket.parameters}
    found: dict[str, set[int]] = {}
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        layer = ".".join(name.split(".")[: 2 if name.startswith(("blocks.", "mtp.")) else 1])
        of_layer = found.setdefault(layer, set())
        if parameter in homes:  # else it is frozen, and always there
            of_layer.add(homes[parameter])
    return {layer: sorted(numbers) for layer, numbers in found.items()}
