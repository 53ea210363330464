"""Folders that Hugging Face `datasets` has saved, wherever they lie, and files of others with the same names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megalite.errors import DataError
from tests.kit.data import corpus_of, write_json_lines


def save(folder: Path, num_rows: int) -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"text": [f"{folder.name} {number}" for number in range(num_rows)]})
    dataset.save_to_disk(str(folder))
    (folder / "cache-0123.arrow").write_bytes((folder / "data-00000-of-00001.arrow").read_bytes())


@pytest.fixture
def splits(tmp_path) -> Path:
    """A DatasetDict."""
    for name in ("train", "test"):
        save(tmp_path / "saved" / name, 2)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return tmp_path / "saved"


def test_one_in_another_folder(splits):
    """Is read as one by itself: files of its cache, and its descriptions, were documents and rejects."""
    save(splits.parent / "deep/alone", 1)
    write_json_lines(splits.parent / "a.jsonl", ["a text"])
    found = [record.text for record in corpus_of(splits.parent).read()]
    assert found == ["a text", "alone 0", "test 0", "test 1", "train 0", "train 1"]
    assert [record.text for record in corpus_of(splits).read()] == ["train 0", "train 1", "test 0", "test 1"]


@pytest.mark.parametrize("missing", ["", "state.json"])
def test_a_split_that_is_not_there(splits, missing):
    path = splits / "test" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for root in (splits, splits.parent):
        with pytest.raises(
            DataError, match=r"dataset_dict.json names the split 'test', and no state.json .* put it back"
        ):
            corpus_of(root)


def test_a_file_that_is_not_there(splits):
    (splits / "test/data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"test/data-00000-of-00001.arrow: No such file"):
        corpus_of(splits)


def test_patterns_count_here_too(splits):
    with pytest.raises(DataError, match=r"no file to read; looked for \*.jsonl"):
        corpus_of(splits, include=("*.jsonl",))


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
@pytest.mark.parametrize("content", [b'{"epoch": 3}', b"{", b"\xff", b"[1]", b'{"_data_files": [3], "splits": [3]}'])
def test_files_of_others_with_these_names(tmp_path, name, content):
    write_json_lines(tmp_path / "a.jsonl", ["a text"])
    (tmp_path / name).write_bytes(content)
    records = list(corpus_of(tmp_path).read())
    assert [record.id for record in records] == ["a.jsonl:1", f"{name}:1"]
