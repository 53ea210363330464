"""The numbers of a card: those of the manifests, and what a slow count of the files says."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from megalite.corpus.card.make import HTML_FILE, JSON_FILE, make_card, write_card
from megalite.corpus.card.measure import LengthTally
from megalite.corpus.prepare import prepare
from megalite.corpus.recipe import DocumentSource
from megalite.data.indexed import IndexedTokens
from megalite.errors import DataError
from megalite.stations.manifest import StationManifest, find_manifest
from tests.corpus.card.conftest import HOSTILE, small_recipe
from tests.kit.data import write_json_lines

STATIONS = ["clean", "dedup", "near-dedup"]


def rows(folder: Path) -> list[dict]:
    """All rows of the shards of a folder."""
    return [row for path in sorted(folder.glob("part-*.parquet")) for row in pq.read_table(path).to_pylist()]


def manifest(out: Path, name: str) -> StationManifest:
    found = find_manifest(out / name)
    assert found is not None
    return found


@pytest.fixture
def copied(recipe, tmp_path) -> Path:
    """The prepared set in another place, to be changed."""
    shutil.copytree(recipe.out.parent, tmp_path / "moved")
    return tmp_path / "moved/out"


def test_stages_agree_with_manifests_and_files(recipe):
    """Documents, bytes, reasons and sources of each stage are its manifest's, and its rows' counted one by one."""
    card = make_card(recipe.out)
    assert [stage.name for stage in card.stages] == ["read", *STATIONS]
    for stage in card.stages[1:]:
        counts, found = manifest(recipe.out, stage.name).counts, rows(recipe.out / stage.name)
        assert stage.kept.documents == counts["documents"] == len(found)
        assert stage.kept.text_bytes == counts["text_bytes"] == sum(len(row["text"].encode()) for row in found)
        assert stage.removed == counts["documents_in"] - counts["documents"] == sum(stage.reasons.values())
        documents, text_bytes = Counter(), Counter()
        for row in found:
            documents[row["source"]] += 1
            text_bytes[row["source"]] += len(row["text"].encode())
        assert {name: each.documents for name, each in stage.by_source.items()} == documents
        assert {name: each.text_bytes for name, each in stage.by_source.items()} == text_bytes
    clean, dedup, near = card.stages[1:]
    assert clean.reasons == manifest(recipe.out, "clean").counts["rejected"] == {"too short": 2}
    assert clean.redacted == manifest(recipe.out, "clean").counts["redacted"] == {"email": 3}
    assert dedup.reasons == {"same text": 20}
    assert near.reasons == {"near-duplicate": 5}


def test_what_was_read(recipe):
    """The first stage counts every document of the raw files, by source."""
    card = make_card(recipe.out)
    raw = {name: len((recipe.out.parent / file).read_text().splitlines()) for name, file in raw_files().items()}
    assert {name: each.documents for name, each in card.read.by_source.items()} == raw
    assert card.read.kept.documents == sum(raw.values())
    assert {source.name: source.read for source in card.sources} == raw
    left = rows(recipe.out / "near-dedup")
    for source in card.sources:
        mine = [len(row["text"].encode()) for row in left if row["source"] == source.name]
        assert (source.kept.documents, source.kept.text_bytes) == (len(mine), sum(mine))
    sizes = [source.kept.text_bytes for source in card.sources]
    assert sizes == sorted(sizes, reverse=True)


def raw_files() -> dict[str, str]:
    return {HOSTILE: "a.jsonl", "b.jsonl": "b.jsonl"}


def test_duplicates(recipe):
    """Clusters are those of the manifests, small ones first."""
    _, _, dedup, near = make_card(recipe.out).stages
    assert dedup.clusters is not None
    assert (dedup.clusters.clusters, dedup.clusters.largest) == (20, 2)
    assert near.clusters is not None
    assert (near.clusters.clusters, near.clusters.largest, near.clusters.sizes) == (5, 2, {"2": 5})
    assert all(HOSTILE in id for example in near.clusters.examples for id in example)


def test_lengths_agree_with_brute_force(recipe):
    """Both histograms put every document in the class that its length belongs to."""
    card = make_card(recipe.out)
    check_lengths(card.lengths, [len(row["text"].encode()) for row in rows(recipe.out / "near-dedup")])
    for split in card.splits:
        tokens = IndexedTokens(recipe.out / "tokens" / split.part / "tokens")
        lengths = np.diff(tokens.document_starts(0, tokens.num_documents + 1)).tolist()
        check_lengths(split.lengths, lengths)
        assert split.tokens == sum(lengths)


def check_lengths(lengths, expected: list[int]) -> None:
    assert (lengths.documents, lengths.total) == (len(expected), sum(expected))
    assert (lengths.shortest, lengths.longest) == (min(expected), max(expected))
    for each in lengths.bins:
        inside = [length for length in expected if each.least <= length <= each.most]
        assert (each.documents, each.total) == (len(inside), sum(inside))
    assert sum(each.documents for each in lengths.bins) == len(expected)


def test_class_borders():
    """Lengths at the powers of two, and large ones, fall on the right side; halves add up to the whole."""
    expected = [0, 1, 2, 3, 4, 7, 8, 9, 1023, 1024, 2**40 - 1, 2**40]
    whole, half = LengthTally(), LengthTally()
    whole.add(np.array(expected[:5]))
    half.add(np.array(expected[5:]))
    half.add(np.array([], np.int64))
    whole.merge(half)
    check_lengths(whole.lengths(), expected)
    assert LengthTally().lengths().bins == ()


def test_tokens_and_packing(recipe):
    """Splits, tokenizer and packing say what their manifests say."""
    card = make_card(recipe.out)
    assert [split.part for split in card.splits] == ["train", "valid"]
    for split in card.splits:
        tokens = manifest(recipe.out, f"tokens/{split.part}").counts
        packed = manifest(recipe.out, f"packed/{split.part}").counts
        assert (split.documents, split.tokens, split.text_bytes) == tuple(
            tokens[name] for name in ("documents", "tokens", "text_bytes")
        )
        assert (split.sequences, split.padding_percent) == (packed["samples"], packed["padding_percent"])
        assert (split.documents_split, split.seq_len) == (packed["documents_split"], 64)
    train = manifest(recipe.out, "tokens/train").counts
    assert (card.tokenizer.kind, card.tokenizer.vocab_size) == ("byte-bpe", 300)
    assert card.tokenizer.bytes_per_token == pytest.approx(train["text_bytes"] / train["tokens"], abs=1e-4)
    assert card.tokenizer.trained_on is not None
    assert card.tokenizer.trained_on.documents == manifest(recipe.out, "tokenizer").counts["documents"]


def test_stations_can_be_made_again(recipe):
    """Every station stands there with its version, settings and fingerprint, and what it was made of."""
    card = make_card(recipe.out)
    names = [station.folder for station in card.stations]
    assert names == [*STATIONS, "tokenizer", "tokens/train", "packed/train", "tokens/valid", "packed/valid"]
    for station in card.stations:
        found = manifest(recipe.out, station.folder)
        assert (station.fingerprint, station.settings) == (found.fingerprint, found.settings)
        assert [mark for _, mark in station.inputs] == [each.fingerprint for each in found.inputs]
    assert [name for name, _ in card.stations[0].inputs] == ["a.jsonl", "b.jsonl"]


def test_two_runs_give_equal_bytes(recipe, copied):
    """Here, again, and in another place at another time: one card, without a path of the machine in it."""
    write_card(copied, make_card(copied))
    first = {name: (copied / name).read_bytes() for name in (JSON_FILE, HTML_FILE)}
    for path in copied.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    write_card(copied, make_card(copied))
    assert {name: (copied / name).read_bytes() for name in first} == first
    write_card(recipe.out, make_card(recipe.out))
    assert {name: (recipe.out / name).read_bytes() for name in first} == first
    for text in first.values():
        assert str(copied.parent.parent).encode() not in text
        assert str(recipe.out.parent).encode() not in text
    assert not list(copied.glob("*.tmp"))
    assert json.loads(first[JSON_FILE])["name"] == "out"


def test_absolute_paths_in_settings_lose_their_folders(tmp_path):
    """A station that was told of a file elsewhere shows its name, not where it lies."""
    write_json_lines(tmp_path / "questions.jsonl", [" ".join(f"w{n}" for n in range(40))])
    changed = {"decontaminate": {"paths": [tmp_path / "questions.jsonl"]}}
    recipe = small_recipe(tmp_path).model_copy(update={"near_dedup": None})
    recipe = type(recipe).model_validate({**recipe.model_dump(), **changed})
    prepare(recipe)
    card = make_card(recipe.out)
    [station] = [station for station in card.stations if station.station == "decontaminate"]
    assert station.settings["paths"] == ["questions.jsonl"]
    assert ("questions.jsonl", find_manifest(recipe.out / "decontaminate").inputs[1].fingerprint) in station.inputs
    assert str(tmp_path) not in card.dumps()


def test_sources_are_described(recipe, copied):
    """What the recipe says of a source is on the card, and stays there when it is made again without the recipe."""
    words = {"description": "Stories.", "license": "CC0", "url": "https://example.org/"}
    sources = [DocumentSource(name=HOSTILE, path="a", **words), DocumentSource(path="b.jsonl")]
    card = make_card(copied, SimpleNamespace(sources=sources))
    [told, bare] = sorted(card.sources, key=lambda source: source.name)
    assert (told.description, told.license, told.url) == tuple(words.values())
    assert (bare.name, bare.description, bare.license, bare.url) == ("b.jsonl", None, None, None)
    write_card(copied, card)
    assert make_card(copied).sources == card.sources
    assert {source.name for source in make_card(recipe.out, recipe).sources} == set(raw_files())


def test_leftovers_of_another_recipe_do_not_count(recipe, copied):
    """Only what the tokens were made of is on the card."""
    before = make_card(copied)
    shutil.copytree(copied / "near-dedup", copied / "line-dedup")
    assert make_card(copied) == before


def test_no_recipe_here(tmp_path, copied):
    """A folder without a finished recipe is refused with what to do."""
    with pytest.raises(DataError, match="no such folder; the `out` of a recipe"):
        make_card(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"found no station, but not tokens/train and packed/train.*data prepare"):
        make_card(tmp_path / "empty")
    shutil.rmtree(copied / "packed")
    with pytest.raises(DataError, match=r"found clean, dedup, near-dedup, tokenizer, but not packed/train.*prepare"):
        make_card(copied)


def test_changed_and_missing_stations(copied):
    """A station that is gone, damaged, or newer than what was made of it is refused: the numbers would not fit."""
    path = copied / "dedup/manifest.json"
    made = find_manifest(copied / "dedup")
    path.write_text(replace(made, settings={**made.settings, "ignore_case": True}).dumps())
    with pytest.raises(DataError, match=r"dedup: has changed since .*near-dedup was made of it"):
        make_card(copied)
    path.write_text(replace(made, counts={**made.counts, "text_bytes": 1}).dumps())
    with pytest.raises(DataError, match=r"manifest\.json counts 1"):
        make_card(copied)
    path.unlink()
    with pytest.raises(DataError, match=r"near-dedup was made of it, but it is not there.*data prepare"):
        make_card(copied)
