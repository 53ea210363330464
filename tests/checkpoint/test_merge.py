"""Merging: the same numbers in one plain checkpoint, in bounded memory, from a sound source only."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megalite.architecture.weights import Rectangle
from megalite.checkpoint.compare import compare
from megalite.checkpoint.format import read_manifest, write_manifest
from megalite.checkpoint.merge import MERGING, merge
from megalite.checkpoint.reader import CheckpointReader
from megalite.errors import CheckpointError
from tests.checkpoint.stored import CONFIG_TEXT, SMALL, Storage, assert_holds, store, whole

MEMORY_BYTES = 200 * 2**20
"""What a merge may take: some slabs of 16 MiB, and what the allocator keeps of those before."""


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (50, 12), "up": (24, 30), "norm": (13,)}
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    return {
        f"{kind}/{name}": torch.randn(shape, generator=generator) for kind in kinds for name, shape in shapes.items()
    }


def differential(root: Path, *, compress: bool = False, ranks: int = 1) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint with linked and mixed pieces."""
    tensors, base = state(), None
    for step in range(1, 5):
        tensors["weight/up"] = tensors["weight/up"] + 1
        tensors["exp_avg/embedding"][step] += 1
        storage = Storage(differential=True, compress=compress, chunk_bytes=SMALL.chunk_bytes)
        base, _ = store(root, step, tensors, base=base, storage=storage, ranks=ranks, dim=1)
    return base, tensors


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_merged_is_equal_and_plain(tmp_path, compress, ranks):
    """Differential, packed, of many ranks: merged it is one safetensors file with every tensor whole under its name,
    the same config and progress, and links to nothing."""
    source, tensors = differential(tmp_path, compress=compress, ranks=ranks)
    done = merge(source, tmp_path / "out")
    assert done.num_files == 1
    assert_holds(tmp_path / "out", tensors)
    loaded = load_file(tmp_path / "out" / "merged-00000.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "config.yaml").read_text() == CONFIG_TEXT
    assert read_manifest(tmp_path / "out").progress == read_manifest(source).progress


def test_weights_only_in_bf16(tmp_path):
    """Only weights, each rounded as torch rounds; read back as fp32 numbers for whoever starts from it."""
    source, tensors = differential(tmp_path)
    done = merge(source, tmp_path / "out", weights_only=True, dtype="bf16")
    reader = CheckpointReader(tmp_path / "out")
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("weight/")}
    assert reader.verify() == []
    assert reader.manifest.tensors.keys() == weights.keys()
    assert done.num_bytes == 2 * sum(tensor.numel() for tensor in weights.values())
    for name, tensor in weights.items():
        assert torch.equal(whole(reader, name), tensor.to(torch.bfloat16).float())
    with pytest.raises(CheckpointError, match="--weights-only"):
        merge(source, tmp_path / "other", dtype="bf16")


def test_weights_only_has_the_biases_of_routers(tmp_path):
    """The model computes with them: in fp32, whatever the weights are rounded to. Counts of a step are training's."""
    bias = torch.tensor([0.2001, -0.2001, 0.1])
    others = {"router_bias/blocks.1.mlp.router": bias, "router_loads/blocks.1.mlp.router": torch.ones(3)}
    source, _ = store(tmp_path, 1, {**state(), **others})
    merge(source, tmp_path / "out", weights_only=True, dtype="bf16")
    reader = CheckpointReader(tmp_path / "out")
    assert torch.equal(whole(reader, "router_bias/blocks.1.mlp.router"), bias)
    assert not any(name.startswith("router_loads/") for name in reader.manifest.tensors)
    (tmp_path / "moved").mkdir()
    moved, _ = store(tmp_path / "moved", 1, {**state(), **others, "router_bias/blocks.1.mlp.router": bias + 1})
    (different,) = compare(source, moved, weights_only=True).different
    assert different.name == "router_bias/blocks.1.mlp.router"
    with pytest.raises(CheckpointError, match="weights only"):
        reader.read("exp_avg/up", Rectangle((0, 0), (24, 30)))


def test_files_of_limited_size(tmp_path):
    """Tensors are spread over files no larger than asked for, unless a single one is."""
    source, tensors = differential(tmp_path)
    done = merge(source, tmp_path / "out", max_file_bytes=5000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == done.num_files > 2
    assert all(sum(t.nbytes for t in load_file(path).values()) <= 5000 for path in files)
    assert_holds(tmp_path / "out", tensors)


def test_what_is_in_the_way_is_not_replaced(tmp_path):
    """A checkpoint only when asked to, anything else never."""
    source, tensors = differential(tmp_path)
    merge(source, tmp_path / "out", weights_only=True)
    with pytest.raises(CheckpointError, match="--overwrite"):
        merge(source, tmp_path / "out")
    merge(source, tmp_path / "out", overwrite=True)
    assert_holds(tmp_path / "out", tensors)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        merge(source, tmp_path / "mine", overwrite=True)
    with pytest.raises(CheckpointError, match="would lose its moments"):
        merge(source, source, overwrite=True, weights_only=True)
    with pytest.raises(CheckpointError, match="holds step 4"):
        merge(source, tmp_path / "step-0000005")
    merge(source, tmp_path / "again" / source.name)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_damaged_source_is_refused(tmp_path):
    """Damage is named, and nothing is made of it."""
    source, _ = differential(tmp_path)
    victim = next(path for path in source.iterdir() if path.name.startswith("from-"))
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=victim.name):
        merge(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    """Too little room is told before the first byte; a disk that fills up all the same leaves what was there before."""
    source, tensors = differential(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("megalite.checkpoint.merge.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(CheckpointError, match=r"needs [\d.]+ kB and the disk has .*B free"):
            merge(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge(source, tmp_path / "out")

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("TensorFile.write", "write_manifest", "sync", "commit"):
        with monkeypatch.context() as patch:
            patch.setattr(f"megalite.checkpoint.merge.{name}", fail)
            with pytest.raises(CheckpointError, match="No space left"):
                merge(source, tmp_path / "out", overwrite=True)
        assert_holds(tmp_path / "out", tensors)
        assert not list(tmp_path.glob(f"{MERGING}*"))


def test_a_living_merge_is_left_alone(tmp_path):
    """Leftovers of a dead merge go; the folder that another one has locked stays."""
    source, _ = differential(tmp_path)
    dead, living = tmp_path / f"{MERGING}out-1-1", tmp_path / f"{MERGING}out-2-2"
    for folder in (dead, living):
        folder.mkdir()
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        merge(source, tmp_path / "out")
    finally:
        os.close(descriptor)
    assert not dead.exists()
    assert living.exists()


def test_the_tokenizer_of_an_import_is_found_again(tmp_path):
    """A manifest may name a tokenizer beside its checkpoint; elsewhere it is named by its whole path."""
    source, _ = store(tmp_path / "import", 0, state())
    (tmp_path / "import" / "tokenizer").mkdir()
    write_manifest(source, replace(read_manifest(source), data={"tokenizer": "tokenizer"}))
    merge(source, tmp_path / "elsewhere" / "out")
    assert read_manifest(tmp_path / "elsewhere" / "out").data["tokenizer"] == str(tmp_path / "import" / "tokenizer")


def merge_and_watch_memory(source: Path, out: Path) -> None:
    """Merge, and fail if the process ever had MEMORY_BYTES more of its own than before."""
    before, done, most = own_memory(), threading.Event(), 0

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    merge(source, out)
    done.set()
    watcher.join()
    assert most > before
    assert most - before < MEMORY_BYTES, most - before


def own_memory() -> int:
    """Bytes in memory that are this process's own: neither code nor pages of mapped files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.parametrize("compress", [False, True])
def test_memory_is_bounded(tmp_path, compress):
    """Merging a tensor of 400 MB takes half of that at most; it does not grow with the tensor."""
    tensors = {"weight/a": torch.zeros(100_000, 1000)}
    tensors["weight/a"][::1000] = torch.randn(100, 1000)
    source, _ = store(tmp_path, 1, tensors, storage=Storage(compress=compress))
    process = multiprocessing.get_context("spawn").Process(
        target=merge_and_watch_memory, args=(source, tmp_path / "out")
    )
    process.start()
    process.join(240)
    assert process.exitcode == 0
    assert_holds(tmp_path / "out", tensors)
