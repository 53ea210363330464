"""Masters and optimizer state that change by themselves: seen at any bit, named by rank and weight, and undone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megalite.checkpoint.reader import CheckpointReader
from megalite.errors import EXIT_DONE
from megalite.train.components.memory_check import MemoryCheck
from tests.kit.runs import events, metrics
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, start_rank, tiny_config
from tests.train.forked import launch
from tests.train.planted import planted_config

CASES = [
    *({"parallel": {"dp": 2, "zero_stage": stage}} for stage in (0, 1, 2, 3)),
    *({"parallel": {"dp": 2, "zero_stage": stage}, "precision": {"dtype": "bf16"}} for stage in (1, 2, 3)),
    {"parallel": {"tp": 2}, "optimizer": {"name": "muon"}},
    {"parallel": {"dp": 2}, "optimizer": {"name": "adafactor"}},
    {"parallel": {"dp": 2}, "optimizer": {"name": "lion"}},
    {"parallel": {"pp": 2}},
]


def flip(rank: Rank, kind: str) -> str:
    """Change the last bit of one number that the last rank alone keeps; the name of its weight."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return ""
    part = next(part for part in rank.engine.slices() if kind in part.tensors)
    part.tensors[kind][:1].view(torch.int32).bitwise_xor_(1)
    return f"{kind} of {part.local.weight.name}"


def watch(cases: list[dict]) -> list[list[tuple[str, list[str]]]]:
    """For each case what is found in steps 1 to 8, where something is flipped before 4 and before 6."""
    seen = []
    for case in cases:
        rank = start_rank(tiny_config(**case))
        check, found = MemoryCheck(rank.engine, rank.axes, None, every=1), []
        kinds = sorted({kind for part in rank.engine.slices() for kind in part.tensors})
        for step in range(1, 9):
            flipped = flip(rank, kinds[0] if step == 4 else "weight") if step in (4, 6) else ""
            rank.train(step - 1, step)
            found.append((flipped, check.take_note(step)))
        rank.engine.close()
        seen.append(found)
    return seen


def test_a_changed_bit_is_found_and_named_in_every_layout():
    """In masters and in moments, at every ZeRO stage and for every way to keep state; nothing is found where nothing
    was changed, whatever else happens between two updates."""
    *_, last = results = run_ranks(watch, 2, CASES)
    for number, case in enumerate(CASES):
        for step, (flipped, found) in enumerate(last[number], 1):
            assert len(found) == (step in (4, 6)), (case, step, found)
            assert all(sentence.startswith(f"rank 1: {flipped}") for sentence in found), (case, step, found)
            assert all(result[number][step - 1][1] == found for result in results)


def flip_behind_step_25() -> None:
    """Rank 1's first master changes once, behind step 25."""
    from megalite.engine.native.engine import NativeEngine

    train_step, state = NativeEngine.train_step, {"calls": 0}

    def step(self: NativeEngine, *args):
        if state["calls"] == 25 and dist.get_rank() == 1:
            self.slices()[0].tensors["weight"][:1] += 1.0
        state["calls"] += 1
        return train_step(self, *args)

    NativeEngine.train_step = step


def test_a_run_goes_back_and_ends_as_if_nothing_had_been(tmp_path):
    """A master of ZeRO-1 that changed behind step 25: found in step 26, before a checkpoint could be made of it; the
    run goes back and ends, to the last bit, like one whose memory holds."""
    sections = {"health": {"check_memory_every": 5, "check_replicas_every": None}}
    quiet = planted_config(tmp_path / "quiet", range(0), steps=30, **sections)
    moved = planted_config(tmp_path / "moved", range(0), steps=30, **sections)
    assert launch(quiet, 2) == EXIT_DONE
    assert launch(moved, 2, prepare=flip_behind_step_25) == EXIT_DONE
    (changed,) = (event for event in events(moved.run.dir) if event["event"] == "memory_changed")
    assert changed["step"] == 26
    assert "rank 1: weight of " in changed["why"]
    (rollback,) = (event for event in events(moved.run.dir) if event["event"] == "rollback")
    assert (rollback["to_step"], rollback["left_out"]) == (20, [])
    want, got = ([record["loss"] for record in metrics(each.run.dir)] for each in (quiet, moved))
    assert got == want
    want, got = (CheckpointReader(each.run.dir / "checkpoints/step-0000030") for each in (quiet, moved))
    for name in want.manifest.tensors:
        assert all(torch.equal(a, b) for a, b in zip(want.slabs(name), got.slabs(name), strict=True)), name
