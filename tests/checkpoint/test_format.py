"""The manifest: any flipped byte is found, older versions are read, and nothing outside the folder is ever named."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import xxhash

from megalite.checkpoint.format import VERSION, read_manifest
from megalite.errors import CheckpointError
from tests.checkpoint.stored import SMALL, assert_holds, store

FLIPS = 600


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A differential checkpoint, which has every kind of entry."""
    tensors, base = {"weight/a": torch.randn(40, 30), "weight/b": torch.randn(40, 30)}, None
    for step in range(1, 4):
        tensors["weight/a"] = tensors["weight/a"] + 1
        base, _ = store(tmp_path, step, tensors, base=base, storage=SMALL)
    return base


def rewrite(folder: Path, **values: object) -> None:
    """Change a manifest as someone would who also makes its checksum right."""
    path = folder / "manifest.json"
    text = json.dumps({**json.loads(path.read_text()), **values, "checksum": "0" * 32})
    path.write_text(text.replace("0" * 32, xxhash.xxh3_128_hexdigest(text.encode()), 1))


def test_any_flipped_byte_is_found(checkpoint):
    """One bit flipped, at each of the first 300 bytes and at random ones: the manifest is refused by its name."""
    path = checkpoint / "manifest.json"
    good, rng = path.read_bytes(), random.Random(0)
    for place in [*range(300), *(rng.randrange(len(good)) for _ in range(FLIPS))]:
        bad = bytearray(good)
        bad[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(checkpoint)
    path.write_bytes(good)
    read_manifest(checkpoint)


def test_any_truncation_is_found(checkpoint):
    """A manifest that ends early is refused, wherever it ends."""
    path = checkpoint / "manifest.json"
    good = path.read_bytes()
    for length in range(0, len(good), 37):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
            read_manifest(checkpoint)


def test_an_edit_by_hand_is_told(checkpoint):
    """Someone who edits a manifest learns why it is refused."""
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))
    with pytest.raises(CheckpointError, match="edited by hand"):
        read_manifest(checkpoint)


def test_version_1_is_read(tmp_path):
    """A checkpoint of the first version: no checksum of the manifest, pieces under keys."""
    tensors = {"weight/a": torch.randn(8, 6)}
    folder, _ = store(tmp_path, 5, tensors)
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    del raw["checksum"]
    for record in raw["files"].values():
        del record["age"]
    path.write_text(json.dumps({**raw, "version": 1}, indent=1))
    manifest = read_manifest(folder)
    assert manifest.progress.step == 5
    assert set(raw["tensors"]["weight/a"]["pieces"][0]) == {"file", "key", "start", "shape"}
    assert_holds(folder, tensors)


def test_version_3_is_read(tmp_path):
    """The version whose progress had the state of the loop's parts in three fields: each goes to the part that now has
    it, and nothing is lost. A part that had nothing to remember has no entry."""
    tensors = {"weight/a": torch.randn(8, 6)}
    folder, _ = store(tmp_path, 5, tensors)
    progress = json.loads((folder / "manifest.json").read_text())["progress"]
    del progress["components"]
    spikes = {"losses": [2.5], "norms": [1.0], "spikes": [4], "first_spike": 4, "cut_until": 0}
    former = {
        "steering": {"norms": [1.0, 2.0], "batch_sizes": [{"first_step": 1, "size": 4, "first_sample": 0}]},
        "health": {"spikes": spikes, "tries": 1, "tried_at": 3},
        "evaluation": {"best_loss": 2.0, "best_step": 4},
    }
    rewrite(folder, version=3, progress={**progress, **former})
    assert read_manifest(folder).progress.components == {
        "adaptive_control": former["steering"],
        "validation": former["evaluation"],
        "spikes": spikes,
        "rollback_limit": {"tries": 1, "tried_at": 3},
    }
    assert_holds(folder, tensors)
    rewrite(folder, version=3, progress={**progress, "steering": {}, "health": {"spikes": spikes}, "evaluation": {}})
    assert read_manifest(folder).progress.components == {"spikes": spikes}


def test_a_checksum_cannot_be_left_out(checkpoint):
    """From version 2 on a manifest without its checksum is damaged."""
    path = checkpoint / "manifest.json"
    raw = json.loads(path.read_text())
    del raw["checksum"]
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="own checksum"):
        read_manifest(checkpoint)


def test_newer_versions_are_refused(checkpoint):
    """A checkpoint of a later megalite says which version it needs."""
    rewrite(checkpoint, version=VERSION + 1)
    with pytest.raises(CheckpointError, match=f"format version {VERSION + 1}"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/file", "..", ""])
def test_files_outside_the_folder_are_refused(checkpoint, name):
    """A manifest made to read elsewhere is refused, even with a right checksum."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    rewrite(checkpoint, files={**files, name: {"bytes": 1, "xxh3_128": "0"}})
    with pytest.raises(CheckpointError, match="without a folder"):
        read_manifest(checkpoint)


def test_files_without_checksum_are_refused(checkpoint):
    """A piece in a file that the manifest has no checksum of is refused: it could be anything."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    victim = next(name for name in files if name.startswith("from-"))
    del files[victim]
    rewrite(checkpoint, files=files)
    with pytest.raises(CheckpointError, match=victim):
        read_manifest(checkpoint)
