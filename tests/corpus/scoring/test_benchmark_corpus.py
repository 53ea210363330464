"""The benchmark's corpus: what is planted is where the truth says, and the scorer counts as one would by hand."""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools" / "benchmarks"

TIMEOUT_SECONDS = 120


def run(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(TOOLS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_SECONDS).stdout


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def runs_of_five(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[begin : begin + 5]) for begin in range(max(1, len(words) - 4))}


def likeness(one: list[str], other: list[str]) -> float:
    first, second = runs_of_five(one), runs_of_five(other)
    return len(first & second) / len(first | second)


def write_sources(root: Path) -> Path:
    """Documents of random words in all the forms that the tool reads, and files that it must leave out."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(3000)]

    def prose(num_words: int) -> str:
        return "\n".join(" ".join(rng.choices(words, k=10)) for _ in range(num_words // 10))

    for number in range(60):
        path = root / f"doc/package{number % 7}/part{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(prose(rng.randint(100, 900)))
    (root / "man/man1").mkdir(parents=True)
    manual = f'.\\" a comment\n.SH NAME\n.B bold\n{prose(100)} \\fBword\\fR a\\-b\n.nr x 1\n'
    (root / "man/man1/tool.1.gz").write_bytes(gzip.compress(manual.encode()))
    page = "<html><head><title>unseen</title></head><body><p>one &amp; two</p><script>unseen</script>"
    (root / "doc/page.html").write_text(f"{page}{prose(100)}</body></html>")
    (root / "doc/latin.txt").write_bytes(("caf\xe9 " + prose(100)).encode("latin-1"))
    (root / "doc/copy.txt").write_text((root / "doc/package0/part0.txt").read_text())
    (root / "doc/short.txt").write_text("too short")
    (root / "doc/binary.txt").write_bytes(b"\0" * 1000)
    (root / "doc/broken.gz").write_bytes(b"\x1f\x8b" + b"x" * 1000)
    (root / "doc/image.png").write_text(prose(100))
    return root


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    root = write_sources(tmp_path_factory.mktemp("root"))
    out = tmp_path_factory.mktemp("corpus")
    run("corpus.py", "--out", out, "--mb", "9", "--seed", "3", "--dups", "--root", root, "--max-share", "1")
    return out


def test_documents_are_texts_without_markup(corpus):
    """Every readable file once; no markup, no binary, nothing twice."""
    rows = read(corpus / "corpus.jsonl")
    text_of = {Path(row["source"]).name: row["text"] for row in rows}
    assert len(rows) == len(text_of) == 63
    assert len({row["text"] for row in rows}) == len({row["id"] for row in rows}) == 63
    assert not {"short.txt", "binary.txt", "broken.gz", "image.png"} & set(text_of)
    assert ("copy.txt" in text_of) != ("part0.txt" in text_of)
    assert text_of["latin.txt"].startswith("café ")
    page, manual = text_of["page.html"], text_of["tool.1.gz"]
    assert page.startswith("one & two\n")
    assert "unseen" not in page
    assert "<" not in page
    assert manual.startswith("NAME\nbold\n")
    assert manual.endswith(" word a-b")


def test_the_truth_is_true(corpus):
    """Copies are as like as it says, by counting; passages lie where it says; each kind is there."""
    text_of = {row["id"]: row["text"] for row in read(corpus / "corpus_dup.jsonl")}
    truths = read(corpus / "truth.jsonl")
    passages = defaultdict(set)
    for truth in truths:
        if truth["kind"] == "substr":
            passages[truth["passage"]].add(text_of[truth["id"]].encode()[truth["start"] : truth["end"]])
            continue
        original, copy = text_of[truth["a"]], text_of[truth["b"]]
        assert truth["j5"] == pytest.approx(likeness(original.lower().split(), copy.lower().split()), abs=1e-4)
        assert (truth["kind"] == "exact") == (original == copy)
    assert len(passages) == 8
    assert all(len(found) == 1 for found in passages.values())
    kinds = Counter(truth["kind"] for truth in truths)
    assert kinds["exact"] + kinds["near_exact"] == 20
    assert (kinds["scatter"], kinds["block"], kinds["crop"]) == (120, 80, 60)


def test_the_same_seed_gives_the_same_bytes(corpus, tmp_path):
    """And another one another corpus."""
    root = json.loads((corpus / "stats.json").read_text())["roots"][0]
    for seed in ("3", "4"):
        run(
            "corpus.py",
            "--out",
            tmp_path / seed,
            "--mb",
            "9",
            "--seed",
            seed,
            "--dups",
            "--root",
            root,
            "--max-share",
            "1",
        )
    names = ("corpus.jsonl", "corpus_dup.jsonl", "truth.jsonl", "stats.json")
    assert all((corpus / name).read_bytes() == (tmp_path / "3" / name).read_bytes() for name in names)
    assert not any((corpus / name).read_bytes() == (tmp_path / "4" / name).read_bytes() for name in names)


def test_the_scorer_counts_as_by_hand(corpus, tmp_path):
    """Clusters that are partly right: recall by pair and precision by comparing every two members."""
    rng = random.Random(1)
    rows = read(corpus / "corpus_dup.jsonl")
    original_of = {truth["b"]: truth["a"] for truth in read(corpus / "truth.jsonl") if truth["kind"] != "substr"}
    clusters = {row["id"]: original_of.get(row["id"], row["id"]) for row in rows if rng.random() < 0.9}
    clusters |= dict.fromkeys(rng.sample(sorted(clusters), 10), "wrong")
    (tmp_path / "clusters.json").write_text(json.dumps(clusters))
    verdict = json.loads(run("corpus_score.py", corpus, tmp_path / "clusters.json", "test"))

    words = {row["id"]: re.sub(r"\W+", " ", row["text"].lower()).split() for row in rows}
    members = defaultdict(list)
    for id in sorted(clusters):
        members[clusters[id]].append(id)
    best = [
        max(likeness(words[id], words[other]) for other in group if other != id)
        for group in members.values()
        for id in group[1:]
    ]
    assert verdict["removed"] == len(best)
    assert verdict["largest"] == max(map(len, members.values()))
    for threshold in (0.8, 0.7, 0.5):
        share = sum(each >= threshold for each in best) / len(best)
        assert verdict["precision"][str(threshold)] == pytest.approx(share, abs=1e-3)
    for kind, rate in (("scatter", 0.1), ("crop", 0.5)):
        pairs = [each for each in read(corpus / "truth.jsonl") if (each["kind"], each.get("rate")) == (kind, rate)]
        found = [clusters.get(each["a"], 1) == clusters.get(each["b"], 2) for each in pairs]
        assert verdict["recall"][f"{kind}:{rate:g}"] == pytest.approx(sum(found) / len(found), abs=1e-3)
