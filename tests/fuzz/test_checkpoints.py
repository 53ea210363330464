"""Manifests, safetensors files and the index of shards with anything in them: read, or refused in words.

Checksums are made right again after each change, so that it is the reading itself that must withstand it.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from megalite.architecture.weights import Rectangle, weight_table
from megalite.checkpoint.compare import compare
from megalite.checkpoint.format import FORMAT, MANIFEST, hash_file, stored_model
from megalite.checkpoint.hf.importer import HuggingFaceWeights
from megalite.checkpoint.listing import by_kind, inspect, list_checkpoints, storage
from megalite.checkpoint.reader import CheckpointReader
from tests.checkpoint.foreign import save_foreign
from tests.checkpoint.stored import SMALL, store
from tests.fuzz.kit import survive
from tests.fuzz.mutate import mutate, mutate_bytes

SHAPES = {"weight/a": (40, 30), "weight/b": (7, 5), "exp_avg/a": (40, 30)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A differential checkpoint, which has every kind of entry; `empty` beside it is the folder that is watched."""
    (tmp_path / "empty").mkdir()
    tensors, base = {name: torch.randn(shape) for name, shape in SHAPES.items()}, None
    for step in (1, 2):
        tensors["weight/a"] = tensors["weight/a"] + 1
        base, _ = store(tmp_path / "run" / "checkpoints", step, tensors, base=base, storage=SMALL)
    return base


def sealed(manifest: Any) -> str:
    """A manifest's text with the checksum that it should have."""
    if not isinstance(manifest, dict):
        return json.dumps(manifest)
    text = json.dumps({**manifest, "checksum": "0" * 32})
    return text.replace("0" * 32, xxhash.xxh3_128_hexdigest(text.encode()), 1)


def read_all(folder: Path) -> None:
    """What training, `checkpoint ls`, `show`, `diff`, `merge` and the export do with a checkpoint."""
    list_checkpoints(folder.parents[1], full=True)
    manifest, _ = inspect(folder, full=True)
    if manifest is not None:
        by_kind(manifest)
        storage(manifest)
    reader = CheckpointReader(folder)
    reader.verify()
    for name, shape in SHAPES.items():
        reader.read(name, Rectangle((0,) * len(shape), shape))
        for _ in reader.slabs(name):
            pass
    compare(folder, folder)
    stored_model(folder, reader.manifest)


def test_manifests(num_cases: int, rng: random.Random, checkpoint: Path):
    """Every value set to anything, with a checksum that fits."""
    path = checkpoint / MANIFEST
    good = json.loads(path.read_text())
    assert good["format"] == FORMAT

    def cases() -> Iterator[Any]:
        for _ in range(num_cases):
            part = rng.choice((None, "progress", "tensors", "files", "model"))
            yield mutate(good, rng, rng.choice((1, 2))) if part is None else {**good, part: mutate(good[part], rng)}

    def run(case: Any) -> None:
        path.write_text(sealed(case))
        read_all(checkpoint)

    survive(cases(), run, checkpoint.parents[2] / "empty")


def test_tensor_files_of_checkpoints(num_cases: int, rng: random.Random, checkpoint: Path):
    """The files that a manifest names, with other bytes and checksums that fit."""
    path = checkpoint / MANIFEST
    manifest = json.loads(path.read_text())
    files = [name for name in manifest["files"] if name.endswith(".safetensors")]
    good = {name: (checkpoint / name).read_bytes() for name in files}

    def cases() -> Iterator[tuple[str, bytes]]:
        for _ in range(num_cases):
            name = rng.choice(files)
            yield name, mutate_header(good[name], rng)

    def run(case: tuple[str, bytes]) -> None:
        name, data = case
        (checkpoint / name).unlink()  # it may be linked to an older checkpoint's
        (checkpoint / name).write_bytes(data)
        record = hash_file(checkpoint / name)
        files = {**manifest["files"], name: {"bytes": record.bytes, "xxh3_128": record.xxh3_128, "age": 0}}
        path.write_text(sealed({**manifest, "files": files}))
        try:
            read_all(checkpoint)
        finally:
            (checkpoint / name).write_bytes(good[name])

    survive(cases(), run, checkpoint.parents[2] / "empty")


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header says something else, or with other bytes anywhere."""
    size = int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        return mutate_bytes(data[: 8 + size], rng) + data[8 + size :]
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    header = json.dumps(mutate(json.loads(data[8 : 8 + size]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def test_hugging_face_weights(num_cases: int, rng: random.Random, tmp_path: Path):
    """A folder from elsewhere: other headers, other bytes, another index."""
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    (tmp_path / "empty").mkdir()
    save_foreign(whole, "llama")
    save_foreign(sharded, "llama", max_shard_size="20KB")
    single = whole / "model.safetensors"
    index = sharded / "model.safetensors.index.json"
    good, shards = single.read_bytes(), json.loads(index.read_text())

    def cases() -> Iterator[tuple[Path, bytes]]:
        for _ in range(num_cases):
            if rng.random() < 0.6:
                yield single, mutate_header(good, rng)
            else:
                yield index, json.dumps(mutate(shards, rng)).encode()

    def run(case: tuple[Path, bytes]) -> None:
        path, data = case
        path.write_bytes(data)
        weights = HuggingFaceWeights(path.parent)
        for weight in weight_table(weights.model).values():
            weights.read(weight, Rectangle((0,) * len(weight.shape), weight.shape))

    survive(cases(), run, tmp_path / "empty")
    shutil.rmtree(sharded)
