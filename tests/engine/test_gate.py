"""Steps that are refused before the update, and going back to an earlier state in the middle of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight
from megalite.config.plan import make_plan
from megalite.engine.build import build_engine
from megalite.engine.deepspeed.update import NO_TOKENS
from megalite.engine.protocol import StepResult
from megalite.model.initialize import FreshWeights
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, start_rank, step_batches, tiny_config

LR = 2e-3
MOMENTS = ("exp_avg", "exp_avg_sq")

CASES = [
    *((stage, {"dp": 2}, "fp32") for stage in (0, 1, 2, 3)),
    *((stage, {"dp": 2}, "bf16") for stage in (1, 2, 3)),
    (0, {"tp": 2}, "fp32"),
    (1, {"tp": 2, "sequence_parallel": True}, "bf16"),
    (3, {"tp": 2}, "fp32"),
    (0, {"pp": 2}, "fp32"),
    (1, {"pp": 2}, "fp32"),
    (1, {"pp": 2}, "bf16"),
]
"""ZeRO stage, layout and number format: every way by which DeepSpeed comes to an update."""


def start(zero_stage: int, parallel: dict[str, Any], dtype: str) -> Rank:
    parallel = {**parallel, "zero_stage": zero_stage, "engine": "deepspeed" if zero_stage > 1 else None}
    config = tiny_config(parallel=parallel, precision={"dtype": dtype})
    plan = make_plan(config, dist.get_world_size())
    axes = connect(Mesh(plan.pp, plan.dp, plan.cp, plan.tp), dist.get_rank())
    source = FreshWeights(plan.model, 1)
    return Rank(config, plan, axes, build_engine(config, plan, axes, torch.device("cpu"), source))


def step(rank: Rank, number: int, *, is_empty: bool = False) -> StepResult:
    batch = rank.config.batch
    batches = step_batches(
        number,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        dp=rank.plan.dp,
        dp_rank=rank.axes.batch.rank,
        seq_len=batch.seq_len,
        vocab_size=rank.plan.model.vocab_size,
    )
    if is_empty:
        batches = [replace(each, loss_mask=torch.zeros_like(each.loss_mask)) for each in batches]
    return rank.engine.train_step(batches, LR)


def state(rank: Rank) -> dict[str, Tensor]:
    """Copies of masters, moments and of the weights that the forward pass reads."""
    masters = {
        f"{each.local.parameter_name} {each.local.weight.name} {kind}": tensor.clone()
        for each in rank.engine.local_weights()
        for kind, tensor in each.tensors.items()
    }
    return masters | {name: p.detach().clone() for name, p in rank.engine.stage.named_parameters()}


def refuse_second_step(cases: list[tuple]) -> list[list[tuple[StepResult, list, bool]]]:
    """For each case and step: the result, what the judge was told, whether anything changed."""
    seen = []
    for case in cases:
        rank, told, steps = start(*case), [], []
        for number in range(4):
            told.clear()
            reason = "planted" if number == 1 else ""
            remove = rank.engine.hooks.vetoes.add(
                lambda loss, norm, told=told, reason=reason: (told.append((loss, norm)), reason)[1]
            )
            before = state(rank)
            result = step(rank, number, is_empty=number == 2)
            remove()
            after = state(rank)
            steps.append((result, list(told), all(torch.equal(before[key], after[key]) for key in before)))
        rank.engine.close()
        seen.append(steps)
    return seen


BIASED = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "bias_rate": 0.01}
ENGINES = ({"zero_stage": 1}, {"zero_stage": 1, "engine": "deepspeed"}, {"zero_stage": 3, "engine": "fsdp2"})


def biases_of_two_steps(layouts: list[dict]) -> list[list[Tensor]]:
    """For each layout: the biases of all routers behind a step that was refused, then behind one that was taken."""
    seen = []
    for parallel in layouts:
        rank, found = start_rank(tiny_config(model={"moe": BIASED}, parallel={"dp": 2, **parallel})), []
        for reason in ("planted", ""):
            remove = rank.engine.hooks.vetoes.add(lambda loss, norm, reason=reason: reason)
            step(rank, 0)
            remove()
            found.append(torch.stack([each.bias.clone() for each in rank.engine.stage.routers.by_name.values()]))
        rank.engine.close()
        seen.append(found)
    return seen


def test_a_refused_step_moves_no_bias_of_a_router():
    """On every engine; the next step, of the same tokens, moves each by no more than the rate, on all ranks alike."""
    of_ranks = run_ranks(biases_of_two_steps, 2, list(ENGINES))
    for parallel, (refused, taken), (_, elsewhere) in zip(ENGINES, *of_ranks, strict=True):
        assert not refused.any(), parallel
        assert taken.abs().max() == pytest.approx(0.01), parallel
        assert torch.equal(taken, elsewhere), parallel


def test_a_refused_step_changes_nothing():
    """Whatever the ZeRO stage, layout and format: the judge is asked once, on every rank, with the step's own loss and
    norm; refused, no weight, master or moment changes by a bit, the reason is reported, and the next step is taken.
    Nor does anything change in a step without a token that counts, about which nobody is asked: it has no loss."""
    for results in run_ranks(refuse_second_step, 2, CASES):
        for case, steps in zip(CASES, results, strict=True):
            assert [unchanged for _, _, unchanged in steps] == [False, True, True, False], case
            assert [result.why for result, _, _ in steps] == ["", "planted", NO_TOKENS, ""], case
            assert [result.skipped for result, _, _ in steps] == [False, True, True, False], case
            empty, told, _ = steps.pop(2)
            assert (math.isnan(empty.loss), empty.num_tokens, told) == (True, 0, []), case
            for result, told, _ in steps:
                assert told == [(pytest.approx(result.loss, rel=1e-6), result.grad_norm)], case


class Kept:
    """This rank's state as a weight source, copied from its engine."""

    def __init__(self, rank: Rank, kind: str):
        self._tensors = {
            (each.local.weight.name, each.local.rectangle): each.tensors[kind].clone()
            for each in rank.engine.local_weights()
        }

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        for (name, known), tensor in self._tensors.items():
            if name != weight.name:
                continue
            inner = tuple(start - first for start, first in zip(rectangle.start, known.start, strict=True))
            fits = all(a >= 0 and a + n <= m for a, n, m in zip(inner, rectangle.shape, known.shape, strict=True))
            if fits:
                return tensor[Rectangle(inner, rectangle.shape).slices]
        raise KeyError(weight.name)


def go_back(cases: list[tuple]) -> list[tuple[list, list, bool]]:
    """Losses and norms of steps 2 and 3, twice with a return to step 1 in between, and whether they end alike."""
    seen = []
    for case in cases:
        rank = start(*case)
        step(rank, 0)
        kept = {kind: Kept(rank, kind) for kind in ("weight", *MOMENTS)}
        curves, ends = [], []
        for _ in range(2):
            curves.append([(each.loss, each.grad_norm) for each in (step(rank, 1), step(rank, 2))])
            ends.append(state(rank))
            rank.engine.load(kept["weight"], {kind: kept[kind] for kind in MOMENTS}, 1)
        rank.engine.close()
        seen.append((*curves, all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])))
    return seen


def test_an_engine_goes_back_in_the_middle_of_a_run():
    """`load` sets what the forward pass reads as well as masters and moments: steps 2 and 3, done again after a return
    to step 1, have equal losses and norms and end in equal bits."""
    for results in run_ranks(go_back, 2, CASES):
        for case, (first, second, ends_alike) in zip(CASES, results, strict=True):
            assert first == second, case
            assert ends_alike, case
