"""Reading: only what is asked for, through packed chunks too, and files that safetensors itself agrees with."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from megalite.architecture.weights import Rectangle
from megalite.checkpoint.codec import hash_chunks, pack, unpack
from megalite.checkpoint.format import Extent, FileRecord, Manifest, Piece, Progress, TensorRecord, write_manifest
from megalite.checkpoint.reader import SLAB_BYTES, CheckpointReader
from megalite.checkpoint.tensor_file import Entry, TensorFile, as_bytes, offsets
from megalite.errors import CheckpointError
from tests.checkpoint.stored import FULL, SMALL, Storage, assert_holds, store, whole

LARGE_BYTES = 2**29


def test_streamed_files_are_safetensors(tmp_path):
    """What is streamed reads back through the safetensors package, with offsets that numpy agrees with."""
    path = tmp_path / "file.safetensors"
    tensors = {
        "a": torch.randn(7, 5),
        "b@1,2": torch.randn(11).to(torch.bfloat16),
        "ü": torch.randn(2, 3, 4).to(torch.float16),
        "empty": torch.zeros(0, 4),
    }
    entries = [Entry(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
    with TensorFile(path, entries) as file:
        for tensor in tensors.values():
            file.write(as_bytes(tensor))
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert loaded[key].dtype == tensor.dtype
        assert torch.equal(loaded[key], tensor)
    data = path.read_bytes()
    start, size = offsets(path)["a"]
    assert np.array_equal(np.frombuffer(data[start : start + size], np.float32).reshape(7, 5), tensors["a"].numpy())
    assert start % 4 == 0


def test_offsets_agree_with_the_package(tmp_path):
    """Files written by safetensors itself, which sorts its tensors, are looked up rightly."""
    path = tmp_path / "file.safetensors"
    tensors = {f"t{n}": torch.randn(n + 1, 3) for n in range(5)}
    safetensors.torch.save_file(tensors, path)
    data = path.read_bytes()
    for key, tensor in tensors.items():
        start, size = offsets(path)[key]
        assert data[start : start + size] == tensor.numpy().tobytes()


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 100, b"\x08" + b"\0" * 7 + b"not json", b"\x80\x04."])
def test_offsets_of_what_is_no_safetensors_file(tmp_path, content):
    """Anything else is refused by name."""
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"file\.safetensors: cannot be read"):
        offsets(path)


def test_chunks_are_packed_without_loss():
    """Every bit comes back, NaNs and infinities too; zeros nearly vanish; noise is stored as it is."""
    generator = np.random.default_rng(0)
    normal = generator.standard_normal(5000).astype(np.float32)
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3.4e38], np.float32)
    noise = generator.integers(0, 2**32, 5000, np.uint32).view(np.float32)
    for numbers in (normal, special, noise, np.zeros(5000, np.float32), normal[:1]):
        data = numbers.view(np.uint8)
        stored, codec = pack(data)
        stored = np.frombuffer(stored, np.uint8)
        assert len(stored) <= len(data)
        assert np.array_equal(unpack(stored, len(data), codec, "here"), data)
    assert len(pack(np.zeros(20000, np.uint8))[0]) < 100
    assert pack(noise.view(np.uint8))[1] == ""


def test_packed_chunks_that_are_damaged():
    """A chunk that does not unpack, or to another size, or by an unknown codec, is refused by the file's name."""
    data = np.zeros(400, np.uint8)
    stored = np.frombuffer(pack(data)[0], np.uint8)
    codec = pack(data)[1]
    for args in ((stored[:-3], 400, codec), (stored, 404, codec), (stored, 400, "lzma"), (stored[4:], 400, codec)):
        with pytest.raises(CheckpointError, match="some file"):
            unpack(*args, "some file")


def test_hashes_of_chunks():
    """A chunk's hash is that of its bytes alone, the last one being shorter."""
    data = np.arange(1000, dtype=np.uint8)
    whole = hash_chunks(data, 256)
    assert len(whole) == 4
    assert whole[1] == hash_chunks(data[256:512], 256)[0]
    assert whole[3] == hash_chunks(data[768:], 256)[0]


def test_slabs_make_the_whole(tmp_path):
    """A tensor in slabs, also smaller than a row, is the tensor."""
    tensors = {"weight/a": torch.randn(37, 5, 3), "weight/b": torch.randn(11)}
    reader = CheckpointReader(store(tmp_path, 1, tensors)[0])
    for name, want in tensors.items():
        for max_bytes in (1, 64, 200, SLAB_BYTES):
            assert torch.equal(torch.cat([slab.clone() for slab in reader.slabs(name, max_bytes)]), want)


@pytest.mark.parametrize("in_extents", [False, True])
def test_a_rectangle_does_not_read_the_file(tmp_path, in_extents):
    """A few rows and columns of a tensor of 512 MB touch a few pages, and allocate a slab at most."""
    rows, columns = LARGE_BYTES // 4096, 1024
    name, path = "rank-00000.safetensors", tmp_path / "rank-00000.safetensors"
    header = b'{"k":{"dtype":"F32","shape":[%d,%d],"data_offsets":[0,%d]}}' % (rows, columns, LARGE_BYTES)
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:  # a hole: it costs no disk
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + LARGE_BYTES)
    piece = Piece(name, "k", (0, 0), (rows, columns))
    if in_extents:
        extent = Extent(name, 8 + len(header), LARGE_BYTES, LARGE_BYTES)
        piece = Piece("", "", (0, 0), (rows, columns), (extent,))
    record = TensorRecord((rows, columns), [piece])
    files = {name: FileRecord(path.stat().st_size, "")}
    write_manifest(tmp_path, Manifest(Progress(), {}, {}, {"weight/a": record}, files))
    reader = CheckpointReader(tmp_path)
    before = resident()
    for start in (0, rows // 2, rows - 64):
        for rectangle in (Rectangle((start, 0), (64, columns)), Rectangle((start, 500), (64, 24))):
            assert not reader.read("weight/a", rectangle).any()
    assert resident() - before < 32 * 2**20


def resident() -> int:
    """Bytes of this process in memory, pages of mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_missing_keys_and_wrong_shapes_are_named(tmp_path):
    """A file that lacks a tensor, or has it in another shape, is named when it is read."""
    tensors = {"weight/a": torch.randn(6, 5)}
    folder, _ = store(tmp_path, 1, tensors)
    path = folder / "rank-00000.safetensors"
    for content in ({"other": torch.zeros(6, 5)}, {"weight/a@0,0": torch.zeros(5, 6)}):
        safetensors.torch.save_file(content, path)
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors"):
            CheckpointReader(folder).read("weight/a", Rectangle((0, 0), (6, 5)))


def test_full_checkpoints_open_anywhere(tmp_path):
    """By default a checkpoint is plain safetensors: everyone's reader finds every tensor under its name."""
    tensors = {"weight/a": torch.randn(6, 5), "exp_avg/a": torch.randn(6, 5)}
    folder, _ = store(tmp_path, 1, tensors, ranks=2)
    for rank, first in enumerate((0, 3)):
        with safe_open(folder / f"rank-{rank:05d}.safetensors", framework="pt") as file:
            assert torch.equal(file.get_tensor(f"weight/a@{first},0"), tensors["weight/a"][first : first + 3])


def test_a_tensor_that_is_not_there(tmp_path):
    """Asking for another model's tensor, or for moments where there are only weights, is told apart."""
    folder: Path = store(tmp_path, 1, {"weight/a": torch.randn(6, 5)})[0]
    reader = CheckpointReader(folder)
    with pytest.raises(CheckpointError, match="weights only"):
        reader.read("exp_avg/a", Rectangle((0, 0), (6, 5)))
    with pytest.raises(CheckpointError, match="another model"):
        reader.read("weight/z", Rectangle((0, 0), (6, 5)))


def test_what_is_read_belongs_to_the_caller(tmp_path):
    """Changing a tensor that was read changes neither the file nor what is read next, in any storage."""
    tensors = {"weight/a": torch.randn(60, 50)}
    for number, storage in enumerate((FULL, SMALL, Storage(compress=True))):
        base, _ = store(tmp_path / str(number), 1, tensors, storage=storage)
        for step in (2, 3):
            base, _ = store(tmp_path / str(number), step, tensors, base=base, storage=storage)
        reader = CheckpointReader(base)
        whole(reader, "weight/a").zero_()
        next(reader.slabs("weight/a")).zero_()
        assert torch.equal(whole(reader, "weight/a"), tensors["weight/a"])
        assert_holds(base, tensors)
