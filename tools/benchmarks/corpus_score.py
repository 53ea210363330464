"""Judge the clusters that a deduplication found in a corpus with planted duplicates.

    python tools/benchmarks/corpus_score.py DIR clusters.json NAME

DIR is what `corpus.py --dups` made; clusters.json maps the ids of documents that are in a cluster to its label. Prints
one JSON object:

    recall          of each kind planted, the share of pairs whose two documents share a cluster
    recall_by_J     the same by true likeness, with the number of pairs
    precision       of the documents removed (all of a cluster but the first), the share whose likeness to another
                    one of the cluster is at least 0.8, 0.7, 0.5
    removed         how many those are
    largest         documents in the largest cluster
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from arguments import existing
from corpus_duplicates import Truth, jaccard, shingles

Clusters = Mapping[str, Any]
"""Id to label."""

THRESHOLDS = (0.8, 0.7, 0.5)

MAX_MEMBERS = 400
"""Members of a cluster that are compared with each other."""

CERTAIN = 0.95
"""A likeness from which on no better one is looked for."""

NO_WORD = re.compile(r"\W+")


def main() -> None:
    """Print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=existing, help="what corpus.py --dups made")
    parser.add_argument("clusters", type=existing, help='JSON: {"id": label}')
    parser.add_argument("name", help="name of what is judged")
    options = parser.parse_args()
    clusters = json.loads(options.clusters.read_text(encoding="utf-8"))
    print(json.dumps({"name": options.name, **judge(options.folder, clusters)}))


def judge(folder: Path, clusters: Clusters) -> dict[str, Any]:
    """Recall and precision of clusters."""
    members: dict[Any, list[str]] = defaultdict(list)
    for id, label in clusters.items():
        members[label].append(id)
    groups = [sorted(group) for group in members.values() if len(group) > 1]
    pairs = [truth for truth in read_lines(folder / "truth.jsonl") if truth["kind"] != "substr"]
    text_of = {row["id"]: row["text"] for row in read_lines(folder / "corpus_dup.jsonl") if row["id"] in clusters}
    likenesses = [likeness for group in groups for likeness in best_likenesses([text_of[id] for id in group])]
    num_removed = max(1, len(likenesses))
    return {
        "removed": sum(len(group) - 1 for group in groups),
        "largest": max(map(len, groups), default=0),
        "precision": {
            str(threshold): round(sum(likeness >= threshold for likeness in likenesses) / num_removed, 4)
            for threshold in THRESHOLDS
        },
        **judge_recall(pairs, clusters),
    }


def judge_recall(pairs: Sequence[Truth], clusters: Clusters) -> dict[str, dict[str, Any]]:
    """Share of the planted pairs that are in one cluster, by kind and by likeness."""
    by_kind: dict[str, list[bool]] = defaultdict(list)
    by_likeness: dict[str, list[bool]] = defaultdict(list)
    for pair in pairs:
        found = pair["a"] in clusters and pair["b"] in clusters and clusters[pair["a"]] == clusters[pair["b"]]
        by_kind[f"{pair['kind']}:{pair['rate']:g}" if "rate" in pair else pair["kind"]].append(found)
        by_likeness[f"J{int(min(pair['j5'], 0.9999) * 10) / 10:.1f}"].append(found)
    return {
        "recall": {kind: round(sum(found) / len(found), 3) for kind, found in by_kind.items()},
        "recall_by_J": {
            bin_: f"{sum(found) / len(found):.3f} ({len(found)})" for bin_, found in sorted(by_likeness.items())
        },
    }


def best_likenesses(texts: Sequence[str]) -> Iterator[float]:
    """For each text of a cluster but the first, its likeness to the text of the cluster that is most like it."""
    sets = [shingles(NO_WORD.sub(" ", text.lower()).split()) for text in texts[:MAX_MEMBERS]]
    for one in range(1, len(sets)):
        best = 0.0
        for other in range(len(sets)):
            fewer, more = sorted((len(sets[one]), len(sets[other])))
            if other == one or fewer < best * more:  # sets of such sizes cannot be more alike
                continue
            best = max(best, jaccard(sets[one], sets[other]))
            if best >= CERTAIN:
                break
        yield best


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    with open(path, encoding="utf-8") as file:
        yield from map(json.loads, file)


if __name__ == "__main__":
    main()
