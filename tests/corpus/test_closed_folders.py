"""What the user who runs us may not look into is refused by name: a corpus without it would be another one."""

from __future__ import annotations

import errno
import os

import pytest

from megalite.corpus.corpus import Corpus
from megalite.corpus.reading import python_library
from megalite.corpus.reading.python_library import list_python_files
from megalite.corpus.recipe import DocumentSource
from megalite.errors import DataError
from tests.kit.data import corpus_of, write_json_lines


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


def test_a_closed_folder_that_is_hidden_is_not_looked_into(shelf):
    (shelf / "deep/closed").rename(shelf / "deep/.closed")
    assert len(list(corpus_of(shelf).documents())) == 1
    assert len(list(Corpus([DocumentSource(path=f"file://{shelf}")]).documents())) == 1
