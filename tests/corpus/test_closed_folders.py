"""What the user who runs us may not look into is refused by name: a corpus without it would be another one."""

from __future__ import annotations

import builtins
import errno
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import Rejected
from megalite.corpus.reading import python_library
from megalite.corpus.reading.python_library import list_python_files
from megalite.corpus.recipe import DocumentSource
from megalite.errors import DataError
from tests.kit.data import corpus_of, prose, write_json_lines


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder with a closed one in it: root, who may run the tests, can open any, so the system's answer is ours."""
    for name in ("a", "deep/closed/b"):
        (tmp_path / name).mkdir(parents=True)
        write_json_lines(tmp_path / name / "a.jsonl", ["a text"])
    scandir = os.scandir

    def refuse(folder):
        if os.fspath(folder).rstrip("/").endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    return tmp_path


def test_a_closed_folder_is_named(shelf):
    with pytest.raises(DataError, match=r"deep/closed: cannot be listed \(Permission denied\); open this folder"):
        corpus_of(shelf)


def test_so_is_one_behind_a_url(shelf):
    with pytest.raises(DataError, match=r"access is refused .*deep/closed"):
        Corpus([DocumentSource(path=f"file://{shelf}")])


def test_and_one_of_the_library(shelf, monkeypatch):
    monkeypatch.setattr(
        python_library.sysconfig, "get_paths", lambda: dict.fromkeys(("stdlib", "purelib", "platlib"), shelf)
    )
    with pytest.raises(DataError, match="deep/closed: cannot be listed"):
        list_python_files(None)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.parquet", "a.txt"])
def test_a_closed_file_is_put_aside(tmp_path, monkeypatch, name):
    """Large or small: the planner looks into it before its reader does."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 100)
    write_json_lines(tmp_path / name, prose(3))
    write_json_lines(tmp_path / "b.jsonl", ["a text"])
    real = builtins.open

    def refuse(path, *args, **kwargs):
        if os.fspath(path).endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(pa, "OSFile", refuse)
    monkeypatch.setattr(pq, "ParquetFile", lambda path, **kwargs: refuse(path))
    good, bad = sorted(corpus_of(tmp_path).read(), key=lambda record: record.id != "b.jsonl:1")
    assert isinstance(bad, Rejected)
    assert (good.text, bad.id, bad.reason) == ("a text", name, "unreadable file")
    assert "Permission denied" in bad.text


def test_a_folder_that_may_be_listed_and_no_more(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(DataError, match=r"manifest.json: cannot be read \(Permission denied\); open it"):
        corpus_of(tmp_path)


def test_a_closed_folder_that_is_hidden_is_not_looked_into(shelf):
    (shelf / "deep/closed").rename(shelf / "deep/.closed")
    assert len(list(corpus_of(shelf).documents())) == 1
    assert len(list(Corpus([DocumentSource(path=f"file://{shelf}")]).documents())) == 1
