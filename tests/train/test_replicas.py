"""Copies of weights that drift apart: seen at any bit, named by rank, and undone by going back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint.reader import CheckpointReader
from megalite.config.validate import validate
from megalite.errors import EXIT_DONE, ConfigError
from megalite.train.replicas import PRIME, WORDS_AT_ONCE, Drift, Replicas, find_odd_ones, hash_tensor
from tests.kit.runs import events, metrics
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config
from tests.train.forked import launch
from tests.train.planted import planted_config

NORM = "blocks.0.attention_norm.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_bit_changes_the_hash(dtype):
    """Every single bit of a tensor, and two neighbours that change places."""
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {hash_tensor(tensor).item()}
    bits = tensor.view(torch.int32 if dtype == torch.float32 else torch.int16).flatten()
    for index in range(bits.numel()):
        for bit in range(8 * tensor.element_size() - 1):
            bits[index] ^= 1 << bit
            seen.add(hash_tensor(tensor).item())
            bits[index] ^= 1 << bit
    assert len(seen) == 1 + bits.numel() * (8 * tensor.element_size() - 1)
    turned = tensor.clone()
    turned[0, 0], turned[0, 1] = tensor[0, 1], tensor[0, 0]
    assert hash_tensor(turned).item() != hash_tensor(tensor).item()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 40])
def test_the_hash_of_many_words(size, monkeypatch):
    """Taken block by block it is the sum of every word times its own odd number, modulo 2^64."""
    monkeypatch.setitem(WORDS_AT_ONCE, "cpu", 8)
    words = torch.randint(-(1 << 31), 1 << 31, (size,), generator=torch.Generator().manual_seed(size)).to(torch.int32)
    expected = sum(word * (2 * index + 1) * PRIME for index, word in enumerate(words.tolist())) % (1 << 64)
    assert hash_tensor(words.view(torch.float32)).item() % (1 << 64) == expected


def test_the_minority_is_named():
    """One of four, and two of two, of whom nobody can tell which is wrong."""
    copies = [{("norm", 0): 5, ("mlp", 0): 1}, {("norm", 0): 5}, {("norm", 0): 6, ("mlp", 0): 2}, {("norm", 0): 5}]
    found = list(find_odd_ones(copies))
    assert found == [Drift("mlp", (0, 2), (0, 2)), Drift("norm", (2,), (0, 1, 2, 3))]
    assert [str(each) for each in found] == [
        "mlp differs between ranks 0, 2",
        "norm on rank 2 differs from ranks 0, 1, 3",
    ]


CASES = {
    "dp 2": ({"dp": 2}, "blocks.1.mlp.down.weight", True),
    "dp 2, ZeRO-2": ({"dp": 2, "zero_stage": 2}, "head.weight", True),
    "dp 2, ZeRO-3": ({"dp": 2, "zero_stage": 3, "engine": "deepspeed"}, NORM, False),
    "cp 2": ({"cp": 2}, "blocks.1.mlp.down.weight", True),
    "tp 2": ({"tp": 2}, NORM, True),
    "tp 2, a cut weight": ({"tp": 2}, "blocks.0.mlp.down.weight", False),
    "tp 2, FSDP2": ({"tp": 2, "zero_stage": 3, "engine": "fsdp2"}, NORM, True),
    "dp 2, FSDP2, copies": ({"dp": 2, "zero_stage": 3, "engine": "fsdp2", "dp_replicate": 2}, NORM, True),
    "tp 2, ZeRO-3": ({"tp": 2, "zero_stage": 3, "engine": "deepspeed"}, NORM, True),
    "ep 2, an expert": ({"dp": 2, "ep": 2}, "blocks.1.mlp.experts.down", False),
    "ep 2, a router": ({"dp": 2, "ep": 2}, "blocks.1.mlp.router.weight", True),
    "dp 2, an expert": ({"dp": 2, "zero_stage": 0}, "blocks.1.mlp.experts.gate_up", True),
    "pp 2, tied": ({"pp": 2}, "head.weight", True),
    "pp 2, further": ({"pp": 2}, "embedding.weight", True),
    "pp 2, a stage's own": ({"pp": 2}, "final_norm.weight", False),
}
"""Layout, a weight that is nudged on rank 1, whether rank 0 has a copy of it."""


def nudge(names: list[str]) -> list[tuple[list[Drift], list[Drift]]]:
    """For each case what is found before and after the last bit of one number changes on the last rank."""
    seen = []
    for name in names:
        parallel, weight, _ = CASES[name]
        others = {"mtp": {}} if "further" in name else {}
        others |= {"moe": {"num_experts": 4}} if ".experts." in weight or ".router." in weight else {}
        rank = start_rank(tiny_config(parallel=parallel, model={"tie_embeddings": "tied" in name, **others}))
        rank.train(0, 1)
        replicas = Replicas(rank.engine, rank.axes)
        before = replicas.find_drift()
        if dist.get_rank() == dist.get_world_size() - 1:
            parameter = dict(rank.engine.stage.named_parameters())[weight]
            data = getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter.data))
            data.view(-1)[3:4].view(torch.int32).bitwise_xor_(1)
        seen.append((before, replicas.find_drift()))
        rank.engine.close()
    return seen


def test_a_changed_bit_is_found_in_every_layout():
    """Weights that ZeRO leaves whole over dp, norms over tp, tied embeddings over pp; what only one rank has is left
    alone. All ranks find the same."""
    names = list(CASES)
    for results in run_ranks(nudge, 2, names):
        for name, (before, after) in zip(names, results, strict=True):
            _, weight, is_shared = CASES[name]
            wanted = [Drift("embedding.weight" if "tied" in name else weight, (0, 1), (0, 1))] if is_shared else []
            assert (before, after) == ([], wanted), name


def nudge_one_of_four() -> list[Drift]:
    rank = start_rank(tiny_config(parallel={"tp": 2, "dp": 2}))
    if dist.get_rank() == 3:
        dict(rank.engine.stage.named_parameters())[NORM].data[3] += 1e-3
    found = Replicas(rank.engine, rank.axes).find_drift()
    rank.engine.close()
    return found


def test_a_norm_on_one_tensor_parallel_rank_is_named():
    """tp 2 x dp 2, a norm nudged on rank 3: it is named, on all ranks."""
    assert run_ranks(nudge_one_of_four, 4) == [[Drift(NORM, (3,), (0, 1, 2, 3))]] * 4


def nudge_after_step_25() -> None:
    """Rank 1's copy of a norm moves once, behind step 25."""
    from megalite.engine.native.engine import NativeEngine

    train_step, state = NativeEngine.train_step, {"calls": 0}

    def step(self: NativeEngine, *args):
        result = train_step(self, *args)
        state["calls"] += 1
        if state["calls"] == 25 and dist.get_rank() == 1:
            dict(self.stage.named_parameters())[NORM].data[3] += 1e-3
        return result

    NativeEngine.train_step = step


def test_a_run_goes_back_and_ends_as_if_nothing_had_been(tmp_path):
    """A norm nudged on one tp rank: the check at step 25 finds it, the run goes back to step 20 and reads the same data
    again; every loss and every weight at the end is that of an undisturbed run, to the last bit."""
    sections = {"parallel": {"tp": 2, "dp": 1, "zero_stage": 0}, "health": {"check_replicas_every": 5}}
    quiet = planted_config(tmp_path / "quiet", range(0), steps=30, **sections)
    moved = planted_config(tmp_path / "moved", range(0), steps=30, **sections)
    assert launch(quiet, 2) == EXIT_DONE
    assert launch(moved, 2, prepare=nudge_after_step_25) == EXIT_DONE
    (drift,) = (event for event in events(moved.run.dir) if event["event"] == "drift")
    assert (drift["step"], drift["ranks"]) == (25, [0, 1])
    assert NORM in drift["why"]
    (rollback,) = (event for event in events(moved.run.dir) if event["event"] == "rollback")
    assert (rollback["to_step"], rollback["left_out"]) == (20, [])
    want, got = ([record["loss"] for record in metrics(each.run.dir)] for each in (quiet, moved))
    assert got == want
    want, got = (CheckpointReader(each.run.dir / "checkpoints/step-0000030") for each in (quiet, moved))
    assert got.manifest.progress == want.manifest.progress
    for name in want.manifest.tensors:
        assert all(torch.equal(a, b) for a, b in zip(want.slabs(name), got.slabs(name), strict=True)), name


def test_a_check_without_copies_is_refused():
    """One rank, and ZeRO-3 over dp alone, hold nothing twice."""
    health = {"check_replicas_every": 10}
    for parallel in ({}, {"dp": 2, "zero_stage": 3, "engine": "deepspeed"}):
        config = tiny_config(parallel=parallel, health=health)
        with pytest.raises(ConfigError, match=r"check_replicas_every: found 10, .* no weight is held by two ranks"):
            validate(config, parallel.get("dp", 1))
    validate(tiny_config(parallel={"tp": 2}, health=health), 2)


def nudge_an_expert_of_four() -> list[Drift]:
    model = {"moe": {"num_experts": 4}}
    rank = start_rank(tiny_config(parallel={"dp": 4, "ep": 2}, model=model))
    if dist.get_rank() == 3:
        dict(rank.engine.stage.named_parameters())["blocks.0.mlp.experts.down"].data.view(-1)[3] += 1e-3
    found = Replicas(rank.engine, rank.axes).find_drift()
    rank.engine.close()
    return found


def test_experts_are_compared_with_those_that_are_the_same():
    """dp 4, ep 2, an expert nudged on rank 3: rank 1 has the same experts, and ranks 0 and 2 have others."""
    assert run_ranks(nudge_an_expert_of_four, 4) == [[Drift("blocks.0.mlp.experts.down", (1, 3), (1, 3))]] * 4
