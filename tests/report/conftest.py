"""Run folders made of formulas: long and short, finished, stopped, going on, broken."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megalite.config.load import dump_config
from megalite.config.plan import make_plan
from megalite.config.schema import Config

START = 1.79e9
SECONDS_PER_STEP = 2.0
TOKENS_PER_STEP = 4096


def make_run(
    folder: Path,
    num_steps: int,
    *,
    lr: float = 3e-4,
    end: str | None = "done",
    sets: tuple[str, ...] = ("prose", "code"),
) -> Path:
    """A run of known numbers: a loss of 10/sqrt(step), a spike at step 150, a validation and a save every 100 steps,
    one restart at step 200 that cost ten minutes."""
    folder.mkdir(parents=True)
    config = Config(
        model={"vocab_size": 1000},
        batch={"global_batch_size": 8, "seq_len": 512},
        optimizer={"lr": lr},
        train={"steps": num_steps},
        data={"train": [{"path": "data/web", "weight": 2.0}], "valid": [{"path": f"data/{name}"} for name in sets]},
        run={"dir": str(folder)},
    )
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "plan.json").write_text(json.dumps(make_plan(config, 1).to_dict()))
    now, metrics, events = START, [], [event("start", START, 0, origin="fresh weights", attempt=1, world_size=1)]
    for step in range(1, num_steps + 1):
        now += SECONDS_PER_STEP
        metrics.append(record(step, lr))
        if step == 150:
            events.append(event("skip", now, step, why="loss 9.9 is 12 sigma above <b>its</b> mean"))
        if step % 100 == 0:
            losses = {name: {"loss": 11 / math.sqrt(step) + n, "num_tokens": 10} for n, name in enumerate(sets)}
            now += 4.0
            events.append(event("validation", now, step, **losses[sets[0]], sets=losses, seconds=4.0))
            now += 1.0
            events.append(event("save", now, step, folder=f"step-{step:07d}", seconds=3.0, stalled_seconds=1.0))
        if step == 200:
            now += 600.0
            events.append(event("start", now, step, origin="checkpoint", attempt=2, world_size=1))
    if end is not None:
        events.append(event(end, now, num_steps))
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "events.jsonl", events)
    return folder


def record(step: int, lr: float) -> dict:
    """A line of metrics.jsonl."""
    return {
        "step": step,
        "loss": 10 / math.sqrt(step) + (5.0 if step == 150 else 0.0),
        "grad_norm": 1.0 + 1 / step,
        "lr": lr,
        "tokens": step * TOKENS_PER_STEP,
        "tokens_per_second": TOKENS_PER_STEP / SECONDS_PER_STEP,
        "mfu": 0.4,
        "skipped": step == 150,
        "seconds": SECONDS_PER_STEP,
        "memory_bytes": 2 * 10**9,
    }


def event(kind: str, time: float, step: int, **details) -> dict:
    """A line of events.jsonl."""
    return {"time": time, "event": kind, "step": step, **details}


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A finished run of 3000 steps: more than a page shows one by one."""
    return make_run(tmp_path_factory.mktemp("finished") / "base", 3000)
