"""What a run leaves on its boards, and that a rollback takes back what will be done again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.config.load import load_config
from megalite.config.plan import make_plan
from megalite.engine.protocol import StepResult
from megalite.errors import EXIT_DONE, UnavailableError
from megalite.monitor.recorder import Recorder
from megalite.monitor.wandb import check_wandb
from tests.kit.runs import metrics, write_run
from tests.train.forked import launch


def scalars(folder: Path, name: str) -> dict[int, float]:
    """What TensorBoard shows of a curve."""
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {event.step: event.value for event in board.Scalars(name)}


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "layers.jsonl").read_text().splitlines()]


def test_a_run_looks_into_its_layers(tmp_path):
    """Every other step, in layers.jsonl by weight and by layer, on TensorBoard and offline on W&B by layer."""
    pytest.importorskip("wandb")
    monitor = {"layers_every": 2, "wandb": {"mode": "offline"}}
    config = load_config(write_run(tmp_path, monitor=monitor, train={"steps": 4, "device": "cpu"}))
    assert launch(config, 2) == EXIT_DONE
    records = lines(config.run.dir)
    assert [record["step"] for record in records] == [2, 4]
    for record, step in zip(records, metrics(config.run.dir)[1::2], strict=True):
        assert set(record["layers"]) == {"embedding", "blocks.0", "blocks.1", "final_norm", "head"}
        assert {"grad_norm", "update_ratio", "attention_entropy", "dead_units"} <= set(record["layers"]["blocks.1"])
        total = sum(weight["grad_norm"] ** 2 for weight in record["weights"].values()) ** 0.5
        assert total == pytest.approx(step["grad_norm"], rel=1e-4)
    shown = scalars(config.run.dir, "layers/blocks.1/attention_entropy")
    assert shown == pytest.approx({r["step"]: r["layers"]["blocks.1"]["attention_entropy"] for r in records})
    assert list(config.run.dir.glob("wandb/offline-run-*/*.wandb"))


def test_what_is_done_again_replaces_what_was(tmp_path):
    """After a rollback to step 2 the lines and the curves of steps 3 and 4 are those of the second time."""
    config = load_config(write_run(tmp_path))
    config.run.dir.mkdir()
    plan = make_plan(config, 2)
    recorder = Recorder(config, plan, first_step=0, peak_flops=1e12, is_writer=True)

    def record(steps: range, loss: float) -> None:
        for step in steps:
            result = StepResult(loss, 1.0, 0.1, 10)
            recorder.step(step, result, num_tokens=10, num_tokens_total=step * 10, seconds=1.0)
            recorder.layers(step, {"layers": {"head": {"grad_norm": loss}}, "weights": {}})

    record(range(1, 5), 5.0)
    recorder.rewind(2)
    record(range(3, 5), 4.0)
    recorder.close()
    wanted = {1: 5.0, 2: 5.0, 3: 4.0, 4: 4.0}
    assert {line["step"]: line["loss"] for line in metrics(config.run.dir)} == wanted
    assert {line["step"]: line["layers"]["head"]["grad_norm"] for line in lines(config.run.dir)} == wanted
    assert scalars(config.run.dir, "train/loss") == wanted


def test_a_missing_package_is_named(monkeypatch):
    """Before the run starts, with how to get it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UnavailableError, match=r"pip install 'megalite\[wandb\]'"):
        check_wandb()
