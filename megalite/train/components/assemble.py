"""The components of a run: one line each. The order is that in which they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megalite.config.batch_sizes import tokens_before
from megalite.config.plan import has_copies, has_embedding_copy
from megalite.errors import UserError
from megalite.monitor.layers import LayerStatistics
from megalite.train.components.adaptive_control import AdaptiveControl
from megalite.train.components.balance import Balance
from megalite.train.components.brought import brought_components
from megalite.train.components.component import Component, Context
from megalite.train.components.expert_watch import ExpertWatch
from megalite.train.components.fp8_watch import FP8_FILE, Fp8Watch
from megalite.train.components.further_predictions import FurtherPredictions
from megalite.train.components.layer_statistics import LayerStatisticsEvery
from megalite.train.components.memory_check import MemoryCheck
from megalite.train.components.metrics import Metrics
from megalite.train.components.plan_comparison import comparison_of
from megalite.train.components.profiler import FOLDER, Profiler
from megalite.train.components.qat_start import QatStart
from megalite.train.components.replica_check import ReplicaCheck
from megalite.train.components.rollback_limit import RollbackLimit
from megalite.train.components.spikes import SkippedSteps, SpikeGuard
from megalite.train.components.straggler_timer import StragglerTimer
from megalite.train.components.validation import ValidateEvery
from megalite.train.evaluation.evaluator import Evaluator
from megalite.train.replicas import Replicas
from megalite.train.run import Run


@dataclass(frozen=True)
class Components:
    """All of a run, and those that the loop itself asks."""

    control: AdaptiveControl
    rollbacks: RollbackLimit
    spikes: SpikeGuard | None
    validation: ValidateEvery | None
    balance: Balance
    everything: tuple[Component, ...]

    def __iter__(self) -> Iterator[Component]:
        return iter(self.everything)


def assemble(run: Run, first_step: int) -> Components:
    """Make the components that a config asks for.

    Args:
        first_step: steps done before this attempt.
    """
    config, recorder = run.config, run.recorder
    control = AdaptiveControl(config, run.plan, engine=run.engine, axes=run.axes, device=run.device, recorder=recorder)
    spikes, rollbacks = _spikes(run), RollbackLimit(config, recorder)
    validation, balance = _validation(run, control), Balance(config, run.axes, run.device, recorder)
    found = (
        control,
        balance,
        _layer_statistics(run),
        _fp8_watch(run, first_step),
        _qat_start(run, first_step),
        _expert_watch(run),
        Metrics(recorder),
        SkippedSteps(recorder, spikes),
        rollbacks,
        spikes,
        _further_predictions(run),
        _memory_check(run),
        _replica_check(run, first_step),
        validation,
        comparison_of(config, run.plan, recorder, run.device),
        StragglerTimer(run.heartbeat, run.device, config.slurm.probe_seconds),
        *brought_components(config, Context(config, run.plan, run.axes, run.device, run.engine, recorder)),
        _profiler(run),  # the last: a step ends where it has been told so
    )
    everything = tuple(each for each in found if each is not None)
    _refuse_equal_names(everything)
    return Components(control, rollbacks, spikes, validation, balance, everything)


def _refuse_equal_names(components: tuple[Component, ...]) -> None:
    for name, count in Counter(component.name for component in components).items():
        if count > 1:
            raise UserError(f"train.components.{name}: megalite has a component of this name; rename the plug-in's")


def _spikes(run: Run) -> SpikeGuard | None:
    settings = run.config.health.spikes
    if settings is None:
        return None
    return SpikeGuard(
        settings,
        engine=run.engine,
        axes=run.axes,
        device=run.device,
        recorder=run.recorder,
        adapts_scale=run.config.precision.dtype == "fp16",
    )


def _layer_statistics(run: Run) -> LayerStatisticsEvery | None:
    settings, seq_len = run.config.monitor, run.config.batch.seq_len
    if settings.layers_every is None:
        return None
    statistics = LayerStatistics(run.engine, run.plan.model, run.axes, seq_len, settings.attention_queries)
    return LayerStatisticsEvery(statistics, run.recorder, settings.layers_every)


def _fp8_watch(run: Run, first_step: int) -> Fp8Watch | None:
    fp8 = run.config.precision.fp8
    if fp8 is None or fp8.watch_every is None:
        return None
    watch = Fp8Watch(
        run.engine,
        fallback_error=fp8.fallback_error,
        dtype=run.config.precision.dtype,
        axes=run.axes,
        device=run.device,
        recorder=run.recorder,
        path=run.config.run.dir / FP8_FILE,
        every=fp8.watch_every,
    )
    watch.start_at(first_step)
    return watch


def _qat_start(run: Run, first_step: int) -> QatStart | None:
    qat = run.config.precision.qat
    if qat is None or qat.start_step <= 1:
        return None
    return QatStart(run.engine, run.recorder, qat.start_step, first_step)


def _expert_watch(run: Run) -> ExpertWatch | None:
    if run.plan.model.moe is None:
        return None
    return ExpertWatch(run.config.health.experts, engine=run.engine, axes=run.axes, recorder=run.recorder)


def _further_predictions(run: Run) -> FurtherPredictions | None:
    mtp = run.plan.model.mtp
    return None if mtp is None else FurtherPredictions(mtp, run.engine)


def _memory_check(run: Run) -> MemoryCheck | None:
    every = run.config.health.check_memory_every
    return None if every is None else MemoryCheck(run.engine, run.axes, run.recorder, every)


def _replica_check(run: Run, first_step: int) -> ReplicaCheck | None:
    every, at_head = run.config.health.check_replicas_every, has_embedding_copy(run.plan)
    if every is None or not has_copies(run.config.parallel, run.plan.dp, has_embedding_copy=at_head):
        return None
    return ReplicaCheck(Replicas(run.engine, run.axes), run.recorder, every, first_step)


def _profiler(run: Run) -> Profiler | None:
    settings, rank = run.config.monitor.profile, run.axes.global_rank
    if settings is None or (settings.ranks is not None and rank not in settings.ranks):
        return None
    return Profiler(
        settings,
        run.engine,
        folder=run.config.run.dir / FOLDER,
        rank=rank,
        device=run.device,
        recorder=run.recorder,
        heartbeat=run.heartbeat,
    )


def _validation(run: Run, control: AdaptiveControl) -> ValidateEvery | None:
    if not run.valid_sets and not run.tasks:
        return None
    settings = run.config.train
    evaluator = Evaluator(
        run.config.model_copy(update={"batch": run.whole.batch}),  # the same micro-batches in every stage
        run.plan,
        sets=run.valid_sets,
        tasks=run.tasks,
        engine=run.engine,
        axes=run.axes,
        device=run.device,
    )
    return ValidateEvery(
        evaluator,
        every=settings.eval_every,
        early_stopping=settings.early_stopping,
        recorder=run.recorder,
        heartbeat=run.heartbeat,
        tokens_at=lambda step: tokens_before(run.whole.batch, step + 1),
        listeners=(control.note_validation,),
    )
