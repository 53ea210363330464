"""An evaluation of every new checkpoint, as a job of its own beside the training.

The supervisor sees a checkpoint appear and submits `slurm/evaluate.sbatch` for it. These jobs run one after the other
(dependency=singleton) and hold up nobody; what they print is in `slurm/evaluations/`.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from megalite.checkpoint.catalog import complete, step_of
from megalite.slurm.cluster import ClusterConfig, EvaluationConfig
from megalite.slurm.controller import Controller
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.render import environment_lines, job_name, place_options, render_script
from megalite.slurm_quoting import command_line, option, option_of_logs

POLL_SECONDS = 2.0

GONE = "checkpoint {step} is gone; raise checkpoint.keep_last, or set checkpoint.keep_every"


def render_evaluation(run_dir: Path, cluster: ClusterConfig, evaluation: EvaluationConfig) -> str:
    """The batch script, which takes a checkpoint's folder and its step."""
    options = [
        option("job-name", evaluation_name(run_dir)),
        "--nodes=1",
        "--ntasks=1",
        *place_options(cluster, "partition", "account", "qos"),
        *([option("gpus-per-node", evaluation.gpus)] if evaluation.gpus else []),
        option("time", evaluation.time_limit),
        "--dependency=singleton",
        *evaluation.sbatch,
    ]
    command = evaluation.command.format(checkpoint='"$1"', step='"$2"', run=command_line([str(run_dir)]))
    gone = GONE.format(step="$2")
    look = f'[ -d "$1" ] || {{ echo "{gone}" >&2; exit 1; }}'
    return render_script(options, [], [*environment_lines(cluster), look, command])


def evaluation_name(run_dir: Path) -> str:
    """Name of a run's evaluation jobs."""
    return f"{job_name(run_dir)}-eval"


class EvaluationJobs:
    """Submits what is due.

    Args:
        folder: of the run.
        evaluation: None for none.
        controller: the cluster's controller.
    """

    def __init__(self, folder: LaunchFolder, evaluation: EvaluationConfig | None, controller: Controller):
        self._folder, self._evaluation, self._controller = folder, evaluation, controller
        self._next_poll = 0.0
        self._last_step: int = folder.read_state().get("evaluated_step", 0)
        self._thread: threading.Thread | None = None
        self._submitted: list[tuple[int, str]] = []

    def submit_new(self) -> list[tuple[int, str]]:
        """See to it that a job is submitted for each checkpoint that is new; the steps and jobs of those that have been
        since the last call. Never waits for Slurm: what it does not take now is tried again later."""
        is_at_work = self._thread is not None and self._thread.is_alive()
        if self._evaluation is not None and not is_at_work and time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + POLL_SECONDS
            self._thread = threading.Thread(target=self._submit_due, daemon=True)
            self._thread.start()
        return self._take()

    def submit_last(self) -> list[tuple[int, str]]:
        """The same, waited for: nothing will come after it."""
        if self._thread is not None:
            self._thread.join()
        if self._evaluation is not None:
            self._submit_due()
        return self._take()

    def _take(self) -> list[tuple[int, str]]:
        taken, self._submitted = self._submitted, []
        return taken

    def _submit_due(self) -> None:
        assert self._evaluation is not None, "asked for by callers"
        for checkpoint in complete(self._folder.run_dir):
            step = step_of(checkpoint)
            if step <= self._last_step or step % self._evaluation.every_steps:
                continue
            output = option_of_logs(self._folder.evaluations, f"step-{step}.log")
            job = self._controller.try_submit(output, str(self._folder.evaluation_script), str(checkpoint), str(step))
            if job is None:
                return
            self._last_step = step
            self._submitted.append((step, job))
