"""Gradients and weights that travel in few bits, alone and beside an optimizer in the host's memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.native import replication
from megalite.engine.wire import add_up, cut_padding, pack, padded, padded_size, unpack
from megalite.train.replicas import Replicas
from tests.kit.batches import step_batches
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

BLOCK = 256
FSDP2 = {"zero_stage": 3, "engine": "fsdp2"}
SMALL = {"num_layers": 2}


def rounded(numbers: Tensor, bits: int) -> Tensor:
    """By the formula, in numpy."""
    most = np.float32(2 ** (bits - 1) - 1)
    found = np.zeros(numbers.numel(), np.float32)
    for begin in range(0, numbers.numel(), BLOCK):
        block = numbers[begin : begin + BLOCK].numpy()
        scale = np.abs(block).max() / most
        if scale > 0:
            found[begin : begin + BLOCK] = np.rint(block / scale) * scale
    return torch.from_numpy(found)


def test_messages():
    """Each number as the formula has it, within half a code; sums in the order of the ranks; zeros, and padding."""
    torch.manual_seed(1)
    numbers = torch.randn(6 * BLOCK) * torch.logspace(-20, 3, 6 * BLOCK)
    numbers[BLOCK : 2 * BLOCK] = 0.0
    for bits in (4, 8):
        wanted = rounded(numbers, bits)
        for rows in (1, 3):
            message, out = pack(numbers, bits, rows), torch.empty_like(numbers)
            assert message.numel() == 6 * (4 + BLOCK * bits // 8)
            unpack(message, bits, out)
            assert torch.equal(out, wanted)
            total = torch.empty(6 * BLOCK // rows)
            add_up(message, bits, total)
            assert torch.equal(total, sum(wanted.view(rows, -1).unbind()))
        largest = numbers.view(-1, BLOCK).abs().amax(-1, keepdim=True)
        off = (wanted - numbers).view(-1, BLOCK).abs()
        assert (off <= 0.5001 * largest / (2 ** (bits - 1) - 1)).all()
    sizes = (5, 300, 256)
    flat = torch.randn(2 * sum(sizes))
    wide, back = padded(flat, sizes, 2), torch.empty_like(flat)
    assert wide.numel() == 2 * padded_size(sizes) == 2 * 4 * BLOCK
    assert torch.equal(wide.view(2, -1)[1, :5], flat[sum(sizes) :][:5])
    cut_padding(wide, sizes, back, 2)
    assert torch.equal(back, flat)


def test_what_is_not_finite_stays_so():
    """All of its block, which a norm then tells, and nothing else."""
    for bits in (4, 8):
        for bad in (math.inf, -math.inf, math.nan):
            numbers = torch.ones(3 * BLOCK)
            numbers[BLOCK + 7] = bad
            out = torch.empty_like(numbers)
            unpack(pack(numbers, bits), bits, out)
            assert [int(block.isfinite().sum()) for block in out.split(BLOCK)] == [BLOCK, 0, BLOCK]


def summed(every: list[Tensor], bits: int, within: int | None) -> Tensor:
    """Of all ranks' gradients, each rounded; node by node where they go on rounded once more."""
    found = [rounded(each, bits) for each in every]
    if within is None:
        return sum(found)
    nodes = [sum(found[first : first + within]) for first in range(0, len(found), within)]
    return sum(rounded(each, bits) for each in nodes)


def reduced_by_hand(cases: list[tuple[dict[str, Any], int]]) -> list[bool]:
    """Whether a step's sums are those of all ranks' rounded gradients, and copies are equal on all ranks."""
    found = []
    for parallel, bits in cases:
        rank = start_rank(tiny_config(parallel=parallel, precision={"reduce_bits": bits}, model=SMALL))
        wanted: list[tuple[Any, Tensor]] = []
        send = replication.Replication._send_rounded

        within = parallel.get("reduce_within")

        def sent(self, bucket, send=send, wanted=wanted, bits=bits, within=within):
            every = [torch.empty_like(bucket.sums) for _ in range(bucket.replicas.size)]
            dist.all_gather(every, bucket.sums, group=bucket.replicas.group)
            wanted.append((bucket, summed(every, bits, within)))
            send(self, bucket)

        replication.Replication._send_rounded = sent
        engine: Any = rank.engine
        is_right: list[bool] = []
        wait = engine._replication.wait_for_sums

        def waited(wait=wait, wanted=wanted, is_right=is_right):
            wait()
            is_right.extend(torch.equal(bucket.own_sums, total[bucket.own]) for bucket, total in wanted)

        engine._replication.wait_for_sums = waited
        rank.train(0, 1)
        replication.Replication._send_rounded = send
        found.append(all(is_right) and len(is_right) > 0 and not Replicas(rank.engine, rank.axes).find_drift())
    return found


def test_gradients_are_rounded_once():
    """The owner's sum of a bucket is that of every rank's gradients, each rounded by the formula: over dp x cp, beside
    tensor parallelism and a pipeline, with ZeRO 0 and 1; in two hops each node's sum is rounded too."""
    cases = [
        ({"dp": 2, "tp": 2}, 8),
        ({"dp": 2, "cp": 2, "zero_stage": 0}, 4),
        ({"dp": 2, "pp": 2}, 4),
        ({"dp": 4, "reduce_within": 2}, 8),
    ]
    for rank in run_ranks(reduced_by_hand, 4, cases):
        assert rank == [True] * len(cases)


def kept_near(cases: list[dict[str, Any]]) -> list[tuple[list[tuple[float, float]], float]]:
    """Curves with an evaluation in the middle, and its loss."""
    found = []
    for sections in cases:
        rank = start_rank(tiny_config(**sections, model=SMALL))
        curve = rank.train(0, 2)
        loss = rank.engine.eval_step(_batches(rank, 2)).total
        found.append((curve + rank.train(2, 4), loss))
        rank.engine.close()
    return found


def _batches(rank: Any, step: int) -> Any:
    batch, axes = rank.config.batch, rank.axes
    sizes = {"global_batch_size": batch.global_batch_size, "micro_batch_size": batch.micro_batch_size}
    where = {"dp": axes.batch.size, "dp_rank": axes.batch.rank}
    return step_batches(step, **sizes, **where, seq_len=batch.seq_len, vocab_size=rank.plan.model.vocab_size)


def test_weights_kept_near():
    """What neighbours keep between a block's passes is what was gathered: no bit differs, with rounded weights either,
    with recomputation, and where an evaluation comes between. Gradients in two hops stay near exact ones."""
    kinds: list[dict[str, Any]] = [{}, {"precision": {"gather_bits": 8}, "train": {"recompute": "full"}}]
    cases = [{**kind, "parallel": {"dp": 4, "hpz_size": size, **FSDP2}} for kind in kinds for size in (None, 2)]
    hops = {"parallel": {"dp": 4, "reduce_within": 2}, "precision": {"reduce_bits": 8}}
    cases += [hops, {**hops, "parallel": {**hops["parallel"], **FSDP2}}]
    for found in run_ranks(kept_near, 4, cases):
        assert found[0] == found[1] != found[2] == found[3]
        for curve, _ in found[4:]:
            off = max(abs(loss - wanted) for (loss, _), (wanted, _) in zip(curve, found[0][0], strict=True))
            assert 1e-6 < off < 5e-3


NATIVE_CASES: dict[str, dict[str, Any]] = {
    "exact": {},
    "8 bits": {"precision": {"reduce_bits": 8}},
    "4 bits": {"precision": {"reduce_bits": 4}},
    "8 bits, ZeRO 0": {"precision": {"reduce_bits": 8}, "parallel": {"zero_stage": 0}},
    "weights": {"precision": {"gather_bits": 8}},
    "both": {"precision": {"reduce_bits": 8, "gather_bits": 8}},
    "both, bf16": {"precision": {"dtype": "bf16", "reduce_bits": 8, "gather_bits": 8}},
    "both, offloaded": {"precision": {"reduce_bits": 8, "gather_bits": 8}, "optimizer": {"offload": True}},
}
FSDP2_CASES: dict[str, dict[str, Any]] = {
    "FSDP2": {},
    "FSDP2, offloaded": {"optimizer": {"offload": True}},
    "FSDP2, 8 bits": {"precision": {"reduce_bits": 8}},
    "FSDP2, weights": {"precision": {"gather_bits": 8}},
    "FSDP2, both, offloaded": {"precision": {"reduce_bits": 4, "gather_bits": 8}, "optimizer": {"offload": True}},
}
SOME = ("both", "both, bf16", "FSDP2, both, offloaded")
"""Stopped in the middle and gone on with."""


def of_cases(layout: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections of each case, on a layout."""
    found = {}
    for kind, cases in (({}, NATIVE_CASES), (FSDP2, FSDP2_CASES)):
        for name, sections in cases.items():
            parallel = {**kind, **layout, **sections.get("parallel", {})}
            found[name] = {"model": SMALL, **sections, "parallel": parallel}
    return found


def trained(cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Curves; whether the rest is repeated from a checkpoint, whether copies are equal, and whether what computes is
    what its masters are rounded to."""
    found: dict[str, Any] = {}
    for name, sections in cases.items():
        rank = start_rank(tiny_config(**sections))
        curve = rank.train(0, 4)
        again = None
        if name in SOME:
            where = rank.save(folder / name, 4)
            dist.barrier()
            rest = rank.train(4, 6)
            again = start_rank(tiny_config(**sections), where).train(4, 6) == rest
        drift = [str(each) for each in Replicas(rank.engine, rank.axes).find_drift()]
        found[name] = (curve, again, drift, _computes_with_rounded(rank) if name == "weights" else None)
        rank.engine.close()
    return found


def _computes_with_rounded(rank: Any) -> bool:
    rank.engine.held_weights()
    checks = []
    for bucket in rank.engine._buckets:
        mine = bucket.own_weights
        checks.append(torch.equal(mine, rounded(bucket.master, 8)) and not torch.equal(mine, bucket.master))
    return all(checks)


def test_runs_with_few_bits(tmp_path):
    """Losses stay near the exact ones and differ; a restart repeats them bit by bit; copies are equal; masters stay
    exact. An offloaded optimizer makes the same bits as one beside the weights. ZeRO 0 and 1 round alike."""
    ranks = run_ranks(trained, 2, of_cases({"dp": 2}), tmp_path)
    for found in ranks:
        exact = found["exact"][0]
        for name, (curve, again, drift, is_rounded) in found.items():
            assert curve == ranks[0][name][0], name
            assert not drift, f"{name}: {drift}"
            assert again is not False, f"{name}: another continuation"
            assert is_rounded is not False, name
            off = max(abs(loss - wanted) for (loss, _), (wanted, _) in zip(curve, exact, strict=True))
            is_exact = name in ("exact", "FSDP2", "FSDP2, offloaded")
            assert off < 1e-5 if is_exact else 1e-6 < off < 5e-3, f"{name}: loss off by {off:.1e}"
        assert found["FSDP2, offloaded"][0] == found["FSDP2"][0]
        assert found["both, offloaded"][0] == found["both"][0]
        losses = ([loss for loss, _ in found[name][0]] for name in ("8 bits", "8 bits, ZeRO 0"))
        assert next(losses) == next(losses)
