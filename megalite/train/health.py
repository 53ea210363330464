"""What a run does when training goes wrong: skip, cut the rate, roll back, and in the end give up with a reason.

    engine.judge   asked inside every step, before the update: is this one left out?      [all ranks vote]
    note           after the step: write down what happened, say what follows
    blame          before a rollback: one more try, or the end of the run

Everything here follows from numbers that all ranks share, so all ranks do the same; `state` goes into every checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.engine.protocol import StepResult
from megalite.errors import UserError
from megalite.parallel.collectives import any_rank
from megalite.train.spikes import Remedy, SpikeWatch

if TYPE_CHECKING:
    from megalite.train.trainer import Run


MOST_DOCUMENTS = 1000
"""Of a step that was left out: an event names no more."""


class Unstable(UserError):
    """Training goes wrong again and again at the same place."""


class Health:
    """Watches the steps of a run.

    Args:
        run: whose engine asks this object before every update, where spikes are looked for.
        state: from the checkpoint that the run goes on from, empty at its start.
    """

    def __init__(self, run: Run, state: dict[str, Any]):
        self._run = run
        self._settings = run.config.health
        self._restore(state)
        self._was_refused = False
        if self._settings.spikes is not None:
            run.engine.judge = self._judge

    def lr_factor(self, step: int) -> float:
        """What the learning rate of a step is multiplied with."""
        return self._spikes.lr_factor(step) if self._spikes else 1.0

    @property
    def first_spike(self) -> int | None:
        """The first of the spikes that the run is in; None when it is quiet."""
        return self._spikes.first_spike if self._spikes else None

    def note(self, step: int, result: StepResult, samples: range) -> Remedy:
        """Write down a finished step's trouble and say what follows from it.

        Args:
            samples: the run's samples that it read.
        """
        settings, config = self._settings.spikes, self._run.config
        was_refused, self._was_refused = self._was_refused, False
        if not result.num_tokens:
            self._record("empty_batch", step, result, samples)
            return "none"
        if result.skipped:
            self._record("spike" if was_refused else "skip", step, result, samples)
        if step >= self._tried_at + self._quiet_steps:
            self._num_tries = 0
        if self._spikes is None:
            return "none"
        is_spike = was_refused or (result.skipped and config.precision.dtype != "fp16")  # there the loss scale adapts
        if result.skipped and not is_spike:
            return "none"
        remedy = self._spikes.note(step, result.loss, result.grad_norm, is_spike=is_spike)
        if remedy == "cut":
            until, factor = self._spikes.cut_until, settings.cut_factor
            why = f"{settings.cut_after} spikes within {settings.window} steps"
            self._run.recorder.event("rate cut", step, why=why, factor=factor, until=until)
            self._run.recorder.say(f"step {step}: {why}; learning rate times {factor:g} until step {until}")
        return remedy

    def blame(self, step: int, why: str) -> None:
        """Count one more rollback.

        Raises:
            Unstable: there have been too many without progress.
        """
        if self._num_tries >= self._settings.max_rollbacks:
            self._run.recorder.event("unstable", step, why=why, rollbacks=self._num_tries)
            raise Unstable(
                f"step {step}: {why}, after {self._num_tries} rollbacks from about the same place; look at the batches "
                f"in {self._run.config.run.dir / 'events.jsonl'}, lower optimizer.lr, or raise health.max_rollbacks"
            )
        self._num_tries += 1
        self._tried_at = max(step, self._tried_at)

    def go_back(self, state: dict[str, Any]) -> None:
        """Take up the state of a checkpoint; only the tries are not forgotten."""
        tries = self._num_tries, self._tried_at
        self._restore(state)
        self._num_tries, self._tried_at = tries

    def state(self) -> dict[str, Any]:
        """All there is to go on from, ready for JSON; empty where nothing has to be remembered."""
        state: dict[str, Any] = {"spikes": self._spikes.state()} if self._spikes else {}
        return state | ({"tries": self._num_tries, "tried_at": self._tried_at} if self._num_tries else {})

    @property
    def _quiet_steps(self) -> int:
        """Steps beyond the last trouble after which it counts as overcome."""
        spikes = self._settings.spikes
        return max(spikes.window if spikes else 1, self._settings.check_replicas_every or 1)

    def _restore(self, state: dict[str, Any]) -> None:
        spikes = self._settings.spikes
        self._spikes = SpikeWatch(spikes, state.get("spikes", {})) if spikes else None
        self._num_tries, self._tried_at = state.get("tries", 0), state.get("tried_at", 0)

    def _judge(self, loss: float, grad_norm: float) -> str:
        """Why the update is left out: what any rank finds, since their norms may differ in the last bit. Collective."""
        why = self._spikes.judge(loss, grad_norm)
        self._was_refused = any_rank(bool(why), self._run.axes.world, self._run.device)
        return (why or "a spike, as another rank sees it") if self._was_refused else ""

    def _record(self, kind: str, step: int, result: StepResult, samples: range) -> None:
        """Write down a step that was left out, and which documents it had."""
        run = self._run
        if run.recorder.is_writer:
            account = run.samples.cursor
            documents = run.samples.document_ids(samples.start, samples.stop)
            run.recorder.event(
                kind,
                step,
                why=result.why,
                loss=result.loss,
                grad_norm=result.grad_norm,
                samples=[account.data_index(samples[0]), account.data_index(samples[-1]) + 1],
                num_documents=len(documents),
                documents=documents[:MOST_DOCUMENTS],
            )
        run.recorder.say(f"step {step} is left out: {result.why}")
