"""When to stop going back: rollbacks in a row between which the run got nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.config.schema import Config, HealthConfig
from megalite.engine.protocol import StepResult
from megalite.errors import UserError
from megalite.monitor.recorder import Recorder
from megalite.train.components.component import Component, Step


class Unstable(UserError):
    """Training goes wrong again and again at the same place."""


class RollbackLimit(Component):
    """Counts rollbacks from about the same place; going back does not make it forget them."""

    name = "rollback_limit"

    def __init__(self, config: Config, recorder: Recorder):
        self._settings: HealthConfig = config.health
        self._run_dir: Path = config.run.dir
        self._recorder = recorder
        self._num_tries = self._tried_at = 0

    def state(self) -> dict[str, Any]:
        return {"tries": self._num_tries, "tried_at": self._tried_at} if self._num_tries else {}

    def load_state(self, state: dict[str, Any]) -> None:
        self._num_tries, self._tried_at = state.get("tries", 0), state.get("tried_at", 0)

    def rewind(self, step: int, state: dict[str, Any]) -> None:
        pass

    def after_step(self, step: Step, result: StepResult) -> None:
        if result.num_tokens and step.number >= self._tried_at + self._quiet_steps:
            self._num_tries = 0

    def count(self, step: int, why: str) -> None:
        """Count one more rollback.

        Raises:
            Unstable: there have been too many without progress.
        """
        if self._num_tries >= self._settings.max_rollbacks:
            self._recorder.event("unstable", step, why=why, rollbacks=self._num_tries)
            raise Unstable(
                f"step {step}: {why}, after {self._num_tries} rollbacks from about the same place; look at the batches "
                f"in {self._run_dir / 'events.jsonl'}, lower optimizer.lr, or raise health.max_rollbacks"
            )
        self._num_tries += 1
        self._tried_at = max(step, self._tried_at)

    @property
    def _quiet_steps(self) -> int:
        """Steps beyond the last trouble after which it counts as overcome."""
        spikes = self._settings.spikes
        return max(spikes.window if spikes else 1, self._settings.check_replicas_every or 1)
