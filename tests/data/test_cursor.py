"""The order of a run that was rolled back, and of one whose mixture changed, against lists kept by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from megalite.config.schema import SourceConfig
from megalite.data.cursor import DataCursor, Gap
from megalite.data.samples import Samples, open_samples
from tests.kit.data import random_documents, write_pair

SEQ_LEN = 8


def open_mixture(folder: Path, **weights: float) -> Samples:
    """Sources of 40 to 60 samples with the weights given."""
    for name in weights:
        if not (folder / f"{name}.idx").exists():
            write_pair(folder / name, random_documents(60, longest=12, seed=len(name)))
    sources = [SourceConfig(path=folder / name, weight=weight) for name, weight in weights.items()]
    return open_samples(sources, seq_len=SEQ_LEN, seed=1, document_masks=True)


def read(samples: Samples, start: int, stop: int) -> list[tuple[str, int, int]]:
    """Source, epoch and position of a range, one by one; both ways to ask must agree."""
    one_by_one = [tuple(samples.identity(index)) for index in range(start, stop)]
    at_once = samples.identities(start, stop).tolist()
    assert [(samples.sources[source].name, *rest) for source, *rest in at_once] == one_by_one
    return one_by_one


def test_gaps_leave_data_out(tmp_path):
    """Twice rolled back, once to the same place: what is read is the list of all data without what was left out."""
    samples = open_mixture(tmp_path, a=1, bb=2)
    data = read(samples, 0, 200)
    cursor = DataCursor().leave_out(40, 56)
    assert cursor.gaps == (Gap(40, 16),)
    assert read(samples.following(cursor), 0, 100) == data[:40] + data[56:116]
    again = cursor.leave_out(40, 70)
    assert read(samples.following(again), 0, 100) == data[:40] + data[70:130]
    later = again.leave_out(60, 100)
    assert later.gaps == (Gap(40, 30), Gap(60, 10))
    assert read(samples.following(later), 0, 100) == data[:40] + data[70:90] + data[100:140]
    assert later.data_index(60) == 100
    assert [later.run_index(later.data_index(index)) for index in range(120)] == list(range(120))
    assert [later.run_index(index) for index in (39, 40, 69, 70, 89, 90, 99, 100)] == [39, 40, 40, 40, 59, 60, 60, 60]
    assert TypeAdapter(DataCursor).validate_json(json.dumps(asdict(later)), strict=True) == later


def test_no_gap_is_no_change():
    """Going back and reading the same again leaves the cursor as it was."""
    cursor = DataCursor().leave_out(40, 56)
    assert DataCursor().leave_out(40, 40) == DataCursor()
    assert cursor.leave_out(50, 66) == cursor


def test_a_source_goes_on_where_it_stood(tmp_path):
    """Weights change at sample 50, and a source is added: each source's own samples are those of its one sequence, none
    twice and none left out, and the new shares hold."""
    old, new = open_mixture(tmp_path, a=1, bb=3), open_mixture(tmp_path, a=5, bb=1, ccc=2)
    cursor = DataCursor().remix(50, old.drawn(50), new.drawn(50))
    mixed = new.following(cursor)
    history = read(old, 0, 50) + read(mixed, 50, 450)
    for name in ("a", "bb", "ccc"):
        own = [(epoch, position) for source, epoch, position in history if source == name]
        alone = open_mixture(tmp_path, **{name: 1})
        assert own == [(epoch, position) for _, epoch, position in read(alone, 0, len(own))], name
    shares = mixed.count(50, 450)
    np.testing.assert_allclose([shares[name] / 400 for name in ("a", "bb", "ccc")], [5 / 8, 1 / 8, 2 / 8], atol=0.01)
    assert mixed.drawn(450) == {name: sum(source == name for source, _, _ in history) for name in ("a", "bb", "ccc")}
