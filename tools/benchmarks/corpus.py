"""A corpus of real text to judge data tools by, made from the files of any Debian machine with Python.

    python tools/benchmarks/corpus.py --out DIR --mb 50 --seed 2 --dups

Manual pages, documentation, licences, headers and Python sources, in an order that only the seed decides. The same
machine image gives the same bytes. With --dups, copies of known likeness are planted (`corpus_duplicates.py`), and
`corpus_score.py` judges the clusters that a deduplication found.

DIR then holds
    corpus.jsonl        {"text", "id", "source"}: a file is a document; no two texts are equal
    corpus_dup.jsonl    the same with the planted documents among them, shuffled (--dups)
    truth.jsonl         one line for each thing planted, see `corpus_duplicates.py` (--dups)
    stats.json          counts, bytes, lengths and sources
"""

from __future__ import annotations

import argparse
import fnmatch
import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from arguments import amount, new_folder, share
from corpus_duplicates import Record, Truth, plant
from corpus_text import is_text_file, read_text

ROOTS = (
    "/usr/share/doc",
    "/usr/share/man",
    "/usr/lib/python3*",
    "/usr/local/lib/python3*",
    "/usr/share/perl",
    "/usr/include",
    "/usr/share/common-licenses",
    "/usr/share/info",
)

QUANTILES = (0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1)

NUM_SHOWN_SOURCES = 40


def main() -> None:
    """Make the corpus and print its statistics."""
    options = parse_options()
    roots = options.root or list(ROOTS)
    options.out.mkdir(parents=True, exist_ok=True)
    records, source_bytes = collect(roots, int(options.mb * 1e6), options.seed, options.max_share)
    write_lines(options.out / "corpus.jsonl", map(vars, records))
    stats = describe(records, source_bytes, roots, options.seed)
    if options.dups:
        shuffled, truths = plant(records, options.seed, options.per_kind)
        write_lines(options.out / "corpus_dup.jsonl", map(vars, shuffled))
        write_lines(options.out / "truth.jsonl", truths)
        stats["dup_docs"] = len(shuffled)
        stats["dup_bytes"] = sum(len(record.text.encode()) for record in shuffled)
        stats["planted"] = describe_planted(truths)
    text = json.dumps(stats, indent=1)
    (options.out / "stats.json").write_text(text, encoding="utf-8")
    print(text)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=new_folder, required=True, help="folder to make")
    parser.add_argument("--mb", type=amount, default=250, help="million bytes of text")
    parser.add_argument("--seed", type=int, default=1, help="another seed takes other files")
    parser.add_argument("--root", action="append", help="take files from here instead; a glob, may be repeated")
    parser.add_argument("--max-share", type=share, default=0.15, help="largest share of the text from one source")
    parser.add_argument("--dups", action="store_true", help="plant duplicates and write the truth about them")
    parser.add_argument(
        "--per-kind", type=share, default=0.01, help="documents planted of each kind, as a share of all"
    )
    return parser.parse_args()


def collect(roots: Sequence[str], num_bytes: int, seed: int, max_share: float) -> tuple[list[Record], dict[str, int]]:
    """Take files in the seed's order until there is enough text.

    Args:
        roots: globs of folders.
        num_bytes: how much is enough.
        seed: decides the order.
        max_share: a source that has given this share of the text gives no more.

    Returns:
        The documents, and the bytes from each source.
    """
    paths = sorted(find_files(roots), key=lambda path: _digest(f"{seed}:{path}", 8))
    records: list[Record] = []
    source_bytes: Counter[str] = Counter()
    seen = set()
    for path in paths:
        if source_bytes.total() >= num_bytes:
            break
        source = source_of(path, roots)
        if source_bytes[source] > max_share * num_bytes:
            continue
        text = read_text(path)
        if text is None or (digest := _digest(text, 16)) in seen:
            continue
        seen.add(digest)
        source_bytes[source] += len(text.encode())
        records.append(Record(text, f"d{len(records):07d}", path))
    return records, source_bytes


def find_files(roots: Sequence[str]) -> Iterator[str]:
    """Every text file below the roots, once, by its name; links are not followed."""
    seen = set()
    for root in (match for pattern in roots for match in sorted(glob.glob(pattern))):
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in (".git", "__pycache__")]
            for path in (os.path.join(folder, name) for name in names):
                if path not in seen and is_text_file(path) and not os.path.islink(path):
                    seen.add(path)
                    yield path


def source_of(path: str, roots: Sequence[str]) -> str:
    """What a file counts to: its root and the folder in it, such as doc/git."""
    for root in roots:
        parts = path.split("/")
        depth = root.count("/") + 1
        if fnmatch.fnmatch("/".join(parts[:depth]), root):
            inside = parts[depth:]
            return f"{parts[depth - 1]}/{inside[0] if len(inside) > 1 else ''}"
    return "other"


def describe(
    records: Sequence[Record], source_bytes: dict[str, int], roots: Sequence[str], seed: int
) -> dict[str, Any]:
    """Counts, lengths and sources of a corpus."""
    lengths = sorted(len(record.text.encode()) for record in records)
    largest = sorted(source_bytes.items(), key=lambda item: -item[1])[:NUM_SHOWN_SOURCES]
    return {
        "docs": len(lengths),
        "bytes": sum(lengths),
        "seed": seed,
        "roots": roots,
        "len_quantiles": {str(share): lengths[min(len(lengths) - 1, int(share * len(lengths)))] for share in QUANTILES},
        "by_source": dict(largest),
    }


def describe_planted(truths: Iterable[Truth]) -> dict[str, dict[str, float]]:
    """How many of each kind were planted, and how like their originals they are."""
    likeness: dict[str, list[float]] = {}
    for truth in truths:
        kind = f"{truth['kind']}:{truth['rate']}" if "rate" in truth else truth["kind"]
        likeness.setdefault(kind, []).append(truth.get("j5", 0.0))
    return {kind: {"n": len(each), "mean_j5": round(sum(each) / len(each), 3)} for kind, each in likeness.items()}


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


if __name__ == "__main__":
    main()
