"""The benchmark of the data stations: a case gives true figures, and targets are judged as they read."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "benchmarks"

NUM_DOCUMENTS = 150
NUM_PLANTED = 30
WORDS_OF_A_DOCUMENT = 250


@pytest.fixture
def tools(monkeypatch):
    """The benchmark's modules by name; they import each other as scripts do."""
    monkeypatch.syspath_prepend(str(TOOLS))
    modules = {"data": "data", **{name: f"data_{name}" for name in ("cases", "inputs", "measure", "peers")}}
    return {name: importlib.import_module(module) for name, module in modules.items()}


def write_corpus(folder: Path, tools: dict) -> list[tuple[str, str]]:
    """A third of a megabyte of random words; the last documents are copies of the first with their last word changed,
    and one passage stands in three documents."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 9))) for _ in range(4000)]
    texts = [" ".join(rng.choices(words, k=WORDS_OF_A_DOCUMENT)) for _ in range(NUM_DOCUMENTS)]
    passage = " ".join(rng.choices(words, k=40))
    hosts = (50, 60, 70)
    for host in hosts:
        texts[host] += f"\n{passage}\n"
    texts += [text + " changed" for text in texts[:NUM_PLANTED]]
    rows = [(f"d{number}", text) for number, text in enumerate(texts)]
    tools["inputs"].write_documents(iter(rows), folder, shard_bytes=1e5)
    tools["inputs"].write_documents(iter(rows[:20]), folder / "tiny", shard_bytes=1e4)
    copies = [
        {"kind": "crop", "rate": 0.1, "a": f"d{n}", "b": f"d{NUM_DOCUMENTS + n}", "j5": 0.99}
        for n in range(NUM_PLANTED)
    ]
    places = [(f"d{host}", texts[host].encode().index(passage.encode())) for host in hosts]
    passages = [
        {"kind": "substr", "passage": 0, "id": id, "start": start, "end": start + len(passage)} for id, start in places
    ]
    lines = [json.dumps(truth) for truth in copies + passages]
    (folder / "truth.jsonl").write_text("\n".join(lines) + "\n")
    lines = [json.dumps({"id": id, "text": text}) for id, text in rows]
    (folder / "corpus_dup.jsonl").write_text("\n".join(lines) + "\n")
    return rows


def measure(tools: dict, folder: Path, case: str, setting: str = "") -> dict[str, float]:
    job = tools["measure"].Job(case, setting, str(folder), str(folder / "tiny"), str(folder), is_judged=True)
    return tools["measure"].measure(job, tools["cases"].find_case(case))


def test_a_case_measures_and_judges(tools, tmp_path):
    """Near-duplicates of a corpus whose copies are known: the text is counted whole, just the copies are removed."""
    rows = write_corpus(tmp_path, tools)
    figures = measure(tools, tmp_path, "near")
    assert figures["amount"] == pytest.approx(sum(len(text.encode()) for _, text in rows) / 1e6)
    assert figures["removed"] == NUM_PLANTED
    assert figures["precision_0.7"] == 1.0
    assert figures["recall_0.8"] == 1.0
    assert 0 < figures["cpu_seconds"] < 60
    assert 0 < figures["wall_seconds"] < 60
    assert figures["peak_mb"] > figures["extra_mb"]
    assert not list(tmp_path.glob("tmp*"))  # what it wrote is gone


def test_recall_and_precision_fall_when_clusters_are_wrong(tools, tmp_path):
    """Half of the pairs found, and as many documents removed that are like none."""
    write_corpus(tmp_path, tools)
    half = NUM_PLANTED // 2
    clusters = {f"d{n}": n for n in range(half)} | {f"d{NUM_DOCUMENTS + n}": n for n in range(half)}
    clusters |= {f"d{100 + n}": 1000 + n // 2 for n in range(2 * half)}
    verdict = tools["cases"].judge_clusters(tools["inputs"].Inputs(tmp_path), clusters)
    assert verdict["recall_0.8"] == 0.5
    assert verdict["precision_0.7"] == 0.5


@pytest.mark.parametrize("setting", ["find", "memory"])
def test_planted_passages_are_found(tools, tmp_path, setting):
    """The second and third copy of a passage lie inside the spans."""
    write_corpus(tmp_path, tools)
    figures = measure(tools, tmp_path, "substring", setting)
    assert figures["passages"] == 2
    assert figures["passages_found"] == 1.0


def test_a_missed_passage_is_noticed(tools, tmp_path):
    """Without any span none is found."""
    write_corpus(tmp_path, tools)
    inputs = tools["inputs"].Inputs(tmp_path)
    assert tools["cases"].judge_passages(inputs, np.zeros((0, 3), np.int64))["passages_found"] == 0.0


def test_every_entry_has_its_case_and_every_target_its_entry(tools):
    """Names are unique, and none is misspelt."""
    entries = tools["data"].entries(large=True)
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names)
    known = {**tools["cases"].CASES, **tools["peers"].PEERS}
    assert {entry.case for entry in entries} == set(known)
    assert {target.entry for target in tools["data"].TARGETS} <= set(names)


def test_medians_ratios_and_verdicts(tools):
    """The median over the rounds is compared with the fastest peer of the group, not with an engine."""
    data = tools["data"]
    chosen = [
        data.Entry("near", "near", "near"),
        data.Entry("slow", "near", "rensa", role="peer"),
        data.Entry("fast", "near", "rensa", role="peer"),
        data.Entry("bare", "near", "rensa", role="engine"),
        data.Entry("failed", "near", "rensa", role="peer"),
    ]
    speeds = {"near": [70.0, 90.0, 80.0], "slow": [1.0], "fast": [40.0], "bare": [900.0], "failed": []}
    results = {name: [{"speed": speed, "recall_0.8": 0.9} for speed in each] for name, each in speeds.items()}
    rows = {row["case"]: row for row in data.summarise(chosen, results)}
    assert set(rows) == {"near", "slow", "fast", "bare"}
    assert rows["near"]["speed"] == 80.0
    assert (rows["near"]["best_peer"], rows["near"]["peer_ratio"]) == ("fast", 2.0)
    asked = {(each["entry"], each["figure"]): each["met"] for each in data.verdicts(list(rows.values()))}
    assert asked == {("near", "speed"): True, ("near", "recall_0.8"): False, ("near", "peer_ratio"): False}


def test_a_case_that_breaks_does_not_stop_the_others(tools, tmp_path, capsys):
    """Its last words are printed, and it has no result."""
    entry = tools["data"].Entry("broken", "near", "no-such-case")
    assert tools["data"].run(entry, tmp_path, is_judged=False) is None
    assert "KeyError: 'no-such-case'" in capsys.readouterr().err
