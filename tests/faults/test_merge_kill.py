"""kill -9 in the middle of a merge, a differential save or a load: what was there is untouched, what is there whole."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.catalog import REPLACED
from megalite.checkpoint.differential import Storage
from megalite.checkpoint.format import folder_name, hash_file
from megalite.checkpoint.merge import MERGING, merge
from tests.checkpoint.stored import assert_holds, store

TRIES = 20
STORAGE = Storage(differential=True, chunk_bytes=2**16)


def state(step: int) -> dict[str, torch.Tensor]:
    """Some ten MB, half of it frozen."""
    frozen = torch.arange(1_500_000, dtype=torch.float32).reshape(1500, 1000)
    return {"weight/frozen": frozen, "weight/new": torch.full((1500, 1000), float(step))}


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path).xxh3_128 for path in folder.iterdir()}


def merge_on_sign(source: Path, out: Path, ready: object) -> None:
    torch.set_num_threads(1)
    ready.set()
    merge(source, out, overwrite=True)


def save_on_sign(base: Path, root: Path, ready: object) -> None:
    torch.set_num_threads(1)
    tensors = state(9)
    ready.set()
    store(root, 9, tensors, base=base, storage=STORAGE)


def load_on_sign(folder: Path, ready: object) -> None:
    torch.set_num_threads(1)
    ready.set()
    assert_holds(folder, state(3))


def kill_at_random(target, args: tuple, seconds: float, rng: random.Random) -> bool:
    """Run a function in a process of its own and kill it within `seconds`; whether that came before its end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ready = context.Event()
    process = context.Process(target=target, args=(*args, ready))
    process.start()
    assert ready.wait(120)
    time.sleep(rng.uniform(0, seconds))
    process.kill()
    process.join(60)
    return process.exitcode != 0


@pytest.fixture
def run(tmp_path) -> Path:
    """A run whose third checkpoint links to the second's file."""
    base = None
    for step in range(1, 4):
        base, _ = store(tmp_path / "run", step, state(step), base=base, storage=STORAGE)
    assert list(base.glob("from-*"))
    return tmp_path / "run"


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
def test_merge(run, tmp_path, replaces):
    """Twenty kills: OUT is the former one, or the new one whole, or, if there was none, nothing; the source is
    untouched; the next merge works and clears away what the dead ones left."""
    rng, source, out = random.Random(0), run / folder_name(3), tmp_path / "out"
    before = hashes(source)
    start = time.perf_counter()
    merge(run / folder_name(1), out)
    seconds = 1.5 * (time.perf_counter() - start)
    if not replaces:
        shutil.rmtree(out)
    num_cut = num_left = 0
    for _ in range(TRIES):
        num_cut += kill_at_random(merge_on_sign, (source, out), seconds, rng)
        num_left += bool(list(tmp_path.glob(f"{MERGING}*")))
        assert hashes(source) == before
        if out.exists():
            assert_holds_one_of(out, [state(3), state(1)] if replaces else [state(3)])
            if not replaces:
                shutil.rmtree(out)
        elif replaces:
            (former,) = tmp_path.glob(f"{REPLACED}*")  # killed between two renames
            former.rename(out)
    assert num_cut >= TRIES // 4, "the kills came too late to prove anything"
    assert num_left, "no kill came in the middle of a merge"
    merge(source, out, overwrite=True)
    assert_holds(out, state(3))
    assert not list(tmp_path.glob(f"{MERGING}*"))


def test_differential_save(run, tmp_path):
    """Twenty kills of a save that links to its base: no checkpoint of the run changes by a bit, and the save after that
    is whole."""
    rng, base = random.Random(1), run / folder_name(3)
    before = {folder.name: hashes(folder) for folder in run.iterdir()}
    start = time.perf_counter()
    store(tmp_path / "once", 9, state(9), base=base, storage=STORAGE)
    seconds = 1.5 * (time.perf_counter() - start)
    num_cut = num_left = 0
    for number in range(TRIES):
        root = tmp_path / f"try-{number}"
        num_cut += kill_at_random(save_on_sign, (base, root), seconds, rng)
        num_left += root.exists() and not list(root.glob("*/manifest.json"))
        assert {folder.name: hashes(folder) for folder in run.iterdir()} == before
        shutil.rmtree(root, ignore_errors=True)
    assert num_cut >= TRIES // 4, "the kills came too late to prove anything"
    assert num_left, "no kill came in the middle of a save"
    folder, (written,) = store(run, 9, state(9), base=base, storage=STORAGE)
    assert written.bytes_linked == state(9)["weight/frozen"].nbytes
    assert_holds(folder, state(9))


def test_load(run):
    """Twenty kills of a process that checks and reads a checkpoint change none of its bits, links included."""
    rng, folder = random.Random(2), run / folder_name(3)
    before = {each.name: hashes(each) for each in run.iterdir()}
    start = time.perf_counter()
    assert_holds(folder, state(3))
    seconds = 1.5 * (time.perf_counter() - start)
    num_cut = sum(kill_at_random(load_on_sign, (folder,), seconds, rng) for _ in range(TRIES))
    assert num_cut >= TRIES // 4, "the kills came too late to prove anything"
    assert {each.name: hashes(each) for each in run.iterdir()} == before


def assert_holds_one_of(folder: Path, states: list[dict[str, torch.Tensor]]) -> None:
    """A checkpoint is sound and holds one of some states."""
    for number, tensors in enumerate(states):
        try:
            return assert_holds(folder, tensors)
        except AssertionError:
            if number == len(states) - 1:
                raise
