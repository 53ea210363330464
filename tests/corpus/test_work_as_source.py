"""What stations have made is no raw data: read as such, it holds its documents twice, and what was rejected again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megalite.corpus.corpus import Corpus
from megalite.corpus.recipe import CleanConfig, DedupConfig, DocumentSource
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.dedup import dedup
from megalite.errors import DataError
from tests.kit.data import corpus_of, prose, write_json_lines


@pytest.fixture
def recipe(tmp_path) -> Path:
    """The folder that a recipe leaves, two stations of it."""
    write_json_lines(tmp_path / "raw/a.jsonl", prose(3))
    clean(corpus_of(tmp_path / "raw"), tmp_path / "made/clean", CleanConfig())
    dedup(corpus_of(tmp_path / "made/clean"), tmp_path / "made/dedup", DedupConfig())
    return tmp_path / "made"


@pytest.mark.parametrize("outside", ["made", "."])
def test_the_folder_of_a_recipe(recipe, outside):
    """Or one around it: the stations are named, any of which can be read."""
    root = recipe.parent / outside
    with pytest.raises(DataError, match=r"raw data is needed here, and stations have worked in .*/clean, .*/dedup"):
        corpus_of(root)
    with pytest.raises(DataError, match=r"clean/manifest.json, .*dedup/manifest.json"):
        Corpus([DocumentSource(path=f"file://{root}")])
    assert len(list(corpus_of(recipe / "dedup").documents())) == 3


@pytest.mark.parametrize("outside", ["x.partial", "."])
def test_unfinished_work(recipe, outside):
    """By its name, or by its plan under another one."""
    root = recipe / "clean"
    (root / "manifest.json").unlink()
    root.rename(recipe / "x.partial")
    shutil.rmtree(recipe / "dedup")
    for path in (recipe / outside, f"file://{recipe}"):
        with pytest.raises(DataError, match=r"stations have worked in .*/x\.partial"):
            Corpus([DocumentSource(path=path)])
    (recipe / "x.partial").rename(recipe / "copy")
    (recipe / "copy/.work").mkdir()
    (recipe / "copy/.work/plan.json").write_text("{}")
    with pytest.raises(DataError, match=r"stations have worked in .*/copy"):
        corpus_of(recipe / "copy")


@pytest.mark.parametrize("content", ["{}", "[1]", "no JSON", '{"manifest_version": 3, "name": "an extension"}'])
def test_a_manifest_of_somebody_else(tmp_path, content):
    write_json_lines(tmp_path / "sub/a.jsonl", ["a text"])
    (tmp_path / "sub/manifest.json").write_text(content)
    assert len(list(corpus_of(tmp_path).documents())) == 1
    assert len(list(Corpus([DocumentSource(path=f"file://{tmp_path}")]).documents())) == 1
