"""Damage to a checkpoint: whatever happens to whichever file, it is named, and nobody goes on with wrong numbers."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.compare import compare
from megalite.checkpoint.differential import Storage
from megalite.checkpoint.format import MANIFEST
from megalite.checkpoint.hf.importer import HuggingFaceWeights
from megalite.checkpoint.listing import find, inspect, list_checkpoints
from megalite.checkpoint.merge import merge
from megalite.checkpoint.reader import CheckpointReader
from megalite.errors import UserError
from tests.checkpoint.stored import store

STORAGES = {
    "full": Storage(),
    "differential": Storage(differential=True, chunk_bytes=256),
    "compressed": Storage(differential=True, compress=True, chunk_bytes=256),
}


def flip(place: Callable[[int], int]) -> Callable[[Path], None]:
    """Flip one bit of the byte at `place(size)`."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place(len(data))] ^= 16
        path.write_bytes(data)

    return damage


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "first byte flipped": flip(lambda size: 0),
    "middle byte flipped": flip(lambda size: size // 2),
    "last byte flipped": flip(lambda size: size - 1),
    "last byte lost": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "half lost": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "byte added": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": Path.unlink,
    "a folder instead": replace_by_folder,
}


def make(root: Path, storage: Storage) -> Path:
    """The last of four checkpoints by two ranks: some tensors still, some changed, one mixed."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"weight/{name}": torch.randn(40, 20, generator=generator) for name in ("still", "mixed", "new")}
    tensors["exp_avg/zero"] = torch.zeros(40, 20)
    base = None
    for step in range(1, 5):
        base, _ = store(root, step, tensors, base=base, storage=storage, ranks=2)
        tensors = dict(tensors)
        tensors["weight/new"] = tensors["weight/new"] * 1.5
        tensors["weight/mixed"] = tensors["weight/mixed"].clone()
        tensors["weight/mixed"][:8] += 1
    return base


@pytest.mark.parametrize("storage", STORAGES)
def test_every_damage_to_every_file_is_named(tmp_path, storage):
    """Ten kinds of damage to every file of full, differential and compressed checkpoints: the check names the file and
    only it, ranks that share the check find it between them, and a merge refuses."""
    good = make(tmp_path / "run", STORAGES[storage])
    names = sorted(path.name for path in good.iterdir())
    assert len(names) >= 4
    assert any(name.startswith("from-") for name in names) == (storage != "full")
    for name in names:
        for kind, damage in DAMAGES.items():
            bad = tmp_path / "bad" / good.name
            shutil.copytree(good, bad)
            damage(bad / name)
            _, problems = inspect(bad, full=True)
            assert len(problems) == 1, (name, kind, problems)
            assert name in problems[0], (name, kind, problems)
            if name != MANIFEST:
                shares = (CheckpointReader(bad).verify(rank, 3) for rank in range(3))
                assert list(chain.from_iterable(shares)) == list(problems)
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                merge(bad, tmp_path / "out")
            assert not (tmp_path / "out").exists()
            shutil.rmtree(bad.parent)


@pytest.mark.parametrize("storage", STORAGES)
def test_reading_cut_files_is_refused(tmp_path, storage):
    """Even unchecked, a file that is shorter than its tensors, or gone, ends in an error that names it."""
    good = make(tmp_path / "run", STORAGES[storage])
    for name in CheckpointReader(good).manifest.files:
        if name == "config.yaml":
            continue
        for kind in ("half lost", "emptied", "deleted"):
            bad = tmp_path / "bad" / good.name
            shutil.copytree(good, bad)
            DAMAGES[kind](bad / name)
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                read_all(bad)
            shutil.rmtree(bad.parent)


def read_all(folder: Path) -> None:
    reader = CheckpointReader(folder)
    for tensor in reader.manifest.tensors:
        list(reader.slabs(tensor))


class Malicious:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


PICKLE_NAMES = ("model.pt", "pytorch_model.bin", "optimizer.pkl", ".metadata", "latest", "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("storage", STORAGES)
def test_nothing_is_ever_unpickled(tmp_path, storage):
    """A pickle that runs code lies beside the files, then in the place of each: it never runs, whoever looks."""
    mark = tmp_path / "mark"
    bomb = pickle.dumps(Malicious(mark))
    pickle.loads(bomb)
    assert mark.is_dir(), "the bomb is a dud"
    mark.rmdir()
    good = make(tmp_path / "run", STORAGES[storage])
    for victim in (None, *sorted(path.name for path in good.iterdir())):
        bad = tmp_path / "bad" / good.name
        shutil.copytree(good, bad)
        for name in PICKLE_NAMES:
            (bad / name).write_bytes(bomb)
        if victim is not None:
            (bad / victim).write_bytes(bomb)
        looks = {
            "list": lambda folder=bad: list_checkpoints(folder, full=True),
            "read": lambda folder=bad: read_all(folder),
            "compare": lambda folder=bad: compare(folder, good),
            "merge": lambda folder=bad: merge(folder, tmp_path / "out"),
            "import": lambda folder=bad: HuggingFaceWeights(folder),
        }
        for name, look in looks.items():
            try:
                look()
            except UserError:
                assert victim is not None or name == "import"
            assert not mark.exists(), (victim, name)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(bad.parent)


def test_a_run_knows_its_damaged_ones(tmp_path):
    """Among a run's checkpoints the damaged are told from the sound, also one without its manifest."""
    make(tmp_path / "checkpoints", STORAGES["full"])
    folders = find(tmp_path)
    flip(lambda size: size - 1)(folders[1] / "rank-00001.safetensors")
    (folders[3] / MANIFEST).unlink()
    rows = list_checkpoints(tmp_path, full=True).checkpoints
    assert [bool(row.problems) for row in rows] == [False, True, False, True]
    assert "rank-00001.safetensors" in rows[1].problems[0]
    assert MANIFEST in rows[3].problems[0]
