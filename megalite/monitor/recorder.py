"""Everything a step leaves behind, in one place: metrics, events, TensorBoard and the display. Rank 0 only writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.engine.protocol import StepResult
from megalite.host import peak_process_bytes
from megalite.monitor.boards import Board, open_boards
from megalite.monitor.display import Display, Silence
from megalite.monitor.records import STEP_KEYS, Events, JsonLines, drop_steps_after, last_event

LARGE_PERPLEXITY = 1e6
"""From which on its digits say nothing."""


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
        self._plan, self._peak_flops, self.is_writer = plan, peak_flops, is_writer
        self.display: Display | Silence = Silence()
        self._boards: list[Board] = []
        self.num_redone = 0
        """Steps that an attempt before had recorded and that come again."""
        self.former_start: dict[str, Any] = {}
        """What the attempt before has written down of its start."""
        if not is_writer:
            return
        folder: Path = config.run.dir
        self.num_redone = drop_steps_after(folder / "metrics.jsonl", first_step)
        drop_steps_after(folder / "layers.jsonl", first_step)
        self._metrics, self._layers = JsonLines(folder / "metrics.jsonl"), JsonLines(folder / "layers.jsonl")
        self._experts: JsonLines | None = None
        if plan.model.moe is not None:
            drop_steps_after(folder / "experts.jsonl", first_step)
            self._experts = JsonLines(folder / "experts.jsonl")
        self._events = Events(folder / "events.jsonl")
        self.former_start = last_event(folder / "events.jsonl", "start")
        self.display = Display(total_steps=plan.total_steps, first_step=first_step, log_every=config.monitor.log_every)
        self._boards = list(open_boards(config, first_step))

    def step(
        self,
        step: int,
        result: StepResult,
        *,
        num_tokens: int,
        num_tokens_total: int,
        seconds: float,
        figures: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Record a finished step.

        Args:
            num_tokens: tokens of its global batch, padding included.
            num_tokens_total: tokens consumed by the run so far, this step included.
            seconds: wall time of the step, waiting for data included.
            figures: more to write down of this step, by name.
        """
        if not self.is_writer:
            return
        tokens_per_second = num_tokens / seconds
        mfu = tokens_per_second * self._plan.flops_per_token / (self._peak_flops * self._plan.world_size)
        record = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": num_tokens_total,
            "valid_tokens": result.num_tokens,
            "tokens_per_second": round(tokens_per_second, 1),
            "mfu": round(mfu, 4),
            "skipped": result.skipped,
            "seconds": round(seconds, 4),
            "memory_bytes": peak_memory_bytes(),
        }
        assert record.keys() == STEP_KEYS, "as listed"
        record |= figures
        self._metrics.write(record)
        self.scalars(step, record, "train")
        self.display.step(step, result, tokens_per_second, mfu)

    def rewind(self, step: int) -> None:
        """Drop what was recorded of later steps, which will be done again; events stay."""
        if not self.is_writer:
            return
        for lines in filter(None, (self._metrics, self._layers, self._experts)):
            lines.drop_after(step)
        self.display.rewind(step)
        for board in self._boards:
            board.rewind(step)

    def layers(self, step: int, record: dict[str, dict[str, dict[str, float]]]) -> None:
        """Record statistics of the layers: `layers` and `weights` by name. Boards get the layers only."""
        if not self.is_writer:
            return
        self._layers.write({"step": step, **record})
        for name, statistics in record["layers"].items():
            self.scalars(step, statistics, f"layers/{name}")

    def experts(self, step: int, loads: Mapping[str, list[float]]) -> None:
        """Record how many tokens each expert of each block had."""
        if self.is_writer and self._experts is not None:
            self._experts.write({"step": step, "loads": dict(loads)})

    def validation(self, step: int, record: dict[str, Any]) -> None:
        """Record a validation.

        Args:
            record: `loss`, `perplexity` and `num_tokens` of what is watched, where there are sets, or of pairs of
                answers `loss` and `num_pairs`; `sets` with the same of each; `tasks` with scores of each; `seconds`.
        """
        self.event("validation", step, **record)
        sets, tasks = record.get("sets", {}), record.get("tasks", {})
        if "loss" in record:
            self.scalars(step, _losses(record), "valid")
            others = ", ".join(f"{name} {each['loss']:.4f}" for name, each in sets.items()) if len(sets) > 1 else ""
            said = f"loss {record['loss']:.4f}"
            if (perplexity := record.get("perplexity")) is not None:
                said += f", perplexity {perplexity:{'.2f' if perplexity < LARGE_PERPLEXITY else '.3g'}}"
            self.say(f"validation at step {step}: {said}{f' ({others})' if others else ''}")
        for name, each in sets.items() if len(sets) > 1 else ():
            self.scalars(step, _losses(each), f"valid/{name}")
        for name, each in tasks.items():
            self.scalars(step, {key: each[key] for key in ("acc", "acc_norm")}, f"tasks/{name}")
            self.say(f"  {name}: acc {each['acc']:.4f}, acc_norm {each['acc_norm']:.4f} ({each['num']:,} questions)")

    def event(self, event: str, step: int, **details: Any) -> None:
        """Record something out of the ordinary in events.jsonl."""
        if self.is_writer:
            self._events.add(event, step, **details)

    def note(self, event: str, step: int, *, why: str, **details: Any) -> None:
        """Record such a thing, and show why to the person watching."""
        self.event(event, step, why=why, **details)
        self.say(f"step {step}: {why}")

    def say(self, text: str) -> None:
        """Show a line to the person watching."""
        self.display.say(text)

    def close(self) -> None:
        self.display.close()
        if not self.is_writer:
            return
        for lines in filter(None, (self._metrics, self._layers, self._experts, self._events)):
            lines.close()
        for board in self._boards:
            board.close()

    def scalars(self, step: int, record: dict[str, Any], group: str) -> None:
        """Show numbers on the boards, as curves of a group."""
        scalars = {f"{group}/{name}": float(value) for name, value in record.items() if name != "step"}
        for board in self._boards:
            board.add(step, scalars)


def peak_memory_bytes() -> int:
    """The most memory that this rank has held: what torch has allocated on its GPU, or the process on a CPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return peak_process_bytes()


def _losses(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a set that are curves; pairs of answers have no perplexity."""
    return {key: record[key] for key in ("loss", "perplexity") if key in record}
