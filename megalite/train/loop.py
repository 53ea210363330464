"""The training loop.

    for each step: read -> components before it -> train, and vote -> components after it -> save when due

The loop knows nothing of parallelism or of what components do: an `Engine` does the step, a `Loader` reads this rank's
share, and every decision that changes what happens next is taken by all ranks together. A *stretch* is a run of steps
that are read in one go; it ends as `Ended` says.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import NoReturn

from megalite.checkpoint.format import Progress
from megalite.data import audit
from megalite.data.cursor import add_counts
from megalite.data.loader import Batch, Loader
from megalite.engine.protocol import NonFiniteLossError, StepResult
from megalite.errors import EXIT_DONE, EXIT_REQUEUE, CheckpointError, StartError, UserError
from megalite.loop_checks import check_answer, check_state, check_step
from megalite.optim.schedules import last_stable_step
from megalite.parallel.collectives import agree, any_rank, from_all
from megalite.train.checkpoints import Checkpoints, open_checkpoints
from megalite.train.components.assemble import assemble
from megalite.train.components.component import Component, RollBack, Step
from megalite.train.rollback import go_back
from megalite.train.run import Run


class Ended(Enum):
    """What ended a stretch of steps."""

    LAST_STEP = auto()
    EARLY = auto()
    """A component has found that there is nothing more to gain."""
    STOPPED = auto()
    """As asked; the run is to be continued."""
    ROLLED_BACK = auto()
    """The run stands at an earlier step, and other data may come next."""
    BATCH_GROWN = auto()
    """Other samples make the next step than were being read ahead."""
    STAGE = auto()
    """Sequences of another length come next, which take another engine."""


EXIT_CODES = {Ended.LAST_STEP: EXIT_DONE, Ended.EARLY: EXIT_DONE, Ended.STOPPED: EXIT_REQUEUE, Ended.STAGE: None}
"""Where this loop is over; from the others it goes on."""


class ComponentError(RuntimeError):
    """A component has failed in the middle of training."""


@dataclass(frozen=True)
class Wishes:
    """What any rank was asked, as all ranks know after a vote."""

    stop: bool
    save: bool
    end_early: bool
    roll_back: bool


class TrainingLoop:
    """Trains from where `progress` stands to the last step of the plan, which is the run's or its stage's."""

    def __init__(self, run: Run, progress: Progress):
        self.run, self.progress = run, progress
        self.samples = run.samples
        self._components = assemble(run, progress.step)
        self._control, spikes = self._components.control, self._components.spikes
        self._load_states(progress)
        self._checkpoints = open_checkpoints(
            run,
            saved_step=progress.step or None,
            is_in_trouble=lambda: spikes is not None and spikes.is_in_trouble,
        )
        self._trunk = last_stable_step(run.plan.total_steps, run.plan.schedule)

    def _load_states(self, progress: Progress) -> None:
        """Let every component take up where the run goes on from.

        Raises:
            CheckpointError: one cannot.
        """
        states = dict(progress.components)
        for component in self._components:
            try:
                component.load_state(states.pop(component.name, {}))
                check_state(component.state())
                check_answer(component.stop_reason(), str)
            except Exception as error:
                raise CheckpointError(
                    f"component {component.name}: it cannot go on from its state at step {progress.step} "
                    f"({type(error).__name__}: {error}); mend it, set it up as it was, or begin a new run from these "
                    "weights (train.init_from)"
                ) from error
        for name in states:
            why = f"this run has no component {name}; what it had to remember goes"
            self.run.recorder.note("component_gone", progress.step, component=name, why=why)

    def train(self) -> int | None:
        """Train to the end or to a stop request, and close everything; return the exit code, None where another stage
        of the run follows."""
        try:
            code = self._train()
        except BaseException:
            for failure in _failures("close", (self._checkpoints, *self._components)):
                self.run.recorder.say(str(failure))  # raised, it would hide what ended the run
            raise
        for failure in _failures("close", (self._checkpoints, *self._components)):
            raise failure
        return code

    def _train(self) -> int | None:
        if why := self._shared_stop_reason():
            self.run.recorder.say(f"the run has ended early before: {why}")
            self._end(Ended.EARLY, is_again=True)
            return EXIT_DONE
        while True:
            ended = self._stretch()
            if ended in EXIT_CODES:
                self._end(ended)
                return EXIT_CODES[ended]

    def _stretch(self) -> Ended:
        """Train for as long as the data goes on as planned."""
        run, sizes = self.run, self._control.batch_sizes
        loader = Loader.for_run(
            self.samples,
            run.config,
            sizes,
            dp_size=run.axes.batch.size,
            dp_rank=run.axes.batch.rank,
            pin_memory=run.device.type == "cuda",
            speeds=self._components.balance.speeds_from(self.progress.step + 1, sizes),
        )
        clock = time.perf_counter()
        try:
            for number, batches in loader.steps(self.progress.step + 1, run.plan.last_step):
                step, result = self._train_step(number, batches)
                step.seconds = time.perf_counter() - clock
                ended = self._after_step(step, result)
                if ended is not None:
                    return ended
                if self._control.batch_sizes != sizes:
                    return Ended.BATCH_GROWN
                clock = time.perf_counter()
                run.heartbeat.enter("data", number + 1)
        finally:
            loader.close()
        return Ended.LAST_STEP if run.plan.last_step == run.plan.total_steps else Ended.STAGE

    def _train_step(self, number: int, batches: list[Batch]) -> tuple[Step, StepResult]:
        run, step = self.run, self._step(number, batches)
        run.heartbeat.enter("train", number)
        for component in self._components:
            with _naming(component, "before_step", step):
                component.before_step(step)
        self._control.settle(step)
        try:
            result = run.engine.train_step(step.batches, step.lr, partial(self._ballot, step))
        except NonFiniteLossError as error:
            run.recorder.event("nonfinite", number, why=str(error))
            raise
        first, stop = step.samples.start, step.samples.stop
        self.progress = replace(
            self.progress,
            step=number,
            num_updates=self.progress.num_updates + (not result.skipped),
            num_samples=stop,
            num_tokens=step.num_tokens_total,
            data_chain=audit.chain(self.progress.data_chain, self.samples, first, stop),
            consumed=add_counts(self.progress.consumed, self.samples.count(first, stop)),
        )
        return step, result

    def _step(self, number: int, batches: list[Batch]) -> Step:
        sizes, run = self._control.batch_sizes, self.run
        samples = range(sizes.first_sample(number), sizes.first_sample(number + 1))
        num_tokens = len(samples) * run.config.batch.seq_len
        return Step(
            number,
            [batch.to(run.device, non_blocking=True) for batch in batches],
            samples,
            self.samples,
            num_tokens=num_tokens,
            num_tokens_total=self.progress.num_tokens + num_tokens,
        )

    def _after_step(self, step: Step, result: StepResult) -> Ended | None:
        """All that follows a step; what ended the stretch, None when it goes on."""
        self._measure(step, result)
        wish = self._wish("after_step", lambda component: component.after_step(step, result), step)
        number, wishes = step.number, self._count_votes(step, result, wish)
        if wishes.roll_back:
            return self._roll_back(wish)
        if wishes.save:
            self.run.stop.note_save()
        every, is_last = self.run.config.checkpoint.every, number == self.run.plan.last_step
        is_due = wishes.save or number == self._trunk or (every is not None and number % every == 0 and not is_last)
        is_saved = is_due or wishes.stop or wishes.end_early or is_last
        if is_saved and self._rolls_back_before_save(number):
            return Ended.ROLLED_BACK
        if is_due:
            self._checkpoints.save(self._whole_progress(), self._validation_loss())
        if wishes.end_early:
            return Ended.EARLY
        return Ended.STOPPED if wishes.stop and number < self.run.plan.total_steps else None

    def _measure(self, step: Step, result: StepResult) -> None:
        """Let every component add numbers to the step's line, none another's."""
        for component in self._components:
            with _naming(component, "measure", step):
                component.measure(step, result)

    def _ballot(self, step: Step) -> list[int]:
        """What this rank tells all others in a step, who learn the sums: what it was asked, how the pending save goes,
        and with what rate and clipping it trains."""
        run, number = self.run, step.number
        asked = (run.stop.is_asked(number), run.stop.is_save_asked(), *self._checkpoints.saver.flags())
        settings = zlib.crc32(repr((float(step.lr), step.clip_norm and float(step.clip_norm))).encode())
        halves = divmod(settings, 2**16)  # whose squares a sum of fp64 holds exactly
        return [*map(int, asked), *halves, *(half**2 for half in halves)]

    def _count_votes(self, step: Step, result: StepResult, wish: RollBack | None) -> Wishes:
        """What all ranks were asked and wish, the same on each. Collective where a plug-in's component has a say, which
        may be one rank's alone; those of megalite's say the same on all.

        Raises:
            ComponentError: ranks did not train with the same rate and clipping.
        """
        run = self.run
        run.heartbeat.enter("save", step.number)
        *votes, high, low, squares_of_high, squares_of_low = result.told
        size = run.axes.world.size
        if high**2 != size * squares_of_high or low**2 != size * squares_of_low:  # some differ: a variance is not 0
            self._refuse_different(step)
        stop, save, is_busy, has_failed = (count > 0 for count in votes)
        self._checkpoints.settle(is_busy=is_busy, has_failed=has_failed)
        wants = [bool(self._stop_reason()), wish is not None]
        if any(component.is_brought for component in self._components):
            wants = agree(wants, run.axes.world, run.device)
        return Wishes(stop, save, *wants)

    def _refuse_different(self, step: Step) -> NoReturn:
        """Say which ranks trained a step with what rate and clipping. Collective."""
        said = from_all((f"lr={step.lr!r}, clip_norm={step.clip_norm!r}", step.set_by), self.run.axes.world)
        other = next(rank for rank, each in enumerate(said) if each[0] != said[0][0])
        told = "; ".join(f"rank {rank}: {said[rank][0]}, last set by {said[rank][1]}" for rank in (0, other))
        raise ComponentError(
            f"ranks have trained step {step.number} with different settings ({told}); mend the component, so that it "
            "sets the same on all ranks, or leave it out"
        )

    def _wish(
        self, moment: str, ask: Callable[[Component], RollBack | None], step: Step | None = None
    ) -> RollBack | None:
        """Ask every component at some moment; the first wish to go back. A plug-in's may be this rank's alone, so that
        all are asked; one of megalite's is every rank's, and ends the asking."""
        first = None
        for component in self._components:
            with _naming(component, moment, step):
                wish = check_answer(ask(component), RollBack, type(None))
                skipped = wish.skip_samples if wish is not None and component.is_brought else None
                if skipped and skipped > (most := self._num_samples()):
                    raise ValueError(f"RollBack: skip_samples is {skipped}, but the run has {most} samples")
            first = first or wish
            if wish is not None and not component.is_brought:
                break
        return first

    def _rolls_back_before_save(self, step: int) -> bool:
        """Ask every component whether a checkpoint may be made; go back when one does not want it. Collective."""
        wish = self._wish("before_save", lambda component: component.before_save(step))
        is_wanted = wish is not None
        if any(component.is_brought for component in self._components):
            is_wanted = any_rank(is_wanted, self.run.axes.world, self.run.device)
        return is_wanted and self._roll_back(wish) is Ended.ROLLED_BACK

    def _num_samples(self) -> int:
        """What the whole run reads, as batches are now."""
        return self._control.batch_sizes.first_sample(self.run.plan.total_steps + 1)

    def _roll_back(self, mine: RollBack | None) -> Ended:
        """Go back to the last checkpoint from before a step, as the first rank wants it that wants to. Collective.

        Raises:
            Unstable: that has been tried too often.
        """
        run, now = self.run, self.progress
        wish = next(filter(None, from_all(mine, run.axes.world)))
        self._components.rollbacks.count(now.step, wish.why)
        self._checkpoints.settle_pending()
        self.progress, self.samples, origin = go_back(run, self.samples, now, wish.before, wish.skip_samples)
        step = self.progress.step
        for component in self._components:
            with _naming(component, "rewind"):
                component.rewind(step, self.progress.components.get(component.name, {}))
        self._checkpoints.went_back_to(step)
        left_out = [list(gap) for gap in self.progress.account.gaps]
        run.recorder.event("rollback", now.step, why=wish.why, to_step=step, origin=origin, left_out=left_out)
        run.recorder.say(f"step {now.step}: {wish.why}; back to {origin}, step {step}")
        return Ended.ROLLED_BACK

    def _end(self, ended: Ended, *, is_again: bool = False) -> None:
        """See to it that the last step is saved, whatever fails before, and say how the run ended."""
        run, step = self.run, self.progress.step
        is_finishing = not is_again and ended not in (Ended.STOPPED, Ended.STAGE)
        failures = _failures("finish", self._components, step) if is_finishing else []
        run.heartbeat.enter("save", step)
        self._checkpoints.finish(self._whole_progress(), self._validation_loss())
        for failure in failures:
            raise failure
        if ended is Ended.STAGE:
            run.recorder.event("stage_done", step, seq_len=run.config.batch.seq_len)
            run.recorder.say(f"step {step}: the last with sequences of {run.config.batch.seq_len:,} tokens")
            return
        run.heartbeat.enter("done", step)
        if ended is Ended.STOPPED:
            run.recorder.event("stop", step, why=run.stop.why(step))
            run.recorder.say(f"stopped at step {step} as asked; the same command goes on from here")
            return
        if ended is Ended.EARLY and step < run.plan.total_steps:
            why = self._shared_stop_reason()
            run.recorder.event("early_stop", step, why=why)
            run.recorder.say(f"stopped early at step {step}: {why}")
        run.recorder.event("done", step, consumed=self._consumed())

    def _whole_progress(self) -> Progress:
        """Where the run stands, with the state of its components."""
        states = {}
        for component in self._components:
            with _naming(component, "state"):
                states[component.name] = check_state(component.state())
        return replace(self.progress, components={name: state for name, state in states.items() if state})

    def _consumed(self) -> dict[str, dict[str, int]]:
        """What the run has read of each source."""
        lengths = {source.name: each.samples.seq_len for each in self.run.stages for source in each.samples.sources}
        return {
            name: {"samples": count, "tokens": count * lengths.get(name, self.run.config.batch.seq_len)}
            for name, count in self.progress.consumed.items()
        }

    def _stop_reason(self) -> str:
        """Why this rank finds that the run should end; empty when it should go on."""
        for component in self._components:
            with _naming(component, "stop_reason"):
                if why := check_answer(component.stop_reason(), str):
                    return why
        return ""

    def _shared_stop_reason(self) -> str:
        """Why any rank finds so; all say the same. Collective."""
        return next(filter(None, from_all(self._stop_reason(), self.run.axes.world)), "")

    def _validation_loss(self) -> float | None:
        """The watched validation loss of this very step."""
        return None if (found := self._components.validation) is None else found.loss_at(self.progress.step)


def _failures(method: str, parts: Iterable[Component | Checkpoints], *arguments: int) -> list[Exception]:
    """Call a method of all, whatever one of them does; what has failed."""
    failures: list[Exception] = []
    for part in parts:
        try:
            with _naming(part, method):
                getattr(part, method)(*arguments)
        except Exception as error:
            failures.append(error)
    return failures


@contextmanager
def _naming(component: Component | Checkpoints, method: str, step: Step | None = None) -> Iterator[None]:
    """Name the component that fails, or does to a step what it may not, where the error does not say by itself what is
    to be done."""
    former = step and replace(step, figures=dict(step.figures), batches=list(step.batches))
    try:
        yield
        if step is not None and former is not None:
            check_step(method, former, step)
            if (step.lr, step.clip_norm) != (former.lr, former.clip_norm):
                step.set_by = component.name
    except (UserError, StartError):
        raise
    except Exception as error:
        where = f"{type(component).__module__}.{type(component).__qualname__}"
        raise ComponentError(
            f"component {component.name} ({where}) failed in {method}: {type(error).__name__}: {error}"
        ) from error
