"""Data sets that Hugging Face `datasets` loads: the same texts as in the files, cut into its own shards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import Document, Rejected
from megalite.corpus.near.settings import NearDedupConfig
from megalite.corpus.recipe import CleanConfig, DedupConfig, DocumentSource
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.dedup import dedup
from megalite.corpus.stations.near import near_dedup
from megalite.errors import DataError, UnavailableError
from megalite.stations.runners import LocalPool
from tests.kit.data import all_bytes, corpus_of, prose, write_json_lines

TEXTS = [*prose(40, seed=3), "zwölf Bücher", "日本語\nsecond line", "🙂"]

NUM_FILES = 3


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Nothing is looked up on the network, and nothing is left in the user's cache."""
    import datasets
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for other processes; this one has read it already
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def thirds() -> list[list[str]]:
    return [TEXTS[:10], TEXTS[10:35], TEXTS[35:]]


def as_json_lines(folder: Path) -> Path:
    for number, texts in enumerate(thirds()):
        write_json_lines(folder / f"train-{number}.jsonl", texts)
    return folder


def as_parquet(folder: Path) -> Path:
    folder.mkdir()
    for number, texts in enumerate(thirds()):
        table = pa.table(
            {"text": texts, "id": [f"{number}.{row}" for row in range(len(texts))], "n": range(len(texts))}
        )
        pq.write_table(table, folder / f"train-{number}.parquet")
    return folder


def dataset_of(folder: Path, **settings: object) -> Corpus:
    return Corpus([DocumentSource(kind="datasets", dataset=str(folder), **settings)])


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("form", [as_json_lines, as_parquet])
def test_it_gives_the_texts_of_the_files(tmp_path, form, streaming):
    """In the same order, with distinct ids, under the name of the data set."""
    folder = form(tmp_path / "shelf")
    documents = list(dataset_of(folder, streaming=streaming).read())
    assert [document.text for document in documents] == [document.text for document in corpus_of(folder).read()]
    assert [document.text for document in documents] == TEXTS
    assert len({document.id for document in documents}) == len(TEXTS)
    assert {document.source for document in documents} == {"shelf"}


def test_a_stream_has_a_shard_for_each_of_its_own(tmp_path):
    """Each holds the texts of one file, and may be read alone; ids name the shard and the row."""
    corpus = dataset_of(as_json_lines(tmp_path / "shelf"))
    assert len(corpus.shards()) == NUM_FILES
    assert [document.id for document in corpus.documents()][9:12] == [
        "train-00000:10",
        "train-00001:1",
        "train-00001:2",
    ]


def test_a_downloaded_data_set_is_cut_by_size(tmp_path, monkeypatch):
    """Without streaming there are as many shards as its bytes ask for, however few the files."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 2_000)
    corpus = dataset_of(as_json_lines(tmp_path / "shelf"), streaming=False)
    assert len(corpus.shards()) > NUM_FILES
    assert [document.text for document in corpus.documents()] == TEXTS
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 1)
    monkeypatch.setattr("megalite.corpus.shards.LARGEST_SHARD", 1)
    corpus = dataset_of(tmp_path / "shelf", streaming=False)
    assert len(corpus.shards()) == len(TEXTS)
    assert [document.text for document in corpus.documents()] == TEXTS
    assert [d.text for d in dataset_of(tmp_path / "shelf", streaming=False, split="train[:4]").documents()] == TEXTS[:4]


def test_one_and_two_workers_leave_the_same_bytes(tmp_path):
    """The whole station, its shards read by this process and by two others."""
    settings = CleanConfig()
    folder = as_parquet(tmp_path / "shelf")
    clean(dataset_of(folder), tmp_path / "one", settings)
    with LocalPool(2) as pool:
        clean(dataset_of(folder), tmp_path / "two", settings, runner=pool)
    shards = {name: content for name, content in all_bytes(tmp_path / "one").items() if name.startswith("part-")}
    assert len(shards) == NUM_FILES
    assert all_bytes(tmp_path / "two") == all_bytes(tmp_path / "one")


def test_fields_are_honoured(tmp_path):
    """Another column of texts, given ids, further columns as metadata; a null is put aside."""
    (tmp_path / "shelf").mkdir()
    table = pa.table({"body": ["one", None, "two"], "key": [7, 8, None], "n": [1, 2, 3]})
    pq.write_table(table, tmp_path / "shelf" / "a.parquet")
    records = list(dataset_of(tmp_path / "shelf", text_field="body", id_field="key", keep_fields=("n",)).read())
    assert records == [
        Document("7", "shelf", "one", json.dumps({"n": 1})),
        Document("train-00000:3", "shelf", "two", json.dumps({"n": 3})),
        Rejected("8", "shelf", "None", "no text field, or not a string"),
    ]
    with pytest.raises(DataError, match=r"shelf/train: no column 'text'; it has body, key, n: set text_field"):
        list(dataset_of(tmp_path / "shelf").read())


def test_a_folder_with_the_name_of_a_format(tmp_path, monkeypatch):
    """Is no matter where the format is meant, as for the library itself; it can be named another way."""
    monkeypatch.chdir(tmp_path)
    write_json_lines(Path("a.jsonl"), ["the file that is named"])
    corpus = Corpus([DocumentSource(kind="datasets", dataset="json", data_files=("a.jsonl",))])
    (before,) = corpus.inputs
    write_json_lines(Path("json/a.jsonl"), ["another file"])
    for dataset, text in (("json", "the file that is named"), ("./json", "another file")):
        corpus = Corpus([DocumentSource(kind="datasets", dataset=dataset, data_files=("a.jsonl",))])
        assert [document.text for document in corpus.documents()] == [text]
        assert ([before] == corpus.inputs) == (dataset == "json")


def test_a_format_with_files(tmp_path, monkeypatch):
    """The name of a format and a pattern, read from the folder where the command was given."""
    as_json_lines(tmp_path / "shelf")
    monkeypatch.chdir(tmp_path)
    corpus = dataset_of(Path("json"), data_files=("shelf/train-[12].jsonl",))
    monkeypatch.chdir("/")
    assert [document.text for document in corpus.documents()] == TEXTS[10:]


def test_max_mb_caps_the_text(tmp_path):
    """Whole documents, over the shards in their order."""
    texts = [document.text for document in dataset_of(as_json_lines(tmp_path / "shelf"), max_mb=0.003).documents()]
    sizes = [len(text.encode()) for text in TEXTS]
    count = max(count for count in range(len(TEXTS)) if sum(sizes[:count]) <= 3000)
    assert len(thirds()[0]) < count < len(TEXTS)
    assert texts == TEXTS[:count]


def test_fingerprints_follow_settings_and_local_files(tmp_path):
    """Another revision or a changed file: another fingerprint; the same: the same."""
    folder = as_json_lines(tmp_path / "shelf")
    prints = [dataset_of(folder).inputs[0][1], dataset_of(folder).inputs[0][1]]
    prints.append(dataset_of(folder, revision="main").inputs[0][1])
    write_json_lines(folder / "train-1.jsonl", ["another"])
    prints.append(dataset_of(folder).inputs[0][1])
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "valid"}, r"Bad split: valid.*; check subset, split"),
        ({"split": "valid", "streaming": False}, r"Unknown split .valid.*; check subset, split"),
        ({"subset": "en"}, r"'en' not found.*; check subset"),
        ({"data_files": ("gone.jsonl",)}, r"gone\.jsonl.*; check dataset, data_files and revision"),
    ],
)
def test_what_is_not_there_is_said_when_planning(tmp_path, settings, message):
    """What the library says, and which setting to look at."""
    with pytest.raises(DataError, match=message):
        dataset_of(as_json_lines(tmp_path / "shelf"), **settings)


def test_a_data_set_that_is_nowhere(tmp_path):
    """No such folder; and the hub cannot be reached."""
    with pytest.raises(DataError, match=r"check dataset, data_files and revision"):
        dataset_of(tmp_path / "gone")
    with pytest.raises(DataError, match=r"the hub cannot be reached: check the network, or download"):
        dataset_of(Path("nobody/nothing"))


def test_a_data_set_that_breaks_off(tmp_path):
    """A damaged file stops the work with what is done kept, since it may be the network; a changed one with all."""
    folder = as_json_lines(tmp_path / "shelf")
    corpus = dataset_of(folder)
    (folder / "train-1.jsonl").write_text("not json")
    with pytest.raises(UnavailableError, match=r"reading shard 1 of 3 broke off.*run the same command again"):
        list(corpus.read())
    corpus = dataset_of(folder)
    (folder / "train-1.jsonl").unlink()
    with pytest.raises(DataError, match=r"it had 3 shards when this station began and has 2 now; pin a revision"):
        list(corpus.read())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "datasets"}, "dataset is missing"),
        ({"kind": "datasets", "dataset": "a", "path": "b"}, "path and include must be left out"),
        ({"path": "a", "split": "valid"}, "split is only for kind: datasets"),
        ({"path": "a", "streaming": False}, "streaming is only for kind: datasets"),
        ({"kind": "python", "dataset": "a"}, "dataset is only for kind: datasets"),
    ],
)
def test_settings_of_another_kind_are_refused(settings, message):
    """None is ignored in silence."""
    with pytest.raises(ValidationError, match=message):
        DocumentSource.model_validate(settings)


def test_folders_of_stations_load_as_they_are(tmp_path):
    """`load_dataset(FOLDER)` gives the documents; what was rejected or removed has its own name. Rejects of another
    schema in a subfolder made it end in a CastError."""
    from datasets import load_dataset

    raw = write_json_lines(tmp_path / "raw.jsonl", [*TEXTS, *TEXTS[:5], "x", *(text + " end" for text in TEXTS[:3])])
    cleaned = clean(corpus_of(raw), tmp_path / "clean", CleanConfig(min_chars=3)).manifest
    once = dedup(corpus_of(tmp_path / "clean"), tmp_path / "dedup", DedupConfig()).manifest
    near = near_dedup(corpus_of(tmp_path / "dedup"), tmp_path / "near", NearDedupConfig(), keep_index=True).manifest
    for manifest, others in ((cleaned, ["rejected"]), (once, ["clusters"]), (near, ["removed"])):
        loaded = load_dataset(str(manifest.folder))["train"]
        assert loaded.num_rows == manifest.counts["documents"] > 0
        assert loaded.column_names == ["id", "source", "text", "metadata"]
        for name in others:
            put_aside = load_dataset(str(manifest.folder), name)["train"]
            assert put_aside.num_rows == manifest.counts["documents_in"] - manifest.counts["documents"] > 0
    assert "README.md" in [output.path for output in cleaned.outputs]
    without = replace(cleaned, outputs=tuple(each for each in cleaned.outputs if each.path != "README.md"))
    assert without.fingerprint == cleaned.fingerprint
