"""Both stations as a user runs them: any workers and shards, stops anywhere, what is noted, what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from megalite.checkpoint.hf.embed import TextEmbedder
from megalite.cli.main import main
from megalite.corpus.corpus import Corpus
from megalite.corpus.inspection import Wanted, inspect
from megalite.corpus.near.settings import NearDedupConfig
from megalite.corpus.prepare import prepare
from megalite.corpus.recipe import CleanConfig, DataRecipe, DedupConfig
from megalite.corpus.semantic.settings import EmbedConfig, SemanticDedupConfig
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.dedup import dedup
from megalite.corpus.stations.embed import embed
from megalite.corpus.stations.near import near_dedup
from megalite.corpus.stations.semantic import semantic_dedup
from megalite.errors import ConversionError, DataError, UnavailableError
from megalite.stations.runners import InProcess, LocalPool
from tests.corpus.semantic.truth import published
from tests.corpus.stations.test_filters import removed_from, texts_of
from tests.kit.data import all_bytes, corpus_of, write_json_lines
from tests.kit.encoders import MAX_POSITIONS, write_encoder

pytest.importorskip("faiss")

THRESHOLD = 0.999

WORDS = [first + second for first in ("ba", "ke", "li", "mo", "su", "ta") for second in ("n", "r", "lo", "mi", "st")]


def documents() -> tuple[list[str], dict[int, int]]:
    """Texts of some sentences, and of which earlier one each of the last is a paraphrase: its sentences in another
    order. No five words on end of one but within a sentence."""
    rng = random.Random(0)
    sentences = [[" ".join(rng.choices(WORDS, k=4)) for _ in range(4)] for _ in range(40)]
    texts, twins = [". ".join(each) + "." for each in sentences], {}
    for number in range(0, 40, 4):
        order = [sentences[number][place] for place in (2, 0, 3, 1)]
        twins[len(texts)] = number
        texts.append(". ".join(order) + ".")
    return texts, twins


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch):
    """Several of each kind. What tasks themselves go by is not changed: workers would not know."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 1500)
    monkeypatch.setattr("megalite.corpus.stations.embed.FEWEST_TOKENS", 1000)
    monkeypatch.setattr("megalite.corpus.semantic.kmeans.CHUNK_BYTES", 2000)
    monkeypatch.setattr("megalite.corpus.semantic.pairs.PRODUCTS_PER_TASK", 100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of random weights: its table of embeddings, averaged, says which bytes a text has, and not in which order."""
    return write_encoder(tmp_path_factory.mktemp("model") / "hf", max_position_embeddings=200)


def cleaned(folder: Path, texts: Sequence[str]) -> Corpus:
    write_json_lines(folder / "raw.jsonl", texts)
    clean(corpus_of(folder / "raw.jsonl"), folder / "clean", CleanConfig(min_chars=1))
    return corpus_of(folder / "clean")


EMBED = EmbedConfig(layer=0, batch_tokens=300)
DEDUP = SemanticDedupConfig(threshold=THRESHOLD, clusters=3, keep="first")


def both(corpus: Corpus, folder: Path, model: Path, runner: object = None) -> Path:
    embed(corpus, folder / "embeddings", EMBED, model=model, runner=runner)
    semantic_dedup(corpus, folder / "out", DEDUP, embeddings=folder / "embeddings", model=model, runner=runner)
    return folder / "out"


def test_paraphrases_go_that_others_do_not_see(tmp_path, model: Path):
    """Sentences in another order: dedup and near-dedup keep them all; here they go, each with the document that it
    repeats and how near that is, by the vectors in the file; and inspect shows the pair."""
    texts, twins = documents()
    corpus = cleaned(tmp_path, texts)
    assert dedup(corpus, tmp_path / "dedup", DedupConfig()).manifest.counts["documents"] == len(texts)
    assert near_dedup(corpus, tmp_path / "near", NearDedupConfig()).manifest.counts["documents"] == len(texts)
    out = both(corpus, tmp_path, model)

    vectors = np.load(tmp_path / "embeddings/embeddings.npy")
    rows = pq.read_table(tmp_path / "embeddings/documents.parquet").to_pylist()
    assert [(row["id"], row["text_bytes"], row["tokens"], row["truncated"]) for row in rows] == [
        (f"raw.jsonl:{line}", len(text), len(text), False) for line, text in enumerate(texts, start=1)
    ]
    ours = TextEmbedder(model, layer=0)
    assert np.abs(vectors - ours.embed([np.array(ids) for ids in ours.ids(texts)[0]], 1)).max() < 1e-6

    place = {row["id"]: number for number, row in enumerate(rows)}
    gone = {place[row["id"]]: row for row in removed_from(out)}
    assert set(twins) <= set(gone) == published(vectors, np.arange(len(texts)), THRESHOLD)  # no pair was parted
    for number, row in gone.items():
        assert (row["reason"], row["source"], row["kept_source"]) == ("semantic duplicate", "raw.jsonl", "raw.jsonl")
        assert place[row["kept_id"]] not in gone
        similarity, twin = row["detail"].removeprefix("similarity ").split(" to ")
        assert float(similarity) == pytest.approx(float(vectors[number] @ vectors[place[twin]]), abs=1e-5)
        assert float(similarity) >= THRESHOLD - 1e-6
    assert texts_of(out) == {text for number, text in enumerate(texts) if number not in gone}
    (shown,) = inspect(out, Wanted(num=1, reason="semantic"))
    (example,) = next(group for group in shown.groups if group.fate == "removed").examples
    assert example.text in texts
    assert example.detail == gone[place[example.id]]["detail"]


class Backwards(InProcess):
    """Does the last task first."""

    def run(self, folder: Path, phase: str, numbers: Sequence[int]) -> Iterator[int]:
        yield from super().run(folder, phase, numbers[::-1])


class StopsAfter(InProcess):
    """Does so many tasks, then is interrupted."""

    def __init__(self, num_tasks: int):
        self.left = num_tasks

    def run(self, folder: Path, phase: str, numbers: Sequence[int]) -> Iterator[int]:
        for number in super().run(folder, phase, numbers):
            yield number
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


def test_workers_shards_and_stops_change_nothing(tmp_path, model: Path, monkeypatch):
    """The same bytes from this process, from the last task to the first, from two other processes (which only compare:
    torch takes them seconds to load), and with a stop behind every few tasks; the same vectors and the same documents
    where the corpus is one shard."""
    texts, _ = documents()
    corpus = cleaned(tmp_path, texts)
    assert len(corpus.shards()) > 1
    both(corpus, tmp_path / "one", model)
    wanted = {name: all_bytes(tmp_path / "one" / name) for name in ("embeddings", "out")}
    both(corpus, tmp_path / "back", model, Backwards())
    assert {name: all_bytes(tmp_path / "back" / name) for name in wanted} == wanted
    with LocalPool(2) as runner:
        semantic_dedup(corpus, tmp_path / "back/two", DEDUP, embeddings=tmp_path / "back/embeddings", runner=runner)
    assert all_bytes(tmp_path / "back/two") == wanted["out"]
    stops = 0
    while not (tmp_path / "stopped/out/manifest.json").exists():
        try:
            both(corpus, tmp_path / "stopped", model, StopsAfter(3))
        except KeyboardInterrupt:
            stops += 1
    assert stops > 10
    assert {name: all_bytes(tmp_path / "stopped" / name) for name in wanted} == wanted

    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 10**6)
    whole = cleaned(tmp_path / "whole", texts)
    assert len(whole.shards()) == 1
    both(whole, tmp_path / "whole", model)
    assert np.array_equal(*(np.load(tmp_path / name / "embeddings/embeddings.npy") for name in ("one", "whole")))
    assert removed_from(tmp_path / "whole/out") == removed_from(tmp_path / "one/out")


def test_long_documents_are_cut_and_counted(tmp_path):
    """At the model's positions, where nobody says fewer; raw files are read, and what is no record is counted."""
    model = write_encoder(tmp_path / "hf", "bert")
    path = write_json_lines(tmp_path / "a.jsonl", ["x" * 500, "short", "y" * (MAX_POSITIONS - 2)])
    path.write_text(path.read_text() + "no JSON\n")
    config = EmbedConfig(stored_dtype="fp16")
    counts = embed(corpus_of(path), tmp_path / "out", config, model=model).manifest.counts
    assert (counts["documents"], counts["truncated"], counts["unreadable"]) == (3, 1, 1)
    assert counts["tokens"] == 2 * MAX_POSITIONS + 7
    vectors = np.load(tmp_path / "out/embeddings.npy")
    assert (vectors.dtype, vectors.shape) == (np.float16, (3, 32))
    assert np.abs(np.linalg.norm(vectors.astype(float), axis=1) - 1).max() < 1e-3


def test_what_does_not_fit_is_refused(tmp_path, model: Path, monkeypatch):
    """By name, before a folder is made: thresholds and clusters that cannot be, embeddings of another model or of other
    documents, no embeddings, an empty document, no faiss."""
    for wrong in (-1.1, 1.1, float("nan")):
        with pytest.raises(ValidationError, match="threshold"):
            SemanticDedupConfig(threshold=wrong)
    texts, _ = documents()
    corpus = cleaned(tmp_path, texts)
    embed(corpus, tmp_path / "embeddings", EMBED, model=model)

    def refused(said: str, error: type[Exception] = DataError, **changes) -> None:
        given = {"corpus": corpus, "config": DEDUP, "embeddings": tmp_path / "embeddings", **changes}
        with pytest.raises(error, match=said):
            semantic_dedup(given.pop("corpus"), tmp_path / "out", given.pop("config"), **given)
        assert not (tmp_path / "out").exists()

    many = SemanticDedupConfig(clusters=51)
    refused("clusters=51, and there are 50 documents; use fewer, or null for 7", config=many)
    other = write_encoder(tmp_path / "other", seed=1)
    refused("embeddings: made with another model than that of .*other; run `megalite embed", model=other)
    refused("embeddings of other documents than those of", corpus=cleaned(tmp_path / "others", texts[:9]))
    refused("clean: made by station 'clean'; a folder of 'embed'", embeddings=tmp_path / "clean")
    refused("none: not a folder of station 'embed'", embeddings=tmp_path / "none")
    refused("raw files", corpus=corpus_of(tmp_path / "raw.jsonl"))
    damaged = shutil.copytree(tmp_path / "embeddings", tmp_path / "damaged")
    content = bytearray((damaged / "embeddings.npy").read_bytes())
    content[-1] ^= 1
    (damaged / "embeddings.npy").write_bytes(content)
    refused(r"embeddings\.npy: its contents have changed", embeddings=damaged)
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    refused(r"needs faiss: pip install 'megalite\[semantic\]'", UnavailableError)

    empty = write_json_lines(tmp_path / "empty.jsonl", ["a", "", "b", ""])
    with pytest.raises(DataError, match=r"empty\.jsonl:2: an empty document, .*there are 2 such"):
        embed(corpus_of(empty), tmp_path / "vectors", EMBED, model=model)
    with pytest.raises(ConversionError, match="clean: no model"):
        embed(corpus, tmp_path / "vectors", EMBED, model=tmp_path / "clean")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConversionError, match=r"other: norm\.weight holds NaN"):
        embed(corpus, tmp_path / "vectors", EMBED, model=other)
    assert not list(tmp_path.glob("vectors*"))


def test_a_recipe(tmp_path, model: Path):
    """Embeddings are made once, and kept when the threshold changes; a model that cannot be is refused before the first
    station."""
    texts, _ = documents()
    write_json_lines(tmp_path / "raw.jsonl", texts)

    def run(model: Path = model, **changes) -> dict[str, bool]:
        semantic = {"model": model, "embed": {"layer": 0}, "threshold": THRESHOLD, "clusters": 3, **changes}
        recipe = DataRecipe(
            out=tmp_path / "out",
            sources=[{"path": tmp_path / "raw.jsonl"}],
            clean={"min_chars": 1},
            semantic_dedup=semantic,
            tokenizer={"vocab_size": 360},
            pack={"seq_len": 32},
            valid_fraction=0.0,
        )
        return {station.name: station.result.reused for station in prepare(recipe)}

    with pytest.raises(ConversionError, match="no model"):
        run(write_json_lines(tmp_path / "nothing/a.jsonl", ["a"]).parent)
    with pytest.raises(DataError, match=r"semantic_dedup\.model: .*absent: no such file or folder"):
        run(tmp_path / "absent")
    assert not (tmp_path / "out/clean").exists()
    with pytest.raises(DataError, match="clusters=51, and there are 50 documents"):
        run(clusters=51)
    assert not (tmp_path / "out/embeddings").exists()
    before, behind = ["clean", "dedup", "embeddings"], ["tokenizer", "tokens/train", "packed/train"]
    done = run()
    assert list(done) == [*before, "semantic-dedup", *behind]
    assert [name for name, reused in done.items() if reused] == ["clean", "dedup"]
    assert all(run().values())
    assert [name for name, reused in run(threshold=1.0).items() if reused] == before
    card = json.loads((tmp_path / "out/card.json").read_text())
    assert "semantic-dedup" in json.dumps(card)


def test_the_commands(tmp_path, model: Path, capsys):
    """`megalite embed` and `megalite data semantic-dedup`, and 2 for what cannot be."""

    def command(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(each) for each in arguments])
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    texts, _ = documents()
    cleaned(tmp_path, texts)
    here = (tmp_path / "clean", "--workers", 1)
    code, said = command("embed", model, *here, "-o", tmp_path / "vectors", "--layer", 0, "--max-tokens", 150)
    assert (code, "documents 50" in said) == (0, True)
    options = ("--embeddings", tmp_path / "vectors", "--out", tmp_path / "out")
    code, said = command("data", "semantic-dedup", *here, *options, "--threshold", 1.5)
    assert (code, "threshold" in said) == (2, True)
    code, said = command("data", "semantic-dedup", *here, *options, "--threshold", THRESHOLD, "--clusters", 1)
    assert (code, "clusters 10" in said) == (0, True), said
    for wrong, said_of_it in (
        (("--layer", 9), "layer=9"),
        (("--pooling", "max"), "pooling"),
        (("--max-tokens", 999), "max_tokens=999"),
    ):
        code, said = command("embed", model, *here, "-o", tmp_path / "wrong", *wrong)
        assert (code, said_of_it in said) == (2, True), said
    code, said = command("embed", tmp_path / "clean", *here, "-o", tmp_path / "wrong")
    assert (code, "no model" in said) == (2, True)
    assert not list(tmp_path.glob("wrong*"))
