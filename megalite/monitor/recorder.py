"""Everything a step leaves behind, in one place: metrics, events, TensorBoard and the display. Rank 0 only writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.engine.protocol import StepResult
from megalite.monitor.display import Display, Silence
from megalite.monitor.records import Events, JsonLines, drop_steps_after


class Recorder:
    """Writes down steps, validations and events.

    Args:
        config: the run's config.
        plan: its plan.
        first_step: steps done before this attempt; metrics of later steps are dropped.
        peak_flops: FLOP/s of one device, that MFU is counted against.
        is_writer: whether this rank writes; the others stay silent.
    """

    def __init__(self, config: Config, plan: RunPlan, *, first_step: int, peak_flops: float, is_writer: bool):
        self._plan, self._peak_flops, self._is_writer = plan, peak_flops, is_writer
        self.display: Display | Silence = Silence()
        self._tensorboard: Any = None
        if not is_writer:
            return
        folder: Path = config.run.dir
        drop_steps_after(folder / "metrics.jsonl", first_step)
        self._metrics, self._events = JsonLines(folder / "metrics.jsonl"), Events(folder / "events.jsonl")
        self.display = Display(total_steps=plan.total_steps, first_step=first_step, log_every=config.monitor.log_every)
        if config.monitor.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def step(self, step: int, result: StepResult, *, num_tokens_total: int, seconds: float) -> None:
        """Record a finished step.

        Args:
            num_tokens_total: tokens consumed by the run so far, this step included.
            seconds: wall time of the step, waiting for data included.
        """
        if not self._is_writer:
            return
        tokens_per_second = self._plan.tokens_per_step / seconds
        mfu = tokens_per_second * self._plan.flops_per_token / (self._peak_flops * self._plan.world_size)
        record = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": num_tokens_total,
            "tokens_per_second": round(tokens_per_second, 1),
            "mfu": round(mfu, 4),
            "skipped": result.skipped,
            "seconds": round(seconds, 4),
        }
        self._metrics.write(record)
        self._scalars(step, record, "train")
        self.display.step(step, result, tokens_per_second, mfu)
        if result.skipped:
            self.event("skip", step, why=result.why)

    def validation(self, step: int, loss: float, perplexity: float, num_tokens: int) -> None:
        """Record a validation."""
        self.event("validation", step, loss=loss, perplexity=perplexity, num_tokens=num_tokens)
        self._scalars(step, {"loss": loss, "perplexity": perplexity}, "valid")
        self.say(f"validation at step {step}: loss {loss:.4f}, perplexity {perplexity:.2f}")

    def event(self, event: str, step: int, **details: Any) -> None:
        """Record something out of the ordinary in events.jsonl."""
        if self._is_writer:
            self._events.add(event, step, **details)

    def say(self, text: str) -> None:
        """Show a line to the person watching."""
        self.display.say(text)

    def close(self) -> None:
        self.display.close()
        if not self._is_writer:
            return
        self._metrics.close()
        self._events.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _scalars(self, step: int, record: dict[str, Any], group: str) -> None:
        if self._tensorboard is None:
            return
        for name, value in record.items():
            if name != "step":
                self._tensorboard.add_scalar(f"{group}/{name}", float(value), step)
