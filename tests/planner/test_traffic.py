"""What the planner says that ranks send, against the collectives of real steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.config.plan import make_plan
from megalite.layers import dispatch
from megalite.parallel import collectives, messages
from megalite.planner.traffic import traffic_by_stage
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

TOLERANCE = 0.03
"""Weights that every rank holds whole: their gradients are few numbers, but the model is tiny."""

LATENTS = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence parallel": {"parallel": {"sequence_parallel": True}},
    "full recomputation": {"train": {"recompute": "full"}},
    "both": {"train": {"recompute": "full"}, "parallel": {"sequence_parallel": True}},
    "inputs wait elsewhere": {"train": {"recompute": "full", "offload_activations": True}},
    "again behind norms": {"train": {"recompute": "full"}, "model": {"norm_placement": "both"}},
    "again behind norms of sums": {"train": {"recompute": "full"}, "model": {"norm_placement": "post"}},
    "some blocks again": {"train": {"recompute_layers": [{"every": 3}]}},
    "selective": {"train": {"recompute": "selective"}},
    "norms over all heads": {"model": {"qk_norm": "whole", "norm_placement": "after"}},
    "a shared kv head": {"model": {"num_kv_heads": 1}},
    "a shared kv head, selective": {"model": {"num_kv_heads": 1}, "train": {"recompute": "selective"}},
    "a shared kv head again": {"model": {"num_kv_heads": 1}, "train": {"recompute": "full"}},
    "chunks": {"train": {"mlp_chunk_tokens": 7}},
    "chunks again": {"train": {"mlp_chunk_tokens": 7, "recompute": "full"}},
    "chunks, sequence parallel": {"train": {"mlp_chunk_tokens": 7}, "parallel": {"sequence_parallel": True}},
    "chunks, both": {"train": {"mlp_chunk_tokens": 7, "recompute": "full"}, "parallel": {"sequence_parallel": True}},
    "further": {"model": {"mtp": {"num_layers": 2}}},
    "further, sequence parallel": {"model": {"mtp": {"num_layers": 1}}, "parallel": {"sequence_parallel": True}},
    "further, again": {"model": {"mtp": {"num_layers": 1}}, "train": {"recompute": "full"}},
    "parallel residual": {"model": {"parallel_residual": True}},
    **{
        f"latents {mla['q_lora_rank']}, {recompute}, {sequence_parallel}": {
            "model": {"mla": mla},
            "train": {"recompute": recompute},
            "parallel": {"sequence_parallel": sequence_parallel},
        }
        for mla in (LATENTS, {**LATENTS, "q_lora_rank": None})
        for recompute in ("none", "selective", "full")
        for sequence_parallel in (False, True)
    },
}


SHARES = {
    "all_reduce": 1.0,
    "allreduce": 1.0,
    "all_gather": 0.5,
    "allgather": 0.5,
    "reduce_scatter": 0.5,
    "scatter_sum": 0.5,
    "all_to_all": 0.5,
    "context::gather": 0.5,
}
"""Of the largest tensor that a collective has, what a ring of two ranks sends."""


class CountBytes(TorchDispatchMode):
    """Adds up what the ranks of two send each other; groups of one, which DeepSpeed uses too, send nothing."""

    namespaces: tuple[str, ...] = ("_c10d_functional", "c10d", "megalite_gloo")

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in self.namespaces and not _is_alone(args):
            share = next((share for part, share in SHARES.items() if part in func.name().lower()), 0.0)
            tensors = [each for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor)]
            self.sent += share * max((each.numel() * each.element_size() for each in tensors), default=0)
        return result


def _is_alone(args: Any) -> bool:
    objects = [each for each in tree_leaves(args) if isinstance(each, torch.ScriptObject)]
    groups = [dist.ProcessGroup.unbox(each) for each in objects if "ProcessGroup" in str(each._type())]
    return any(group.size() == 1 for group in groups)


class CountMessages:
    """The same of messages that are begun beside products, whose ops the mode does not look into. Stands for
    `torch.distributed` in their module."""

    def __init__(self, count: CountBytes):
        self._count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, x: torch.Tensor, **options: Any) -> Any:
        return self._sent(1.0, x, dist.all_reduce(x, **options))

    def all_gather(self, whole: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
        return self._sent(0.5, whole, collectives.fill_all_gather(whole, x, **options))

    def all_to_all_single(self, received: torch.Tensor, sent: torch.Tensor, **options: Any) -> Any:
        return self._sent(0.5, sent, dist.all_to_all_single(received, sent, **options))

    def batch_isend_irecv(self, ops: list[dist.P2POp]) -> Any:
        for each in ops:
            self._sent(float(each.op is dist.isend), each.tensor, None)
        return dist.batch_isend_irecv(ops)

    def _sent(self, share: float, x: torch.Tensor, work: Any) -> Any:
        self._count.sent += share * x.numel() * x.element_size()
        return work


def _count(settings: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Bytes that this rank of two sends in a forward and a backward pass, by case."""
    found = {}
    for name, sections in settings.items():
        parallel = {"tp": 2, "zero_stage": 0, **sections.get("parallel", {})}
        rank = start_rank(tiny_config(**{**sections, "parallel": parallel}))
        with CountBytes() as count:
            counted = CountMessages(count)
            with (
                mock.patch.object(messages, "dist", counted),
                mock.patch.object(messages, "fill_all_gather", counted.all_gather),
            ):
                rank.train(0, 1)
        found[name] = round(count.sent)
    return found


def test_tensor_parallel_bytes():
    """Forward, backward and recomputation, with and without sequence parallelism."""
    found = run_ranks(_count, 2, CASES)[0]
    for name, sections in CASES.items():
        parallel = {"tp": 2, "zero_stage": 0, **sections.get("parallel", {})}
        config = tiny_config(**{**sections, "parallel": parallel})
        (planned,) = traffic_by_stage(config, make_plan(config, 2))
        assert found[name] == pytest.approx(planned.tp, rel=TOLERANCE), name


RECOMPUTATIONS = ("none", "selective", "full")

CONTEXT_CASES: dict[str, dict[str, Any]] = {
    f"{kind}, {recompute}, {kv_heads} kv heads": {
        "parallel": {"cp": 2, "cp_kind": kind, "zero_stage": 0},
        "train": {"recompute": recompute},
        "model": {"num_kv_heads": kv_heads},
    }
    for kind in ("allgather", "ulysses")
    for recompute in RECOMPUTATIONS
    for kv_heads in (4, 1)
} | {
    f"{kind}, {recompute}, latents": {
        "parallel": {"cp": 2, "cp_kind": kind, "zero_stage": 0},
        "train": {"recompute": recompute},
        "model": {"mla": LATENTS},
    }
    for kind in ("allgather", "ulysses")
    for recompute in RECOMPUTATIONS
}


class CountContext(CountBytes):
    """What context parallelism alone sends: gradients are summed by other ops."""

    namespaces = ("_c10d_functional", "megalite_context", "megalite_gloo")


def _count_context() -> dict[str, int]:
    """Bytes that this rank of two sends for attention in a step, by case."""
    found = {}
    for name, sections in CONTEXT_CASES.items():
        rank = start_rank(tiny_config(**sections))
        with CountContext() as count:
            rank.train(0, 1)
        found[name] = round(count.sent)
    return found


def test_context_parallel_bytes():
    """To the byte."""
    found = run_ranks(_count_context, 2)[0]
    for name, sections in CONTEXT_CASES.items():
        config = tiny_config(**sections)
        (planned,) = traffic_by_stage(config, make_plan(config, 2))
        assert (found[name], planned.tp) == (planned.cp, 0), name


EXPERTS = {"num_experts": 4, "top_k": 4, "ffn_hidden_size": 16}
"""All are chosen by all, which is even."""

EXPERT_CASES: dict[str, dict[str, Any]] = {
    f"{recompute}, every {every}": {
        "parallel": {"dp": 2, "ep": 2, "zero_stage": 0},
        "train": {"recompute": recompute},
        "model": {"moe": {**EXPERTS, "every": every}},
    }
    for recompute in RECOMPUTATIONS
    for every in (1, 2)
} | {
    "further": {
        "parallel": {"dp": 2, "ep": 2, "zero_stage": 0},
        "model": {"moe": EXPERTS, "mtp": {"num_layers": 2}},
    }
}


def _count_sent_to_experts() -> dict[str, int]:
    """Bytes that this rank of two sends to the other's experts, and gets back, in a step, by case."""
    found = {}
    for name, sections in EXPERT_CASES.items():
        rank, sent = start_rank(tiny_config(**sections)), [0]
        begin = dispatch.Message.begin

        def counted(
            message: dispatch.Message, x: torch.Tensor, *, is_back: bool = False, begin: Any = begin, sent: Any = sent
        ) -> torch.Tensor:
            others = [size for to, size in enumerate(message._received if is_back else message._sent) if to]
            sent[0] += sum(others) * x.shape[1] * x.element_size()
            return begin(message, x, is_back=is_back)

        with mock.patch.object(dispatch.Message, "begin", counted):
            rank.train(0, 1)
        found[name] = sent[0]
    return found


def test_bytes_to_experts():
    """To the byte."""
    found = run_ranks(_count_sent_to_experts, 2)[0]
    for name, sections in EXPERT_CASES.items():
        config = tiny_config(**sections)
        (planned,) = traffic_by_stage(config, make_plan(config, 2))
        assert found[name] == planned.ep, name


def _ring_case(recompute: str) -> Any:
    return tiny_config(
        parallel={"cp": 4, "cp_kind": "ring", "zero_stage": 0},
        train={"recompute": recompute},
        model={"num_kv_heads": 2},
    )


def _sent_around() -> list[int]:
    """Bytes that this rank sends to the next one in a step, by kind of recomputation."""
    found = []
    for recompute in RECOMPUTATIONS:
        rank = start_rank(_ring_case(recompute))
        with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as send:
            rank.train(0, 1)
        messages = [each.tensor for call in send.call_args_list for each in call.args[0] if each.op is dist.isend]
        found.append(sum(message.nbytes for message in messages))
    return found


def test_bytes_around_the_ring():
    """To the byte, on every rank."""
    planned = []
    for recompute in RECOMPUTATIONS:
        config = _ring_case(recompute)
        planned.append(traffic_by_stage(config, make_plan(config, 4))[0].cp)
    assert run_ranks(_sent_around, 4) == [planned] * 4


def test_by_hand():
    """Two stages at tp 4: blocks of four rounds, the embedding's and the head's one; streams to the neighbour."""
    config = tiny_config(parallel={"tp": 4, "pp": 2, "zero_stage": 0}, model={"num_layers": 2})
    plan = make_plan(config, 8)
    tokens, stream = 8 * 16, 4 * 32
    ring = 2 * 3 / 4
    first, last = traffic_by_stage(config, plan)
    blocks = [len(plan.blocks_of(stage)) for stage in range(plan.pp)]
    assert first.tp == tokens * ring * (4 * stream * blocks[0] + stream)
    assert last.tp == tokens * ring * (4 * stream * blocks[1] + stream + 3 * 4)
    assert (first.pp, last.pp) == (tokens * stream, tokens * stream)


SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


def _pipeline(schedule: str) -> Any:
    return tiny_config(
        parallel={"pp": 2, "schedule": schedule, "zero_stage": 0}, model={"num_layers": 4, "tie_embeddings": False}
    )


def _messages(schedules) -> list[int]:
    """Bytes that this rank of two sends to the other one in a step, by schedule."""
    found = []
    for schedule in schedules:
        rank = start_rank(_pipeline(schedule))
        with mock.patch.object(dist, "isend", wraps=dist.isend) as send:
            rank.train(0, 1)
        found.append(sum(call.args[0].nbytes for call in send.call_args_list))
    return found


def test_pipeline_bytes():
    """Chunk by chunk: in loops all borders are between stages, in a V not the one at its foot."""
    found = zip(*run_ranks(_messages, 2, SCHEDULES), strict=True)
    for schedule, sent in zip(SCHEDULES, found, strict=True):
        config = _pipeline(schedule)
        planned = traffic_by_stage(config, make_plan(config, 2))
        assert sent == tuple(stage.pp for stage in planned), schedule
        assert sent[0] > 0
