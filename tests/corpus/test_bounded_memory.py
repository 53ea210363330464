"""A whole recipe in a process that the system keeps from taking more memory than a tenth of its corpus."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

from megalite.corpus.prepare import prepare
from megalite.corpus.recipe import DataRecipe
from tests.kit.data import write_json_lines

ROOT = Path(__file__).parents[2]

LIMIT_MB = 22
"""What the process may take beyond what it has after a small recipe: some copies of a batch, which has 1 MB of text
here and 8 MB elsewhere, and what grows with nothing."""

CORPUS_MB = 10 * LIMIT_MB

PARTITIONS = CORPUS_MB
"""Of 1 MB of text each, a quarter of what is taken by itself."""

CHILD_SECONDS = 600

CHILD = """
import ctypes, gc, json, os, resource, sys, threading
from pathlib import Path
import numpy as np
import pyarrow as pa
import megalite.corpus.documents

megalite.corpus.documents.BATCH_BYTES //= 8  # before others take its value; so that less text tells as much
from megalite.corpus.prepare import prepare
from megalite.corpus import shards
from megalite.corpus.near import edges
from megalite.corpus.recipe import DataRecipe
from megalite.data import indexed

shards.SCAN_BYTES //= 8
edges.BLOCK_BYTES //= 8
indexed.COPY_BYTES //= 8


def megabytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # each thread takes a batch, and there is one a core
pa.set_cpu_count(1)
pa.set_io_thread_count(1)
threading.stack_size(1 << 18)  # of which the limit counts all, also what is never touched
small, large, limit_mb = *map(DataRecipe.model_validate, json.loads(sys.argv[1])), int(sys.argv[2])
prepare(small)  # imports
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
resource.setrlimit(resource.RLIMIT_DATA, (int((megabytes("VmData") + limit_mb) * 1e6),) * 2)
try:
    np.ones(int(1.1e6 * limit_mb), np.uint8)
except MemoryError:
    done = prepare(large)
    print(json.dumps({station.name: station.result.manifest.counts for station in done}))
"""
"""The limit is on private memory: mapped files, which the system may drop at any time, do not count. Arrow is told to
take memory from malloc, since its own allocator asks the system for a gigabyte at once that it may never touch, and
malloc to give back what is large when it is freed."""

ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1000000",
    "OMP_NUM_THREADS": "1",
}

SHORTEST_LINE, PASSAGE_LINES = 40, 8

UNWANTED = ("{", "lorem ipsum", "javascript", "use cookies", "[", "#", "@")


def sentences() -> list[str]:
    """The different lines of Python's library that no rule on lines would touch."""
    folder = Path(sysconfig.get_path("stdlib"))
    lines = {
        line.strip()
        for path in sorted([*folder.glob("*.py"), *folder.glob("[a-s]*/*.py")])
        for line in path.read_text(encoding="utf-8", errors="ignore").splitlines()
    }
    wanted = (line for line in lines if SHORTEST_LINE <= len(line) <= 90 and line.isascii() and len(line.split()) >= 6)
    return sorted(line for line in wanted if not any(word in line.lower() for word in UNWANTED))


def write_corpus(path: Path, megabytes: float) -> dict[str, int]:
    """Documents of random real lines. Each 20th is equal to an earlier one, or nearly, or holds a passage of one.

    Returns:
        How many of each kind.
    """
    rng, lines = random.Random(0), sentences()
    counts = {"documents": 0, "exact": 0, "near": 0, "passages": 0}
    recent: list[list[str]] = []
    texts: list[str] = []
    written = 0
    while written < megabytes * 1e6:
        number = counts["documents"]
        document = [
            f"This is part {number} of the whole and of no other.",
            *rng.choices(lines, k=rng.randrange(25, 60)),
        ]
        kind = ("exact", "near", "passages")[number // 20 % 3] if number % 20 == 19 else ""
        if kind == "exact":
            document = recent.pop()
        elif kind == "near":
            document = [*recent.pop()[:-1], rng.choice(lines)]
        elif kind == "passages":
            document[5:5] = recent.pop()[1 : 1 + PASSAGE_LINES]
        else:
            recent = [*recent[-100:], document]
        texts.append("\n".join(document))
        written += len(texts[-1])
        counts["documents"] += 1
        if kind:
            counts[kind] += 1
    write_json_lines(path, texts)
    return counts


def recipe(corpus: Path, tokenizer: Path, out: Path) -> dict:
    """All rules at thresholds that let program text pass, and every station that compares documents."""
    return {
        "out": str(out),
        "sources": [{"path": str(corpus)}],
        "clean": {
            "c4": {"terminal_punctuation": False, "min_sentences": 1},
            "gopher_quality": {"min_stop_words": 0, "min_letter_chunk_share": 0.5},
            "gopher_repetition": {},
            "fineweb": {"min_terminal_line_share": 0.0},
            "privacy": {},
        },
        "near_dedup": {},
        "substring_dedup": {"num_partitions": PARTITIONS},
        "tokenizer": {"path": str(tokenizer)},
        "pack": {"window_documents": 10_000},
        "valid_fraction": 0.0,
    }


def test_a_recipe_on_ten_times_the_memory(tmp_path, tokenizer_folders):
    """220 MB through all stations in 22 MB on two cores; what was planted is found, and nothing else is."""
    write_corpus(tmp_path / "small.jsonl", 1)
    planted = write_corpus(tmp_path / "large.jsonl", CORPUS_MB)
    compiled, small, large = (
        recipe(tmp_path / f"{name}.jsonl", tokenizer_folders["byte-bpe"], tmp_path / out)
        for name, out in (("small", "compiled"), ("small", "small"), ("large", "large"))
    )
    prepare(DataRecipe.model_validate(compiled))  # here, for the compiler would leave memory behind in the child
    command = [sys.executable, "-c", CHILD, json.dumps([small, large]), str(LIMIT_MB)]
    environment = {**os.environ, **ENVIRONMENT}
    outcome = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=CHILD_SECONDS, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert outcome.stdout, "the limit does not hold: memory beyond it could be taken"
    counts = json.loads(outcome.stdout)
    documents = [counts[name]["documents"] for name in ("clean", "dedup", "near-dedup", "substring-dedup")]
    cleaned, unique, unlike, cut = documents
    assert counts["clean"]["documents_in"] == planted["documents"]
    assert cleaned > 0.95 * planted["documents"]  # the rules know that some are program text
    assert 0.95 * planted["exact"] <= cleaned - unique <= planted["exact"]
    assert 0.95 * planted["near"] <= unique - unlike <= planted["near"]
    assert cut == unlike
    assert counts["substring-dedup"]["repeated_bytes"] > 0.9 * planted["passages"] * PASSAGE_LINES * SHORTEST_LINE
    assert counts["tokens/train"]["documents"] == cut
    assert counts["packed/train"]["tokens"] == counts["tokens/train"]["tokens"]
