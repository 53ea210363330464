"""Exact deduplication against a dictionary of texts."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.recipe import DedupConfig
from megalite.corpus.stations.dedup import dedup, first_occurrences, hash_texts
from megalite.errors import DataError
from megalite.texts import Texts
from tests.kit.data import corpus_of, write_json_lines


@given(labels=st.lists(st.integers(0, 8), max_size=60))
@settings(max_examples=100, deadline=None)
def test_first_occurrences_equal_a_dictionary(labels):
    """Every element points to the first one with its hash; equal halves of two hashes do not suffice."""
    hashes = np.array([[label // 3, label % 3] for label in labels], dtype=np.uint64).reshape(-1, 2)
    first: dict[int, int] = {}
    expected = [first.setdefault(label, index) for index, label in enumerate(labels)]
    assert first_occurrences(hashes).tolist() == expected


@pytest.mark.parametrize(
    ("config", "left", "right", "same"),
    [
        (DedupConfig(), "a b\n\tc ", " a  b c", True),
        (DedupConfig(), "a b c", "ab c", False),
        (DedupConfig(), "A", "a", False),
        (DedupConfig(ignore_case=True), "STRASSE", "straße", True),
        (DedupConfig(ignore_whitespace=False), "a b", "a  b", False),
    ],
)
def test_what_counts_as_the_same(config, left, right, same):
    """Each setting on a pair that it decides."""
    first, second = hash_texts(Texts.of([left, right]), config)
    assert (first == second).all() == same


def test_the_first_of_each_cluster_stays(tmp_path):
    """Across two sources: kept texts in their order, removed ones with the document they repeat, and all counts."""
    a = write_json_lines(tmp_path / "a.jsonl", ["one", "two", "one ", "three"])
    b = write_json_lines(tmp_path / "b.jsonl", ["two", "four", "one"])
    result = dedup(corpus_of(a, b), tmp_path / "out", DedupConfig())
    assert [document.text for document in corpus_of(tmp_path / "out").read()] == ["one", "two", "three", "four"]
    clusters = pq.read_table(tmp_path / "out" / "clusters").to_pylist()
    assert [(row["removed_id"], row["kept_id"]) for row in clusters] == [
        ("a.jsonl:3", "a.jsonl:1"),
        ("b.jsonl:1", "a.jsonl:2"),
        ("b.jsonl:3", "a.jsonl:1"),
    ]
    assert result.manifest.counts == {
        "documents": 4,
        "documents_in": 7,
        "text_bytes_in": 25,
        "text_bytes": 15,
        "clusters": 2,
        "largest_cluster": 3,
        "cluster_sizes": {"2": 1, "3-4": 1},
        "rejected": {},
        "removed_by_source": {"a.jsonl": 1, "b.jsonl": 2},
    }


def test_records_that_cannot_be_read_are_put_aside(tmp_path):
    """Raw input without a cleaning station loses nothing silently."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nbad\n{"text": "one"}\n')
    counts = dedup(corpus_of(path), tmp_path / "out", DedupConfig()).manifest.counts
    assert (counts["documents"], counts["rejected"]) == (1, {"not a JSON object": 1})
    assert pq.read_table(tmp_path / "out" / "rejected" / "part-00000.parquet").num_rows == 1


def test_nothing_in_is_an_error(tmp_path):
    """A source without documents is a mistake of the one who named it: an empty set would be the next one's riddle."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match=r"a\.jsonl: empty: no document is in it"):
        dedup(corpus_of(path), tmp_path / "out", DedupConfig())
    assert not (tmp_path / "out").exists()
