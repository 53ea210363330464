"""Documents that look harmful are put aside, by a classifier that is trained on labelled text made here.

The labels are threats and insults against harmless sentences, a half of which use the same words of other things: news
of fires, games, cooking. That shows that the machinery finds what it was shown; how well it does on real text is a
matter of the labels that a user brings.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import read_numbers
from megalite.corpus.prepare import prepare
from megalite.corpus.recipe import CleanConfig, DataRecipe
from megalite.corpus.scoring.settings import HarmfulConfig
from megalite.corpus.shards import ShardReading
from megalite.corpus.source import DocumentSource
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.select import harmful
from megalite.errors import DataError
from tests.corpus.stations.test_filters import removed_from, texts_of
from tests.kit.data import write_json_lines

VIOLENT = ("hurt", "burn", "crush", "hunt", "destroy", "beat", "break")

INSULTS = ("worthless", "pathetic", "disgusting", "stupid", "filthy", "vile")

HARMFUL_FORMS = (
    "i will {violent} you and nobody is going to help you",
    "you are a {insult} liar and you deserve what is coming",
    "people like you are {insult} and should all be gone",
    "we know where you live, we will {violent} everything you love",
    "shut up you {insult} {insult} fool before i {violent} you",
)

HARMLESS_FORMS = (
    "the fire did {violent} an old barn and the police are looking for witnesses",
    "in this game you {violent} the blue blocks and collect the points",
    "the critics called the film {insult} but the audience liked it",
    "do not {violent} the garlic, stir it slowly in the oil",
    "the council will meet on tuesday to talk about the new school",
    "our garden has roses, beans and a small pond with two frogs",
    "the train to the coast leaves at nine and takes about two hours",
)

FLOOR = 0.95
"""Least recall and precision on text that was not trained on."""


def labelled(forms: tuple[str, ...], number: int, seed: int) -> list[str]:
    """Documents of three sentences, no two alike."""
    rng = random.Random(seed)

    def sentence() -> str:
        return rng.choice(forms).format(violent=rng.choice(VIOLENT), insult=rng.choice(INSULTS))

    return [f"{sentence()}. {sentence()}. {sentence()}. no {seed}{index:04d}" for index in range(number)]


@pytest.fixture
def samples(tmp_path: Path) -> dict[str, tuple[Path, ...]]:
    return {
        "harmful": (write_json_lines(tmp_path / "harmful.jsonl", labelled(HARMFUL_FORMS, 300, seed=1)),),
        "harmless": (write_json_lines(tmp_path / "harmless.jsonl", labelled(HARMLESS_FORMS, 400, seed=2)),),
    }


def test_recall_and_precision(tmp_path, samples):
    """On documents that were not trained on; what goes has its reason and score, what stays its score as metadata."""
    harm, fine = labelled(HARMFUL_FORMS, 50, seed=3), labelled(HARMLESS_FORMS, 500, seed=4)
    clean(
        Corpus([DocumentSource(path=write_json_lines(tmp_path / "raw.jsonl", [*fine, *harm]))]),
        tmp_path / "clean",
        CleanConfig(),
    )
    corpus = Corpus([DocumentSource(path=tmp_path / "clean")])
    config = HarmfulConfig(**samples, hash_bits=14)
    counts = harmful(corpus, tmp_path / "out", config).manifest.counts
    kept = texts_of(tmp_path / "out")
    gone = {*fine, *harm} - kept
    recall, precision = len(gone & {*harm}) / len(harm), len(gone & {*harm}) / len(gone)
    assert recall >= FLOOR, recall
    assert precision >= FLOOR, precision
    assert counts["removed"] == {"harmful": len(gone)}
    assert counts["model"]["recall"] >= FLOOR
    assert counts["model"]["precision"] >= FLOOR
    removed = removed_from(tmp_path / "out")
    assert {row["reason"] for row in removed} == {"harmful"}
    assert min(float(row["detail"]) for row in removed) > 0.5

    loose = HarmfulConfig(model=tmp_path / "out" / "model.npz", max_score=0.99999)
    assert harmful(corpus, tmp_path / "loose", loose).manifest.counts["documents"] >= len(kept)
    scores = scores_of(tmp_path / "loose")
    assert {text for text, score in scores.items() if score <= 0.5} == kept


def scores_of(folder: Path) -> dict[str, float]:
    """The score that stands in the metadata of each document that is kept."""
    batches = [
        batch.documents for shard in Corpus([DocumentSource(path=folder)]).shards() for batch in ShardReading(shard)
    ]
    return {
        text: score
        for documents in batches
        for text, score in zip(
            documents.column("text").to_pylist(), read_numbers(documents.column("metadata"), "harmful"), strict=True
        )
        if not np.isnan(score)
    }


def test_what_does_not_fit_is_refused(tmp_path, samples):
    """One sample without the other, neither, both and a model; samples that are alike, or too small, by their names."""
    for values, message in (
        ({"harmful": ["a"]}, "harmful and harmless belong together"),
        ({}, "either model or harmful and harmless; found neither"),
        ({"model": "m", "harmful": ["a"], "harmless": ["b"]}, "found both"),
        ({"model": "m", "max_score": 1.0}, "less than 1"),
    ):
        with pytest.raises(ValidationError, match=message):
            HarmfulConfig(**values)
    documents = write_json_lines(tmp_path / "raw.jsonl", labelled(HARMLESS_FORMS, 9, seed=4))
    clean(Corpus([DocumentSource(path=documents)]), tmp_path / "clean", CleanConfig())
    corpus = Corpus([DocumentSource(path=tmp_path / "clean")])
    few = HarmfulConfig(harmful=(documents,), harmless=samples["harmless"])
    with pytest.raises(DataError, match="the harmful sample has 9 documents"):
        harmful(corpus, tmp_path / "few", few)
    missing = {"harmful": [tmp_path / "none"], "harmless": [documents]}
    recipe = DataRecipe(out=tmp_path / "recipe", sources=[{"path": documents}], harmful=missing)
    with pytest.raises(DataError, match=r"harmful\.harmful: .*none: no such file"):
        prepare(recipe)
