"""Known traps of DeepSpeed and gloo, one test each: what they do wrong or silently, and that the engines do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config
from megalite.data.loader import Batch
from megalite.engine.build import build_engine
from megalite.engine.protocol import Engine, NonFiniteLossError, StepResult
from megalite.model.initialize import FreshWeights
from megalite.parallel.axes import Axes, connect
from megalite.parallel.mesh import Mesh
from tests.kit.batches import micro_batch, step_batches
from tests.kit.spawn import run_ranks
from tests.kit.train import tiny_config, train

LR = 2e-3
STEPS = 5

SAME = 1e-6
"""Relative, fp32: two engines that add up the same gradients in another order, over 5 steps."""

BF16_LOSS = 2e-3
"""Weights and activations are rounded by up to 2^-9 each; the loss is near 4.6. Five times what was seen."""

BF16_NORM = 1e-2
"""Relative, for the same reason; three times what was seen. A weight without its gradient moves the norm far more."""

TIED = {"model": {"tie_embeddings": True}}
BF16 = {"precision": {"dtype": "bf16"}}

Curve = list[tuple[float, float]]


@dataclass
class Run:
    """A tiny model on an engine, on one rank of the current world."""

    config: Config
    plan: RunPlan
    axes: Axes
    engine: Engine

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, counted from 0."""
        batch = self.config.batch
        return step_batches(
            step,
            global_batch_size=batch.global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            dp=self.plan.dp,
            dp_rank=self.axes.batch.rank,
            seq_len=batch.seq_len,
            vocab_size=self.plan.model.vocab_size,
        )

    def step(self, step: int) -> StepResult:
        return self.engine.train_step(self.batches(step), LR)

    def state(self) -> dict[str, Tensor]:
        """Copies of this rank's master weights and moments; a tied copy of the head has a name of its own."""
        return {
            f"{state.local.parameter_name}: {state.local.weight.name}: {key}": tensor.clone()
            for state in self.engine.local_weights()
            for key, tensor in state.tensors.items()
        }

    def parameter(self, name: str) -> torch.nn.Parameter | None:
        """A parameter of this rank's stage, when it has it."""
        return dict(self.engine.stage.named_parameters()).get(name)


@contextlib.contextmanager
def running(**sections: Any) -> Iterator[Run]:
    """A run of `tiny_config(**sections)` on the ranks of the current world."""
    config = tiny_config(**sections)
    plan = make_plan(config, dist.get_world_size())
    axes = connect(Mesh(plan.pp, plan.dp, plan.cp, plan.tp), dist.get_rank())
    engine = build_engine(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, 1))
    yield Run(config, plan, axes, engine)
    engine.close()


def train_all(cases: list[dict[str, Any]]) -> list[Curve]:
    return [train(tiny_config(**case), STEPS) for case in cases]


def curves(world_size: int, *cases: dict[str, Any]) -> list[Curve]:
    """Loss and norm of 5 steps of each case, which all ranks must report alike."""
    ranks = run_ranks(train_all, world_size, list(cases))
    for rank, curves_of_rank in enumerate(ranks):
        assert curves_of_rank == ranks[0], f"rank {rank} reports other numbers than rank 0"
    return ranks[0]


def assert_same(curve: Curve, expected: Curve) -> None:
    for found, wanted in zip(curve, expected, strict=True):
        assert found == pytest.approx(wanted, rel=SAME)


def test_zero_0_reports_a_gradient_norm():
    """DeepSpeed reports no norm at ZeRO-0. Ours is finite, that of ZeRO-1, and clips by it, under dp and under tp."""
    for parallel in ({"dp": 2}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}):
        zero, one = curves(2, *({"parallel": {**parallel, "zero_stage": stage}} for stage in (0, 1)))
        assert min(norm for _, norm in one) > 0.5  # the clip, so it is active
        assert_same(zero, one)


@pytest.mark.parametrize("more", [{}, TIED], ids=["untied", "tied"])
def test_pipeline_zero_0_clips_by_the_norm_of_all_stages(more):
    """DeepSpeed's pipeline clips at ZeRO-0 by a norm that forgets the other stages' parameters, and counts tied ones
    twice. Ours has the curve of ZeRO-1 and of no pipeline."""
    zero, one = curves(2, *({"parallel": {"pp": 2, "zero_stage": stage}, **more} for stage in (0, 1)))
    (plain,) = curves(1, {"parallel": {"zero_stage": 1}, **more})
    assert min(norm for _, norm in plain) > 0.5
    assert_same(zero, plain)
    assert_same(one, plain)


BF16_LAYOUTS = {
    "dp 2, ZeRO-1": {"parallel": {"dp": 2, "zero_stage": 1}},
    "dp 2, ZeRO-2": {"parallel": {"dp": 2, "zero_stage": 2}},
    "dp 2, ZeRO-3": {"parallel": {"dp": 2, "zero_stage": 3, "engine": "deepspeed"}},
    "dp 2, FSDP2": {"parallel": {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}},
    "tp 2, ZeRO-1": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "tp 2, ZeRO-3": {"parallel": {"tp": 2, "zero_stage": 3, "engine": "deepspeed"}},
    "pp 2": {"parallel": {"pp": 2}},
    "pp 2, tied": {"parallel": {"pp": 2}, **TIED},
}


@pytest.mark.parametrize("name", BF16_LAYOUTS)
def test_bf16_follows_fp32(name):
    """DeepSpeed has lost gradients in bf16: of the last micro-batch under ZeRO-1, of every step silently, and under a
    pipeline of whatever its loss function holds, such as a head. Each layout has the losses and norms of fp32."""
    (wide,) = curves(1, {key: value for key, value in BF16_LAYOUTS[name].items() if key != "parallel"})
    (narrow,) = curves(2, {**BF16_LAYOUTS[name], **BF16})
    for (loss, norm), (wide_loss, wide_norm) in zip(narrow, wide, strict=True):
        assert loss == pytest.approx(wide_loss, abs=BF16_LOSS)
        assert norm == pytest.approx(wide_norm, rel=BF16_NORM)


NUM_EQUAL = 288
"""Micro-batches: a bf16 sum of equal numbers stops at 256 of them."""


def norms_of_equal_micro_batches(stage: int) -> tuple[float, float]:
    """Gradient norm of one micro-batch, and of the mean of many equal ones."""
    norms = []
    model = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 16}
    for count in (1, NUM_EQUAL):
        batch = {"micro_batch_size": 1, "global_batch_size": count * dist.get_world_size(), "seq_len": 8}
        parallel = {"zero_stage": stage, "engine": "deepspeed" if stage > 1 else None}
        with running(parallel=parallel, model=model, batch=batch, **BF16) as run:
            same = micro_batch(range(1), seq_len=8, vocab_size=run.plan.model.vocab_size)
            norms.append(run.engine.train_step([same] * count, LR).grad_norm)
    return norms[0], norms[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_accumulates_in_fp32(stage):
    """DeepSpeed's default adds micro-batches up in bf16, where the 257th of equal ones is lost. The mean of 288 equal
    micro-batches has the gradient norm of one, at every ZeRO stage with dp 2."""
    for one, many in run_ranks(norms_of_equal_micro_batches, 2, stage):
        assert many == pytest.approx(one, rel=BF16_NORM)


def masters_after_a_step(reduce_dtypes: list[str | None]) -> list[dict[str, Tensor]]:
    """Master weights after one step of SGD, from two micro-batches: of one rank, or of two ranks one each."""
    batch = {"micro_batch_size": 1, "global_batch_size": 2}
    sgd = {"name": "sgd", "lr": 1.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "clip_grad_norm": None}
    found = []
    for reduce_dtype in reduce_dtypes:
        precision = {"dtype": "bf16", "reduce_dtype": reduce_dtype}
        with running(batch=batch, precision=precision, optimizer=sgd, parallel={"zero_stage": 1}) as run:
            run.engine.train_step(run.batches(0), 1.0)
            found.append({key: tensor for key, tensor in run.state().items() if key.endswith("weight")})
    return found


def test_bf16_gradients_are_added_over_dp_in_fp32():
    """DeepSpeed's default rounds sums of micro-batches to bf16 and adds ranks up in bf16. With ZeRO-1, two ranks with
    a micro-batch each have the masters of one rank with both, to fp32's rounding; in bf16 they have not."""
    (alone,) = run_ranks(masters_after_a_step, 1, [None])[0]
    in_fp32, in_bf16 = run_ranks(masters_after_a_step, 2, [None, "bf16"])[0]
    off = [max(float((alone[key] - each[key]).abs().max()) for key in alone) for each in (in_fp32, in_bf16)]
    assert off[0] < 1e-6
    assert off[1] > 10 * off[0]


def train_in_a_row() -> list[Curve]:
    """Curves of dp 2 after engines of other kinds in the same process, one of them never closed."""
    dp = {"parallel": {"dp": 2, "zero_stage": 2}}
    results = train_all([{"parallel": {"tp": 2}}, dp, {"parallel": {"pp": 2}}, dp])
    leaving = running(parallel={"tp": 2})
    leaving.__enter__().step(0)  # as after an error
    return [results[1], results[3], *train_all([dp])]


def test_engines_of_one_process_do_not_share_groups():
    """DeepSpeed keeps the first engine's tensor-parallel groups for all later ones. A dp engine after a tp engine, a
    pipeline, and a tp engine that was never closed has the curve of a dp engine alone, bit for bit."""
    (alone,) = curves(2, {"parallel": {"dp": 2, "zero_stage": 2}})
    for results in run_ranks(train_in_a_row, 2):
        assert results == [alone] * 3


NONFINITE = {
    "dp 2, ZeRO-0": ({"dp": 2, "zero_stage": 0}, "blocks.0.mlp.down.weight", 1),
    "dp 2, ZeRO-1": ({"dp": 2}, "blocks.0.mlp.down.weight", 1),
    "dp 2, ZeRO-2": ({"dp": 2, "zero_stage": 2}, "head.weight", 0),
    "tp 2": ({"tp": 2}, "blocks.1.attention.qkv.weight", 1),
    "tp 2 with sequence parallelism": ({"tp": 2, "sequence_parallel": True}, "head.weight", 1),
    "pp 2, first stage": ({"pp": 2}, "blocks.0.mlp.down.weight", 0),
    "pp 2, last stage": ({"pp": 2}, "head.weight", 1),
    "pp 2, ZeRO-0": ({"pp": 2, "zero_stage": 0}, "blocks.0.mlp.down.weight", 0),
}
"""Where an infinity is planted: parallel settings, parameter, rank."""


def plant_infinity() -> dict[str, tuple[bool, bool]]:
    """For each case, whether this rank raised, and whether its weights and moments stayed as they were."""
    seen = {}
    for name, (parallel, parameter, rank) in NONFINITE.items():
        with running(parallel=parallel) as run:
            run.step(0)
            if dist.get_rank() == rank:
                run.parameter(parameter).data[0, 0] = float("inf")
            before = {**run.state(), **{key: value.detach().clone() for key, value in module_weights(run)}}
            raised = False
            try:
                run.step(1)
            except NonFiniteLossError:
                raised = True
            after = {**run.state(), **dict(module_weights(run))}
            seen[name] = (raised, all(torch.equal(before[key], after[key]) for key in before))
    return seen


def module_weights(run: Run) -> list[tuple[str, Tensor]]:
    """The weights that the forward pass reads."""
    return [(f"module {name}", parameter.data) for name, parameter in run.engine.stage.named_parameters()]


def test_a_nonfinite_loss_stops_all_ranks_before_the_update():
    """DeepSpeed goes on with a NaN loss in fp32 and bf16. An infinity in a weight of one rank, wherever it is, raises
    on every rank, and no weight or moment has changed."""
    for rank, seen in enumerate(run_ranks(plant_infinity, 2)):
        wrong = {name: result for name, result in seen.items() if result != (True, True)}
        assert not wrong, f"rank {rank}, (raised, unchanged): {wrong}"


def break_gradient(zero_stage: int, parallel: dict[str, Any], dtype: str) -> list[tuple[StepResult, bool]]:
    """Three steps, the second with an infinite gradient on rank 0 and a finite loss; whether each changed anything."""
    broken, results = False, []

    def spoil(grad: Tensor) -> Tensor:
        return grad * float("inf") if broken else grad

    options = {"precision": {"dtype": dtype}, "batch": {"micro_batch_size": 2}}
    engine = "deepspeed" if zero_stage > 1 else None
    with running(parallel={**parallel, "zero_stage": zero_stage, "engine": engine}, **options) as run:
        if dist.get_rank() == 0:
            run.parameter("blocks.0.mlp_norm.weight").register_hook(spoil)
        run.step(0)  # moments exist only after the first update
        for step in (1, 2, 3):
            broken = step == 2
            before = run.state()
            result = run.step(step)
            after = run.state()
            results.append((result, all(torch.equal(before[key], after[key]) for key in before)))
    return results


SKIPS = [
    *((stage, {"dp": 2}, dtype) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")),
    (1, {"tp": 2}, "fp32"),
    (1, {"tp": 2}, "bf16"),
    (1, {"pp": 2}, "fp32"),
    (1, {"pp": 2}, "bf16"),
]
SKIPS_WITHOUT_ZERO = [(0, {"dp": 2}, "fp32"), (0, {"tp": 2}, "fp32"), (0, {"pp": 2}, "fp32")]


def break_gradients(cases: list[tuple]) -> list[list[tuple[StepResult, bool]]]:
    return [break_gradient(*case) for case in cases]


def assert_skips(cases: list[tuple]) -> None:
    for rank, results in enumerate(run_ranks(break_gradients, 2, cases)):
        for case, steps in zip(cases, results, strict=True):
            where = f"{case} rank {rank}: {steps}"
            assert [result.skipped for result, _ in steps] == [False, True, False], where
            assert [unchanged for _, unchanged in steps] == [False, True, False], where
            assert "norm" in steps[1][0].why, where
            assert steps[0][0].why == steps[2][0].why == "", where
            assert steps[2][0].grad_norm < 10.0, where


def test_a_skipped_step_is_reported():
    """DeepSpeed drops a step with a non-finite gradient without a word. StepResult says so on every rank, with the
    reason; weights and moments are untouched, and the next step is taken."""
    assert_skips(SKIPS)


def test_a_step_without_zero_is_skipped_too():
    """DeepSpeed applies a non-finite gradient at ZeRO-0, which ends the run. Ours skips the step as the others do."""
    assert_skips(SKIPS_WITHOUT_ZERO)


def ends_after_training(cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """For each case the state of the embedding and of the head on this rank after 5 steps."""
    ends = []
    for case in cases:
        with running(**case) as run:
            for step in range(STEPS):
                run.step(step)
            own = {key: value for key, value in run.state().items() if key.startswith(("embedding", "head"))}
            for name in ("embedding.weight", "head.weight"):
                if run.parameter(name) is not None:
                    own[f"{name}: module"] = run.parameter(name).detach().clone()
            ends.append({key.split(": ", 1)[0] + key.rsplit(": ", 1)[1]: value for key, value in own.items()})
    return ends


TIED_CASES = {
    2: [
        {"parallel": {"pp": 2, "zero_stage": 0}, **TIED},
        {"parallel": {"pp": 2}, **TIED},
        {"parallel": {"pp": 2}, **TIED, **BF16},
    ],
    4: [
        {"parallel": {"pp": 2, "tp": 2, "sequence_parallel": True}, **TIED},
        {"parallel": {"pp": 2, "dp": 2}, **TIED},
        {"parallel": {"pp": 2, "dp": 2}, **TIED, **BF16},
    ],
}


@pytest.mark.parametrize("world_size", TIED_CASES)
def test_tied_weights_stay_equal_on_both_ends_of_a_pipeline(world_size):
    """DeepSpeed ties by summing gradients, and anything that treats the two copies differently lets them drift. After
    5 steps the embedding of the first stage and the head of the last, their masters and moments are bit-equal."""
    cases = TIED_CASES[world_size]
    ranks = run_ranks(ends_after_training, world_size, cases)
    for number, case in enumerate(cases):
        for rank in range(world_size // 2):
            first, last = ranks[rank][number], ranks[rank + world_size // 2][number]
            for kind in ("weight", "exp_avg", "exp_avg_sq", "module"):
                pair = first[f"embedding.weight{kind}"], last[f"head.weight{kind}"]
                assert torch.equal(*pair), f"{case} rank {rank} {kind}"


GPT = {"norm": "layernorm", "activation": "gelu", "bias": "all", "positions": "learned"}
QWEN = {"num_kv_heads": 4, "qk_norm": True}

FSDP2 = {"zero_stage": 3, "engine": "fsdp2"}

REPLICATED_CASES = {
    2: [
        *({"parallel": {"tp": 2, "zero_stage": s, "sequence_parallel": True}, "model": GPT} for s in range(4)),
        {"parallel": {"tp": 2, "sequence_parallel": True}, "model": QWEN},
        {"parallel": {"tp": 2, "sequence_parallel": True}, "model": GPT, **BF16},
        {
            "parallel": {"tp": 2, "zero_stage": 3, "engine": "deepspeed", "sequence_parallel": True},
            "model": QWEN,
            **BF16,
        },
        {"parallel": {"tp": 2, **FSDP2, "sequence_parallel": True}, "model": QWEN, **BF16},
        {"parallel": {"tp": 2}, "model": {**QWEN, "dropout": 0.1}},
    ],
    4: [
        {"parallel": {"tp": 4, "sequence_parallel": True}, "model": {**GPT, "dropout": 0.1}},
        {"parallel": {"tp": 2, "dp": 2, "zero_stage": 2, "sequence_parallel": True}, "model": QWEN},
        {"parallel": {"tp": 2, "pp": 2, "sequence_parallel": True}, "model": GPT},
    ],
}


FEW = {"micro_batch_size": 4}
"""At most two a step: sums of many are no ranks' matter."""


def replicated_after_training(cases: list[dict[str, Any]]) -> list[tuple[tuple, dict[str, Tensor]]]:
    """For each case this rank's tensor-parallel group, and the weights that all of the group hold whole."""
    kept = []
    for case in cases:
        with running(**case, batch=FEW) as run:
            for step in range(STEPS):
                run.step(step)
            states = [state for state in run.engine.local_weights() if state.local.weight.cut is None]
            weights = {
                f"{state.local.weight.name}: {key}": tensor.clone()
                for state in states
                for key, tensor in state.tensors.items()
            }
            kept.append((run.axes.tp.global_ranks, weights))
    return kept


@pytest.mark.parametrize("world_size", REPLICATED_CASES)
def test_replicated_weights_stay_equal_across_tensor_parallel_ranks(world_size):
    """Norms, position tables and row biases are whole on every tp rank, and each rank updates its own copy: a gradient
    that is not summed, or clipped otherwise, lets them drift. After 5 steps they and their moments are bit-equal."""
    cases = REPLICATED_CASES[world_size]
    ranks = run_ranks(replicated_after_training, world_size, cases)
    for number, case in enumerate(cases):
        for rank in range(world_size):
            group, weights = ranks[rank][number]
            first = ranks[group[0]][number][1]
            assert weights
            drifted = [key for key in weights if not torch.equal(weights[key], first[key])]
            assert not drifted, f"{case} rank {rank}: {drifted}"


def shm_op() -> bool:
    with running(parallel={"engine": "deepspeed"}):
        import deepspeed

    return deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]


def test_no_op_is_built_at_first_use():
    """On a CPU DeepSpeed compiles a shared-memory op as it starts: a minute, and a killed build's lock hangs others."""
    assert run_ranks(shm_op, 1) == [False]
