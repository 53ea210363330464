"""Damaged data: what a look at opening finds, what `data verify` finds, and that nothing is left for training."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.config.schema import Config, SourceConfig
from megalite.data import index_checks
from megalite.data.mix_plan import MixSettings
from megalite.data.pack import pack
from megalite.data.ranking import write_ranks
from megalite.data.samples import Samples, open_samples
from megalite.data.settings import PackConfig
from megalite.data.verify import complaints, list_path, list_run
from megalite.errors import DataError
from megalite.stations import hashes
from megalite.stations.manifest import find_manifest
from tests.kit.data import VOCAB_SIZE, random_documents, write_packed_folder, write_pair, write_tokens_folder
from tests.kit.mutations import CHANGES, change_json, flip_bit, mutated

SEQ_LEN = 16
DOCUMENTS = random_documents(100, longest=40)

NUM_MUTATIONS = 200
"""Of each of two sets: of small files, and of files that count as large."""


@pytest.fixture(params=["small files", "large files"])
def prepared(request, tmp_path, monkeypatch) -> Path:
    """A set of every kind of folder. Large files are looked at in some places only, and hashed in stretches."""
    if request.param == "large files":
        monkeypatch.setattr(hashes, "NUM_SPOTS", 4)
        monkeypatch.setattr(hashes, "SPOT_BYTES", 32)
        monkeypatch.setattr(hashes, "CHUNK_BYTES", 512)
        monkeypatch.setattr("megalite.stations.manifest.CHUNK_BYTES", 512)
        monkeypatch.setattr("megalite.data.verify.CHUNK_BYTES", 512)
        monkeypatch.setattr(index_checks, "SPAN", 8)
        monkeypatch.setattr(index_checks, "NUM_SPANS", 4)
        monkeypatch.setattr("megalite.data.sources.SCAN_TOKENS", 640)
    return make_set(tmp_path / "set")


def make_set(folder: Path) -> Path:
    write_packed_folder(folder / "packed", DOCUMENTS, seq_len=SEQ_LEN)
    write_packed_folder(folder / "cut", DOCUMENTS, seq_len=SEQ_LEN, method="concat")
    write_tokens_folder(folder / "tokens", DOCUMENTS)
    pack(write_pair(folder / "wide" / "pair", DOCUMENTS, vocab_size=100_000), folder / "wide-packed", packing())
    ranked = open_set(folder).sources[0].layout
    write_ranks(ranked, np.arange(len(DOCUMENTS)) % 7 * 1.0, folder / "ranks.npy")
    return folder


def packing() -> PackConfig:
    return PackConfig(seq_len=SEQ_LEN)


def sources_of(folder: Path) -> list[SourceConfig]:
    return [SourceConfig(path=folder / name) for name in ("packed", "cut", "tokens", "wide/pair", "wide-packed")]


def config_of(folder: Path) -> Config:
    ranks = {"packed": folder / "ranks.npy"}
    data = {"train": sources_of(folder)[:-2], "valid": sources_of(folder)[-2:], "mix": {"ranks": ranks}}
    return Config(data=data, batch={"seq_len": SEQ_LEN})


def open_set(folder: Path) -> Samples:
    """As training opens data: the looks before the first step."""
    ranks = folder / "ranks.npy"
    mix = MixSettings(ranks={"packed": ranks}) if ranks.exists() else MixSettings()
    samples = open_samples(sources_of(folder), seq_len=SEQ_LEN, seed=1, document_masks=True, mix=mix)
    samples.check_vocab_size(VOCAB_SIZE)
    return samples


def verified(folder: Path) -> list[str]:
    listing = list_run(config_of(folder), VOCAB_SIZE)
    return [*listing.problems, *complaints(listing.checks, threads=1)]


def read_everything(samples: Samples) -> list[np.ndarray]:
    """Every sample of every source, or the error that reading it ends in."""
    places = [(n, 0, at) for n, source in enumerate(samples.sources) for at in range(source.layout.num_samples)]
    return samples.read(np.array(places)).tokens


def damages(folder: Path, count: int, rng: random.Random) -> Iterator[tuple[Path, str]]:
    """A set damaged in so many ways, one after the other; every file of it in turn."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    made = 0
    while made < count:
        path = paths[made % len(paths)]
        change = change_json if path.suffix == ".json" and rng.random() < 0.7 else rng.choice(CHANGES)
        with mutated(path, change, rng) as is_other:
            if not is_other:
                continue
            made += 1
            yield path, f"{path.relative_to(folder)} by {change.__name__}"


def test_nothing_is_wrong_with_a_set_that_is_whole(prepared):
    """No complaint, and every sample can be read."""
    assert verified(prepared) == []
    read_everything(open_set(prepared))
    listing = list_path(prepared)
    assert [*listing.problems, *complaints(listing.checks, threads=2)] == []


def test_every_damage_is_found(prepared, capsys):
    """Thousands of them. At opening what a cheap look can see; the rest by `data verify`, but for a token that became
    another of the vocabulary in a pair that brought no checksums. Reading never ends in anything but an error."""
    rng = random.Random(20_26)
    found, truth = Counter(), read_everything(open_set(prepared))
    for path, damage in damages(prepared, NUM_MUTATIONS, rng):
        try:
            samples = open_set(prepared)
        except DataError as error:
            found["at opening"] += 1
            found["of them unnamed"] += str(prepared) not in str(error)
            continue
        found["by verifying"] += 1
        if not verified(prepared):
            assert path.parent.name == "wide", damage
            found["by verifying"] -= 1
            found["not at all: no checksums"] += 1
            assert ((tokens := read_everything(samples)) != truth).any() <= (path.suffix == ".bin"), damage
            assert 0 <= tokens.min() <= tokens.max() < VOCAB_SIZE, damage
            continue
        try:
            read_everything(samples)
        except DataError:
            found["when read"] += 1
    with capsys.disabled():
        print(f"\n{NUM_MUTATIONS} damages: " + ", ".join(f"{count} {how}" for how, count in found.items()), end=" ")
    assert found["at opening"] + found["by verifying"] + found["not at all: no checksums"] == NUM_MUTATIONS
    assert not found["of them unnamed"]
    assert found["not at all: no checksums"] < 0.05 * NUM_MUTATIONS


def as_format_1(folder: Path) -> None:
    """The manifest as it was before there were checksums of manifests."""
    path = folder / "manifest.json"
    plain = json.loads(path.read_text())
    del plain["checksum"]
    plain["format"] = 1
    for output in plain["outputs"]:
        output.pop("spots", None)
        output.pop("chunks", None)
    path.write_text(json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def test_older_sets_are_read_and_told_apart(prepared):
    """Their fingerprints are the same, so runs go on; `verify` checks their files and says what it cannot check."""
    before = open_set(prepared)
    folders = ["packed", "packed-tokens", "cut", "cut-tokens", "tokens", "wide-packed"]
    for name in folders:
        as_format_1(prepared / name)
    after = open_set(prepared)
    assert after.fingerprint == before.fingerprint
    assert (read_everything(after) == read_everything(before)).all()
    listing = list_run(config_of(prepared), VOCAB_SIZE)
    assert [*listing.problems, *complaints(listing.checks, threads=1)] == []
    assert sum("made before format 2" in note for note in listing.notes) == len(folders)
    rng = random.Random(3)
    with mutated(prepared / "packed-tokens" / "tokens.bin", flip_bit, rng):
        assert any("tokens.bin: its contents have changed" in complaint for complaint in verified(prepared))


def test_older_manifests_in_which_anything_is_changed(prepared):
    """Without a checksum not all of it can be seen, but no change ends in anything but an error or in equal samples."""
    folders = ["packed", "packed-tokens", "cut", "tokens"]
    for name in folders:
        as_format_1(prepared / name)
    truth, rng, refused = read_everything(open_set(prepared)), random.Random(5), 0
    for number in range(200):
        path = prepared / folders[number % len(folders)] / "manifest.json"
        with mutated(path, change_json, rng):
            try:
                tokens = read_everything(open_set(prepared))
            except DataError:
                refused += 1
            else:
                assert (tokens == truth).all()
    assert refused > 80


def run(*arguments: object):
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def test_the_verb(tmp_path):
    """A folder of many stations, a pair, a config: 0 and a line for each when all is whole, 2 with every complaint."""
    folder = make_set(tmp_path / "set")
    done = run("verify", folder, folder / "wide/pair")
    assert done.exit_code == 0, done.output
    for name in ("packed", "packed-tokens", "cut", "tokens", "wide-packed", "wide/pair"):
        assert f"{folder / name}: whole" in done.stdout
    assert "no checksums in this set" in done.stdout
    (tmp_path / "config.yaml").write_text(config_of(folder).model_dump_json())
    assert run("verify", tmp_path / "config.yaml").exit_code == 0

    (folder / "packed" / "notes.txt").write_text("mine")
    assert "packed: not of this station, and not checked: notes.txt" in run("verify", folder).stdout
    for name in ("packed/piece_starts.npy", "packed-tokens/tokens.bin"):
        data = bytearray((folder / name).read_bytes())
        data[-3] ^= 1
        (folder / name).write_bytes(bytes(data))
    (folder / "tokens/tokens.idx").unlink()
    done = run("verify", folder)
    assert isinstance(done.exception, DataError)
    for complaint in ("piece_starts.npy: its contents have changed", "tokens.bin: its contents", "tokens.idx: missing"):
        assert complaint in str(done.exception)
    for nothing in (tmp_path / "nowhere", tmp_path):
        if nothing.exists():
            continue
        with pytest.raises(DataError, match="name a folder of a station or of a recipe, the prefix of a Megatron pair"):
            list_path(nothing)


def test_damage_is_bad_input_for_every_verb(tmp_path):
    """`train` and `data show` end with code 2 and the file's name, and have written nothing."""
    folder = make_set(tmp_path / "set")
    config = tmp_path / "config.yaml"
    run_dir = tmp_path / "run"
    settings = {"run": {"dir": str(run_dir)}, "data": {"train": [{"path": str(folder / "packed")}]}}
    model = {"vocab_size": VOCAB_SIZE, "num_layers": 1, "hidden_size": 16, "num_heads": 2, "ffn_hidden_size": 32}
    batch = {"seq_len": SEQ_LEN, "micro_batch_size": 1, "global_batch_size": 2}
    config.write_text(json.dumps({**settings, "model": model, "batch": batch, "train": {"steps": 2}}))
    show = ["data", "show", str(config), "--steps", "1:2", "--out", str(tmp_path / "batches.npz")]
    assert CliRunner().invoke(app, show).exit_code == 0
    rng = random.Random(1)
    for name in ("packed/piece_starts.npy", "packed/manifest.json", "packed-tokens/tokens.idx"):
        with mutated(folder / name, flip_bit, rng):
            for arguments in (show, ["train", str(config)]):
                done = CliRunner().invoke(app, arguments)
                assert isinstance(done.exception, DataError), (arguments, done.exception)
                assert Path(name).name in str(done.exception)
    assert not run_dir.exists()


def test_fingerprints_are_those_of_before(tmp_path):
    """A manifest of format 1, as it was written by the version before, has the fingerprint that it had."""
    folder = write_packed_folder(tmp_path / "packed", DOCUMENTS, seq_len=SEQ_LEN)
    new = find_manifest(folder)
    as_format_1(folder)
    old = find_manifest(folder)
    assert old.format == 1
    assert old.fingerprint == new.fingerprint
    assert old.same_work(new)


@pytest.mark.parametrize("station", ["packed", "cut", "tokens", "wide-packed"])
def test_a_station_without_its_manifest_is_missed(station: str, tmp_path: Path):
    """Among others that are whole: none of its files can be checked, so the folder is not called whole."""
    root = make_set(tmp_path / "set")
    assert list_path(root).problems == []
    (root / station / "manifest.json").unlink()
    assert any(f"{root / station}: no manifest.json" in problem for problem in list_path(root).problems)
