"""Looking at stations: counts and examples against the files, a fair and repeatable choice, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from megalite.cli.data import reports
from megalite.corpus.inspection import DUPLICATE, KEPT, Inspection, Wanted, inspect
from megalite.corpus.near.settings import NearDedupConfig
from megalite.corpus.recipe import CleanConfig, DedupConfig
from megalite.corpus.spans.settings import LineDedupConfig, SubstringConfig
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.dedup import dedup
from megalite.corpus.stations.near import near_dedup
from megalite.corpus.stations.spans import line_dedup, substring_dedup
from megalite.errors import DataError
from tests.kit.data import corpus_of, prose, random_documents, write_json_lines, write_tokens_folder

STATIONS = ("clean", "dedup", "substring-dedup", "line-dedup")
"""As they are run here: neither the order of their names nor the one of recipes."""

LOOSE = CleanConfig(min_chars=10, max_repeated_line_share=None)

MENU = "home and news and contact and imprint"


@pytest.fixture
def out(tmp_path, monkeypatch) -> Path:
    """Folders of four stations over two sources, each of several files and row groups."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 4_000)
    monkeypatch.setattr("megalite.corpus.documents.BATCH_BYTES", 1_500)
    first, second = prose(40, seed=1), prose(50, seed=2)
    first += ["!" * (20 + number) for number in range(6)] + ["short"] * 9 + first[:5]
    second += [MENU] * 2 + [f"{MENU}\n{text}" for text in prose(12, seed=3)] + [first[0] + "\nand more"]
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", first), write_json_lines(tmp_path / "b.jsonl", second))
    folder = tmp_path / "out"
    clean(corpus, folder / "clean", LOOSE)
    dedup(corpus_of(folder / "clean"), folder / "dedup", DedupConfig())
    substring_dedup(corpus_of(folder / "dedup"), folder / "substring-dedup", SubstringConfig(min_bytes=60))
    line_dedup(corpus_of(folder / "substring-dedup"), folder / "line-dedup", LineDedupConfig(min_occurrences=5))
    return folder


def rows_of(folder: Path, inside: str = ".") -> list[dict]:
    """All rows of the Parquet files in a folder, in their order."""
    return [row for path in sorted((folder / inside).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def gone_from(folder: Path) -> list[tuple[str, str, str]]:
    """(reason, source, id) of every document that a station put aside, read from the files."""
    rows = [*rows_of(folder, "rejected"), *rows_of(folder, "removed")]
    gone = [(row["reason"], row["source"], row["id"]) for row in rows]
    return gone + [(DUPLICATE, row["removed_source"], row["removed_id"]) for row in rows_of(folder, "clusters")]


def group(inspection: Inspection, reason: str):
    """The one group of a reason."""
    (found,) = (group for group in inspection.groups if group.reason == reason)
    return found


def test_counts_are_those_of_the_files(out):
    """Every station of the folder, in the order in which they ran; kept first, then by falling number."""
    inspections = inspect(out, Wanted(num=0))
    assert [inspection.station for inspection in inspections] == list(STATIONS)
    for inspection in inspections:
        folder = out / inspection.station
        kept, *others = inspection.groups
        texts = [row["text"] for row in rows_of(folder)]
        assert (kept.fate, kept.reason, kept.documents) == ("kept", KEPT, len(texts))
        assert kept.text_bytes == sum(len(text.encode()) for text in texts)
        expected = Counter(reason for reason, _, _ in gone_from(folder))
        assert {group.reason: group.documents for group in others} == expected
        assert [group.documents for group in others] == sorted(expected.values(), reverse=True)
        assert inspection.documents_in == len(texts) + sum(expected.values())
    cleaned, deduped, cut, lines = inspections
    rejected = rows_of(out / "clean", "rejected")
    for other in cleaned.groups[1:]:
        sizes = [len(row["text"].encode()) for row in rejected if row["reason"] == other.reason]
        assert (other.fate, other.text_bytes) == ("rejected", sum(sizes))
    assert {group.reason for group in cleaned.groups} == {KEPT, "too short", "few letters and digits"}
    assert {group.reason for group in deduped.groups} == {KEPT, DUPLICATE}
    assert {group.fate for group in lines.groups} == {"kept", "removed"}
    assert lines.text_bytes_in == cut.groups[0].text_bytes
    assert len(list(out.glob("clean/part-*.parquet"))) > 2
    assert pq.ParquetFile(out / "clean" / "part-00000.parquet").num_row_groups > 1


def test_examples_are_documents_of_their_group(out):
    """Right names and texts, none twice, as many as wanted or as there are."""
    texts_before = {}
    for inspection in inspect(out, Wanted(num=4)):
        folder = out / inspection.station
        kept = {(row["source"], row["id"]): row["text"] for row in rows_of(folder)}
        rejected = {(row["source"], row["id"]): row["text"] for row in rows_of(folder, "rejected")}
        gone = gone_from(folder)
        for found in inspection.groups:
            names = [(example.source, example.id) for example in found.examples]
            members = set(kept) if found.fate == "kept" else {name[1:] for name in gone if name[0] == found.reason}
            assert len(set(names)) == len(names) == min(4, found.documents)
            assert set(names) <= members
            where = {"kept": kept, "rejected": rejected, "removed": texts_before}[found.fate]
            assert [example.text for example in found.examples] == [where[name] for name in names]
        texts_before = kept


def test_what_a_duplicate_repeats_is_named(out):
    """The detail says which document stayed."""
    (inspection,) = inspect(out / "dedup", Wanted(num=100, reason=DUPLICATE))
    pairs = {(row["removed_id"], f"repeats {row['kept_id']}") for row in rows_of(out / "dedup", "clusters")}
    assert {(example.id, example.detail) for example in group(inspection, DUPLICATE).examples} == pairs
    assert group(inspection, KEPT).examples == ()


def test_the_choice_is_that_of_the_smallest_random_numbers(out):
    """One number a row over all files and row groups; a source that is not wanted only passes by."""
    rows = rows_of(out / "clean")
    lots = np.random.default_rng(7).random(len(rows))
    for source in (None, "b.jsonl"):
        members = [i for i, row in enumerate(rows) if source in (None, row["source"])]
        expected = [rows[i]["id"] for i in sorted(sorted(members, key=lots.__getitem__)[:5])]
        (inspection,) = inspect(out / "clean", Wanted(num=5, seed=7, source=source))
        found = group(inspection, KEPT)
        assert [example.id for example in found.examples] == expected
        assert found.documents == len(members)
        assert found.text_bytes == (sum(len(row["text"].encode()) for row in rows) if source is None else None)


def test_every_document_is_shown_equally_often(out):
    """Over many seeds, and the same seed shows the same."""
    num_seeds, num = 300, 3
    shown: Counter[str] = Counter()
    for seed in range(num_seeds):
        (inspection,) = inspect(out / "clean", Wanted(num=num, seed=seed, reason="too short"))
        shown.update(example.id for example in group(inspection, "too short").examples)
    share = num / len(shown)
    assert len(shown) == group(inspection, "too short").documents == 9
    spread = (num_seeds * share * (1 - share)) ** 0.5
    assert all(abs(count - num_seeds * share) < 5 * spread for count in shown.values())
    assert inspect(out, Wanted(seed=3)) == inspect(out, Wanted(seed=3)) != inspect(out, Wanted(seed=4))


def test_a_source_is_counted_by_itself(out):
    """All groups, of all stations."""
    for inspection in inspect(out, Wanted(source="a.jsonl", num=1000)):
        folder = out / inspection.station
        expected = Counter(reason for reason, source, _ in gone_from(folder) if source == "a.jsonl")
        expected[KEPT] = sum(row["source"] == "a.jsonl" for row in rows_of(folder))
        assert Counter({group.reason: group.documents for group in inspection.groups}) == expected
        assert {example.source for group in inspection.groups for example in group.examples} == {"a.jsonl"}


def test_a_text_is_not_guessed_among_documents_of_one_id(tmp_path):
    """Where several have the id of a removed one, with other texts; copies have the same text."""
    (text,) = prose(1, seed=4)
    texts = [text, f"{text} again", f"{text} and more", "another text", "another text"]
    records = [{"id": "cat" if text in each else "dog", "text": each} for each in texts]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    clean(corpus_of(tmp_path / "a.jsonl"), tmp_path / "clean", LOOSE)
    dedup(corpus_of(tmp_path / "clean"), tmp_path / "dedup", DedupConfig())
    near_dedup(corpus_of(tmp_path / "dedup"), tmp_path / "near", NearDedupConfig())
    (copies,) = inspect(tmp_path / "dedup", Wanted(reason=DUPLICATE))
    assert [(each.id, each.text) for each in group(copies, DUPLICATE).examples] == [("dog", "another text")]
    (near,) = inspect(tmp_path / "near", Wanted(num=9))
    examples = group(near, "near-duplicate").examples
    assert [(each.id, each.text, each.has_namesakes) for each in examples] == [("cat", None, True)] * 2
    assert run("inspect", tmp_path / "near").output.count("several documents have this id") == 2


@pytest.mark.parametrize("change", ["gone", "other"])
def test_texts_that_are_not_there_any_more_are_left_out(out, tmp_path, change):
    """The folder of the station before was removed, or holds other work now."""
    shutil.rmtree(out / "clean")
    if change == "other":
        clean(corpus_of(tmp_path / "a.jsonl"), out / "clean", LOOSE)
    (inspection,) = inspect(out / "dedup", Wanted())
    assert [example.text for example in group(inspection, DUPLICATE).examples] == [None] * 3
    assert all(example.text for example in group(inspection, KEPT).examples)


def test_what_is_no_station_of_documents_is_refused(out, tmp_path):
    """With what was expected."""
    tokens = write_tokens_folder(tmp_path / "tokens", random_documents(3))
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder, complaint in (
        (tokens, "made by station 'tokenize'"),
        (empty, "no station of documents in it"),
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path / "a.jsonl", "no such folder"),
    ):
        with pytest.raises(DataError, match=complaint):
            inspect(folder, Wanted())
    with pytest.raises(DataError, match=r"no document of source 'a\.json' \(did you mean 'a\.jsonl'\?\)"):
        inspect(out, Wanted(source="a.json"))
    with pytest.raises(DataError, match=r"no reason has 'longer' in it.*; there are kept, "):
        inspect(out, Wanted(reason="longer"))
    (out / "dedup" / "part-00000.parquet").unlink()
    with pytest.raises(DataError, match=r"dedup: does not agree with its manifest.json: part-00000.parquet: missing"):
        inspect(out, Wanted())


def run(*arguments: object):
    app = typer.Typer()
    app.command("inspect")(reports.inspect)
    app.command("effects")(reports.effects)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


def test_the_command_prints_counts_and_examples(out):
    """One line of names for each example, as much of its text as wanted, and nothing that steers a terminal."""
    result = run("inspect", out, "--num", 2, "--chars", 15, "--reason", "short")
    assert result.exit_code == 0, result.output
    assert all(station in result.output for station in STATIONS)
    assert result.output.count("rejected: too short\n") == 2
    assert "short, source a.jsonl" not in result.output
    assert result.output.count(", source a.jsonl, 5 characters\n    short\n") == 2
    assert reports._printable("a\x1b[31mb\n\tc") == "a\N{REPLACEMENT CHARACTER}[31mb\n\tc"
    assert isinstance(run("inspect", out / "nowhere").exception, DataError)
