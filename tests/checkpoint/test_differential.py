"""Differential and compressed checkpoints: exact, independent of each other, and bounded in what they waste."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.architecture.weights import Rectangle
from megalite.checkpoint import differential
from megalite.checkpoint.differential import MIN_USED, Storage, find_base
from megalite.checkpoint.format import read_manifest
from megalite.checkpoint.reader import CheckpointReader
from tests.checkpoint.stored import SMALL, assert_holds, store

SLACK_BYTES = 2000
"""Rounding to whole tiny files."""


def some_tensors(seed: int = 0) -> dict[str, Tensor]:
    """A frozen embedding, larger than the rest, and two that train."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight/embedding": (300, 24), "weight/up": (48, 50), "exp_avg/norm": (37,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def train_step(tensors: dict[str, Tensor], frozen: str = "weight/embedding") -> dict[str, Tensor]:
    """Change every number of every tensor but one."""
    return {name: tensor.clone() if name == frozen else tensor * 1.01 + 1 for name, tensor in tensors.items()}


def logical(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def payload(path: Path) -> int:
    """Bytes of a file without its header, which for chunks of 256 bytes is as large as they are."""
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little") if path.suffix == ".safetensors" else 0
    return path.stat().st_size - header


def occupied(folder: Path) -> int:
    """Bytes of tensors that a folder keeps on the disk, shared ones included."""
    return sum(payload(folder / name) for name in read_manifest(folder).files if name != "config.yaml")


def change(tensors: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    """Some tensors as they are, some with some rows changed, some with all."""
    changed = {}
    for name, tensor in tensors.items():
        kind, tensor = rng.choice(("none", "rows", "all")), tensor.clone()
        if kind == "rows":
            first = rng.randrange(tensor.shape[0])
            tensor[first : first + 1 + rng.randrange(20)] += 1
        changed[name] = tensor + 1 if kind == "all" else tensor
    return changed


@pytest.mark.parametrize("seed", range(6))
def test_any_history_restores_exactly(tmp_path, seed):
    """Thirty saves of random changes by random layouts, full, differential or compressed, while older ones are deleted
    and moved at random: every one that is left holds what was saved, and no folder keeps more than its bound."""
    rng = random.Random(seed)
    tensors, kept = some_tensors(seed), {}
    for step in range(1, 31):
        tensors = change(tensors, rng)
        base = find_base(tmp_path, step)
        storage = Storage(
            differential=rng.random() < 0.9, compress=rng.random() < 0.3, max_age=rng.choice((1, 3, 8)), chunk_bytes=256
        )
        folder, _ = store(
            tmp_path,
            step,
            tensors,
            base=base,
            storage=storage,
            ranks=rng.choice((1, 1, 1, 2, 3)),
            dim=rng.choice((0, 1)),
        )
        assert occupied(folder) <= logical(tensors) / MIN_USED + SLACK_BYTES
        kept[folder] = tensors
        for old in [path for path in kept if rng.random() < 0.15]:
            moved = old.with_name(f"moved-{old.name}")
            old.rename(moved)
            (shutil.rmtree if rng.random() < 0.7 else lambda path: None)(moved)
            known = kept.pop(old)
            if moved.exists():
                kept[moved] = known
    assert kept
    for folder, want in kept.items():
        assert_holds(folder, want)


def test_rectangles_of_every_storage(tmp_path):
    """Any rectangle, of plain, linked, mixed and packed pieces cut either way, is the slice of the whole."""
    tensors, rng = some_tensors(), random.Random(0)
    for number, (compress, dim) in enumerate([(False, 0), (False, 1), (True, 0), (True, 1)]):
        root, base = tmp_path / str(number), None
        for step in range(1, 5):
            tensors["weight/embedding"][step * 9] += 1
            tensors["weight/up"] += 1
            storage = Storage(differential=True, compress=compress, chunk_bytes=256)
            base, _ = store(root, step, tensors, base=base, storage=storage, ranks=2, dim=dim)
        reader = CheckpointReader(base)
        assert any(name.startswith("from-") for name in reader.manifest.files)
        for name, want in tensors.items():
            for _ in range(40):
                start = tuple(rng.randrange(size) for size in want.shape)
                shape = tuple(1 + rng.randrange(size - first) for size, first in zip(want.shape, start, strict=True))
                rectangle = Rectangle(start, shape)
                assert torch.equal(reader.read(name, rectangle), want[rectangle.slices]), (name, rectangle)


def test_frozen_parts_are_written_twice_then_never(tmp_path):
    """A frozen embedding goes into a file of its own with the second save, and no later save writes it again; the
    whole run keeps it twice on the disk, and once after the first checkpoint is gone."""
    tensors = some_tensors()
    frozen = tensors["weight/embedding"].nbytes
    base, folders = None, []
    for step in range(1, 9):
        base, (written,) = store(tmp_path, step, tensors, base=base, storage=SMALL)
        folders.append(base)
        fresh = written.bytes_written
        if step <= 2:
            assert fresh >= logical(tensors)
            assert written.bytes_linked == 0
        else:
            assert fresh <= logical(tensors) - frozen + 1000
            assert written.bytes_linked == frozen
            assert written.note == ""
        tensors = train_step(tensors)
    inodes = {path.stat().st_ino: payload(path) for folder in folders[1:] for path in folder.glob("*.safetensors")}
    assert sum(inodes.values()) == frozen + 7 * (logical(tensors) - frozen)
    shutil.rmtree(folders[0])
    for folder in folders[1:]:
        assert CheckpointReader(folder).verify() == []


def test_dense_training_stays_plain(tmp_path):
    """Where every number changes, a differential save is the same plain safetensors file as a full one, and says so."""
    tensors = some_tensors()
    base, _ = store(tmp_path, 1, tensors, storage=SMALL)
    tensors = train_step(tensors, frozen="")
    folder, (written,) = store(tmp_path, 2, tensors, base=base, storage=SMALL)
    assert "too little" in written.note
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "manifest.json", "rank-00000.safetensors"]
    loaded = load_file(folder / "rank-00000.safetensors")
    assert all(torch.equal(loaded[f"{name}@{','.join('0' * t.dim())}"], t) for name, t in tensors.items())
    full, _ = store(tmp_path, 3, tensors)
    name = "rank-00000.safetensors"
    assert (full / name).read_bytes() == (folder / name).read_bytes()


def test_a_few_unchanged_chunks_split_nothing(tmp_path):
    """Less than 2 % unchanged is not worth a file of its own: pieces stay whole."""
    tensors = {"weight/a": torch.randn(100, 64)}
    base, _ = store(tmp_path, 1, tensors, storage=SMALL)
    tensors = {"weight/a": torch.cat([tensors["weight/a"][:1], torch.randn(99, 64)])}
    folder, _ = store(tmp_path, 2, tensors, base=base, storage=SMALL)
    assert not any(piece.extents for piece in read_manifest(folder).tensors["weight/a"].pieces)
    assert_holds(folder, tensors)


def test_slow_thaw_stays_within_the_bound(tmp_path):
    """When a frozen part starts to change row by row, no checkpoint ever keeps more than 1.25 times its size."""
    tensors, base = some_tensors(), None
    for step in range(1, 40):
        base, _ = store(tmp_path, step, tensors, base=base, storage=SMALL)
        assert occupied(base) <= logical(tensors) / MIN_USED + SLACK_BYTES
        tensors = train_step(tensors)
        tensors["weight/embedding"][7 * step : 7 * step + 7] += 1


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES])
def test_without_hard_links_a_save_is_full(tmp_path, monkeypatch, number):
    """Whatever keeps links from being made, the save is full, exact and says why."""
    tensors = some_tensors()
    base, _ = store(tmp_path, 1, tensors, storage=SMALL)

    def refuse(source: object, target: object) -> None:
        raise OSError(number, os.strerror(number), str(source))

    monkeypatch.setattr(differential.os, "link", refuse)
    folder, (written,) = store(tmp_path, 2, tensors, base=base, storage=SMALL)
    assert os.strerror(number) in written.note
    assert written.bytes_linked == 0
    assert read_manifest(folder).files.keys() == {"rank-00000.safetensors", "config.yaml"}
    assert_holds(folder, tensors)


def test_base_on_another_file_system(tmp_path):
    """A base that really lies on another device gives a full save."""
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is not a second file system here")
    tensors = some_tensors()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        base, _ = store(Path(other), 1, tensors, storage=SMALL)
        folder, (written,) = store(tmp_path, 2, tensors, base=base, storage=SMALL)
    assert "cross-device" in written.note
    assert_holds(folder, tensors)


def test_copies_are_whole(tmp_path):
    """`cp -r` of one differential checkpoint takes along all it needs."""
    tensors, base = some_tensors(), None
    for step in range(1, 5):
        tensors = train_step(tensors)
        base, _ = store(tmp_path / "run", step, tensors, base=base, storage=SMALL)
    shutil.copytree(base, tmp_path / "step-0000004")
    shutil.rmtree(tmp_path / "run")
    assert_holds(tmp_path / "step-0000004", tensors)


def test_a_damaged_shared_file_is_written_anew(tmp_path):
    """A shared file is read back before it is linked again: a flipped bit in it spoils those that have it, and none
    after."""
    tensors, base = some_tensors(), None
    for step in range(1, 4):
        base, _ = store(tmp_path, step, tensors, base=base, storage=SMALL)
    shared = next(path for path in base.iterdir() if path.name.startswith("from-"))
    data = bytearray(shared.read_bytes())
    data[-1] ^= 1
    shared.write_bytes(data)
    assert shared.name in CheckpointReader(base).verify()[0]
    folder, (written,) = store(tmp_path, 4, tensors, base=base, storage=SMALL)
    assert "checksum differs" in written.note
    assert shared.name in written.note
    assert_holds(folder, tensors)


def test_a_file_is_shared_for_a_limited_number_of_saves(tmp_path):
    """After `max_age` saves an unchanged part is written anew: one bad block spoils no more checkpoints than that."""
    tensors, base, carriers = some_tensors(), None, {}
    storage = Storage(differential=True, max_age=3, chunk_bytes=256)
    for step in range(1, 20):
        base, _ = store(tmp_path, step, tensors, base=base, storage=storage)
        for path in base.glob("*.safetensors"):
            carriers.setdefault(path.stat().st_ino, []).append(step)
    assert max(len(steps) for steps in carriers.values()) == storage.max_age + 1
    assert_holds(base, tensors)


def test_a_base_that_is_deleted_meanwhile(tmp_path, monkeypatch):
    """Retention may remove the base between the look at it and the link: the save is full."""
    tensors = some_tensors()
    base, _ = store(tmp_path, 1, tensors, storage=SMALL)
    link = os.link

    def too_late(source: Path, target: Path) -> None:
        shutil.rmtree(base)
        link(source, target)

    monkeypatch.setattr(differential.os, "link", too_late)
    folder, (written,) = store(tmp_path, 2, tensors, base=base, storage=SMALL)
    assert "No such file" in written.note
    assert_holds(folder, tensors)


def test_damaged_and_unhashed_bases_give_full_saves(tmp_path):
    """A base without hashes of chunks, or with a broken manifest, is said and not used."""
    tensors = some_tensors()
    plain, _ = store(tmp_path, 1, tensors)
    folder, (written,) = store(tmp_path, 2, tensors, base=plain, storage=SMALL)
    assert "no hashes" in written.note
    (folder / "manifest.json").write_text("{", encoding="utf-8")
    last, (written,) = store(tmp_path, 3, tensors, base=folder, storage=SMALL)
    assert "damaged" in written.note
    assert_holds(last, tensors)


def test_the_base_is_the_newest_older_one(tmp_path):
    """A run that went back saves against what was there before that step, never against its own future."""
    for step in (1, 3, 7):
        store(tmp_path, step, some_tensors())
    assert find_base(tmp_path, 1) is None
    assert find_base(tmp_path, 7).name == "step-0000003"
    assert find_base(tmp_path, 8).name == "step-0000007"


def test_ranks_of_a_new_layout_share_one_file(tmp_path):
    """One rank's file, wholly unchanged, is found by content from two ranks; both may link it, or write anew."""
    tensors = {"weight/a": torch.randn(64, 64), "weight/b": torch.randn(64, 64)}
    base, _ = store(tmp_path, 1, tensors, storage=SMALL)
    folder, written = store(tmp_path, 2, tensors, base=base, storage=SMALL, ranks=2)
    assert_holds(folder, tensors)
    after, written = store(tmp_path, 3, tensors, base=folder, storage=SMALL, ranks=2)
    assert all(each.bytes_written == 0 for each in written)
    assert_holds(after, tensors)
