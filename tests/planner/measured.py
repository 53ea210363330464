"""What tensors a step of the real engine has, every allocation watched, to hold the planner's bytes against."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.engine.build import build_engine
from megalite.model.initialize import FreshWeights
from megalite.parallel.axes import Axes, connect
from megalite.parallel.mesh import Mesh
from megalite.planner.memory import memory_by_stage
from tests.kit.batches import step_batches
from tests.kit.spawn import run_ranks

MODEL = {"hidden_size": 256, "num_layers": 6, "num_heads": 4, "ffn_hidden_size": 688, "vocab_size": 4096}
"""With as many tokens for its width, 2 x 344, as one of 384 has with 2 x 512, so that activations are half of all."""

FEW_TOKENS = 64


class Case(NamedTuple):
    """A config on so many ranks, by what differs from a small model's."""

    name: str
    ranks: int
    sections: dict[str, dict[str, Any]]

    def config(self) -> Config:
        """The whole config."""
        batch = {"micro_batch_size": 2, "global_batch_size": 4, "seq_len": 344, **self.sections.get("batch", {})}
        assert self.sections.keys() <= {"model", "batch", "parallel", "precision", "train", "optimizer"}, self.sections
        made = Config(
            model=model if "preset" in (model := self.sections.get("model", {})) else {**MODEL, **model},
            batch=batch,
            parallel=self.sections.get("parallel", {}),
            optimizer=self.sections.get("optimizer", {}),
            precision={"dtype": "fp32", **self.sections.get("precision", {})},
            train={"steps": 4, "compile": "off", "device": "cpu", **self.sections.get("train", {})},
        )
        validate(made, self.ranks)
        return made


def planned(case: Case) -> list[int]:
    """Bytes of a rank of each stage, as the planner has them."""
    config = case.config()
    return [stage.total for stage in memory_by_stage(config, make_plan(config, case.ranks))]


def measure(case: Case) -> list[tuple[int, int]]:
    """Of each rank its stage, and bytes of all tensors' storages together at the peak of a step."""
    return run_ranks(measure_rank, case.ranks, case)


def measure_rank(case: Case) -> tuple[int, int]:
    """The same of a rank, on that rank."""
    import torch.distributed as dist

    config = case.config()
    plan = make_plan(config, case.ranks)
    mesh = Mesh(plan.pp, plan.dp, plan.cp, plan.tp, plan.ep)
    place, axes = mesh.coords(dist.get_rank()), connect(mesh, dist.get_rank())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        _train(config, plan, axes, place.dp)
    assert found.profiler is not None
    return place.pp, _peak_of_last_step(found.profiler.kineto_results.events())


def _train(config: Config, plan: RunPlan, axes: Axes, dp_rank: int) -> None:
    """Two steps: the first makes the moments, from a few tokens where no stage waits for as many as were planned."""
    engine = build_engine(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, 1))
    for step in range(2):
        few = step == 0 and plan.pp == 1
        batches = _batches(config, plan, dp_rank, step, FEW_TOKENS if few else config.batch.seq_len)
        with torch.profiler.record_function(f"step {step}"):
            engine.train_step(batches, 1e-3)
    engine.close()


def _peak_of_last_step(events: Any) -> int:
    """Bytes of all storages together, from what was allocated and freed since there were none."""
    begin = next(event.start_ns() for event in events if event.name() == "step 1")
    end = begin + next(event.duration_ns() for event in events if event.name() == "step 1")
    now = most = 0
    for time, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        now += change
        most = max(most, now) if begin <= time <= end else most
    return most


def _batches(config: Config, plan: RunPlan, dp_rank: int, step: int, seq_len: int) -> Any:
    return step_batches(
        step,
        global_batch_size=config.batch.global_batch_size,
        micro_batch_size=config.batch.micro_batch_size,
        dp=plan.dp,
        dp_rank=dp_rank,
        seq_len=seq_len,
        vocab_size=plan.model.vocab_size,
    )
