"""How evenly tokens go to experts stands in the metrics; a router that collapses is told once, and may end the run."""

from __future__ import annotations

import json

import pytest
import torch

from megalite.config.validate import validate
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE, ConfigError
from tests.kit.runs import events, metrics
from tests.kit.train import tiny_config
from tests.train.forked import launch
from tests.train.planted import planted_config

EXPERTS = {"num_experts": 4, "top_k": 1, "normalize": False, "ffn_hidden_size": 16, "every": 2, "aux_loss": 0.1}


def collapse_at_step_13() -> None:
    """From then to step 22 all tokens go to the third expert."""
    from megalite.engine.native.engine import NativeEngine

    train_step, state = NativeEngine.train_step, {"calls": 0}

    def step(self: NativeEngine, *args):
        state["calls"] += 1
        for router in self.stage.routers.by_name.values():
            is_down = 13 <= state["calls"] <= 22
            router.bias = torch.tensor([0.0, 0.0, 9.0 * is_down, 0.0])
        return train_step(self, *args)

    NativeEngine.train_step = step


def run_of(folder, capacity_factor=None, **experts):
    parallel = {"dp": 1, "pp": 2, "zero_stage": 1}
    moe = {**EXPERTS, "capacity_factor": capacity_factor}
    health = {"experts": {"every": 5, "loads_every": 4, "least_entropy": 0.2, **experts}}
    return planted_config(
        folder, range(0), steps=25, parallel=parallel, health=health, model={"moe": moe, "num_layers": 4}
    )


def test_a_collapse_is_told_once(tmp_path):
    """The blocks with experts of both stages, at step 15 and not again at 20; the worst numbers are in the metrics."""
    config = run_of(tmp_path)
    assert launch(config, 2, prepare=collapse_at_step_13) == EXIT_DONE
    found = [event for event in events(config.run.dir) if event["event"] == "router_collapsed"]
    assert [(event["step"], event["block"]) for event in found] == [(15, "blocks.1"), (15, "blocks.3")]
    assert "entropy of 0.00 of even ones, at least 0.2 is asked for" in found[0]["why"]
    rows = {row["step"]: row for row in metrics(config.run.dir)}
    assert [step for step, row in rows.items() if "expert_load_max" in row] == [5, 10, 15, 20, 25]
    assert (rows[20]["expert_load_max"], rows[20]["expert_load_entropy"], rows[20]["dead_experts"]) == (4.0, 0.0, 0.75)
    assert rows[25]["expert_load_entropy"] > 0.2
    records = [json.loads(line) for line in (config.run.dir / "experts.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [4, 8, 12, 16, 20, 24]
    assert set(records[0]["loads"]) == {"blocks.1", "blocks.3"}
    of_step_20 = records[4]["loads"]["blocks.3"]
    assert (of_step_20[0], of_step_20[1], of_step_20[3]) == (0.0, 0.0, 0.0)
    assert of_step_20[2] == sum(of_step_20) > 0


def test_a_collapse_may_end_the_run(tmp_path):
    """As a failure that a person must look at, with a checkpoint. In a collapse on one expert it has room for its share
    of each sequence, and the rest is dropped."""
    config = run_of(tmp_path, capacity_factor=1.0, action="stop")
    assert launch(config, 2, prepare=collapse_at_step_13) == EXIT_BAD_INPUT
    rows = {row["step"]: row for row in metrics(config.run.dir)}
    assert max(rows) == 15
    assert 0 < rows[10]["dropped_choices"] < rows[15]["dropped_choices"] == 0.75
    assert not {event["event"] for event in events(config.run.dir)} & {"done", "early_stop"}
    assert (config.run.dir / "checkpoints" / "step-0000015").is_dir()


def test_experts_of_none():
    """Settings for experts that the model has not are refused."""
    with pytest.raises(ConfigError, match=r"health.experts: found a group, but it has no effect with model.moe=null"):
        validate(tiny_config(health={"experts": {"every": 5}}), 1)
