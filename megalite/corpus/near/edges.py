"""Edges: pairs of documents that meet in a bucket, that is under one band key, and pass the check.

A bucket is walked in the order of the documents. Each one is compared with the representatives so far, and every
comparison that passes is an edge and makes the two one cluster of this bucket; representatives that are in the
newcomer's cluster already are passed over, so a thousand equal documents cost a thousand comparisons.

    bucket of key k:   d3   d8   d9   d12  ...
    compare d9 with:   d3 --no--> d8 --yes--> edge (d8, d9)

Up to half of MAX_REPRESENTATIVES, every document is a representative, so in a bucket of up to 65 documents the clusters
are those of comparing all pairs. In a larger one a newcomer joins the representatives only if it is like none of them,
and at most MAX_REPRESENTATIVES in all, so a bucket of n documents takes at most 128 n comparisons. Which documents are
compared depends on nothing but the bucket: not on other buckets, partitions or workers.

Each edge is checked, but clusters are what edges connect: if A is like B and B is like C, all three are one cluster
even if A and C are less alike. So who is removed is always like some member of its cluster, not always like the one
that stays. The check of every edge keeps these chains short.

A partition is walked in blocks, so that the signatures in memory are bounded however large it, or a bucket, may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from megalite.corpus.near.bands import slice_of_partition
from megalite.corpus.near.curve import agreements_needed
from megalite.corpus.near.index import Index, Items
from megalite.corpus.near.settings import NearDedupConfig, Verify
from megalite.kernel import kernel

MAX_REPRESENTATIVES = 128
"""Documents of a bucket that a newcomer is compared with."""

BLOCK_BYTES = 16 << 20
"""Signatures or sets of shingles in memory at once."""

ROUNDING = 1e-9
"""So that a similarity of exactly the threshold passes, however the product is rounded."""

_VERIFY_NUMBER: dict[Verify, int] = {"none": 0, "signature": 1, "jaccard": 2}


class PairRule(NamedTuple):
    """When two documents are alike."""

    verify: int
    """0: always, 1: enough values of the signatures are equal, 2: the sets are similar enough."""
    num_agreements: int
    threshold: float


class Representatives(NamedTuple):
    """Those a newcomer to the current bucket is compared with."""

    documents: np.ndarray
    """int64 [MAX_REPRESENTATIVES]"""
    places: np.ndarray
    """int64 [MAX_REPRESENTATIVES]: of each among the items in memory."""
    clusters: np.ndarray
    """int64 [MAX_REPRESENTATIVES]: equal for those that edges of this bucket connect."""
    key: np.ndarray
    """uint64 [1]: of the bucket."""
    counts: np.ndarray
    """int64 [2]: of representatives, and of comparisons so far."""


class Edges(NamedTuple):
    """The outcome of a partition."""

    pairs: np.ndarray
    """int64 [edges, 2]: numbers of documents, the smaller first; sorted, no pair twice."""
    num_entries: int
    num_comparisons: int


def pair_rule(config: NearDedupConfig) -> PairRule:
    """The check that the settings ask for."""
    needed = agreements_needed(config.threshold, config.num_hashes)
    return PairRule(_VERIFY_NUMBER[config.verify], needed, config.threshold)


def find_edges(index: Index, partition: int, num_partitions: int, *, rule: PairRule, num_old: int = 0) -> Edges:
    """Edges of the buckets of one partition.

    Args:
        index: the documents.
        partition: which range of band keys.
        num_partitions: ranges in all.
        rule: the check.
        num_old: the first so many documents are earlier data; a bucket of them alone is passed over.
    """
    keys, documents = _read_entries(index, partition, num_partitions)
    num_entries = keys.size
    shared = _in_shared_bucket(keys, documents, num_old)
    keys, documents = keys[shared], documents[shared]
    documents_of, places, clusters = (np.zeros(MAX_REPRESENTATIVES, np.int64) for _ in range(3))
    representatives = Representatives(documents_of, places, clusters, np.zeros(1, np.uint64), np.zeros(2, np.int64))
    found = [np.zeros((0, 2), np.int64)]
    for block in _blocks(index, documents):
        found.append(_compare(index, keys[block], documents[block], rule, representatives))
    return Edges(_distinct(np.concatenate(found)), num_entries, int(representatives.counts[1]))


def _compare(
    index: Index, keys: np.ndarray, documents: np.ndarray, rule: PairRule, representatives: Representatives
) -> np.ndarray:
    """Bring what is compared of a block's documents into memory, and compare; int64 [edges, 2]."""
    carried = representatives.documents[: representatives.counts[0]]
    present = np.union1d(carried, documents)
    representatives.places[: carried.size] = np.searchsorted(present, carried)
    items = index.gather(present)
    return _match_block(keys, documents, np.searchsorted(present, documents), items, rule, representatives)


def _distinct(pairs: np.ndarray) -> np.ndarray:
    """Sorted, each once."""
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    return pairs[np.append(True, (pairs[1:] != pairs[:-1]).any(axis=1))[: len(pairs)]]


def _read_entries(index: Index, partition: int, num_partitions: int) -> tuple[np.ndarray, np.ndarray]:
    """Band keys (uint64) and documents (int64) of a partition, sorted by key and then by document."""
    all_keys, all_documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for shard in range(index.num_shards):
        keys = index.map(shard, "band_keys")
        part = slice_of_partition(keys, partition, num_partitions)
        all_keys.append(np.array(keys[part]))
        all_documents.append(index.map(shard, "band_rows")[part] + index.starts[shard])
    keys, documents = np.concatenate(all_keys), np.concatenate(all_documents)
    order = np.argsort(keys, kind="stable")  # shards are in the order of their documents, so ties are too
    return keys[order], documents[order]


def _in_shared_bucket(keys: np.ndarray, documents: np.ndarray, num_old: int) -> np.ndarray:
    """bool [entries]: its bucket has two documents or more, the last of them a new one."""
    if keys.size == 0:
        return np.zeros(0, np.bool_)
    begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    ends = np.append(begins[1:], keys.size)
    wanted = (ends - begins > 1) & (documents[ends - 1] >= num_old)
    return np.repeat(wanted, ends - begins)


def _blocks(index: Index, documents: np.ndarray) -> Iterator[slice]:
    """Cut the entries into runs whose items fit in BLOCK_BYTES, of one entry at least."""
    if documents.size == 0:
        return
    distinct, which = np.unique(documents, return_inverse=True)
    ends = np.cumsum(4 * index.item_sizes(distinct)[which] + 8)
    begin = 0
    while begin < documents.size:
        taken = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, taken + BLOCK_BYTES, side="right")))
        yield slice(begin, end)
        begin = end


@kernel
def _match_block(
    keys: np.ndarray, documents: np.ndarray, places: np.ndarray, items: Items, rule: PairRule, others: Representatives
) -> np.ndarray:
    """Walk the entries of a block; goes on with the bucket that the last block ended in.

    Every edge joins two clusters of a bucket, so there are fewer than entries and carried representatives together.

    Returns:
        int64 [edges, 2]
    """
    edges = np.empty((keys.size + MAX_REPRESENTATIVES, 2), np.int64)
    num_edges = 0
    for entry in range(keys.size):
        if keys[entry] != others.key[0]:
            others.key[0], others.counts[0] = keys[entry], 0
        num_others = others.counts[0]
        cluster = -1
        for other in range(num_others):
            if others.clusters[other] == cluster:
                continue
            others.counts[1] += 1
            if not _alike(items, others.places[other], places[entry], rule):
                continue
            edges[num_edges] = others.documents[other], documents[entry]
            num_edges += 1
            if cluster < 0:
                cluster = others.clusters[other]
            else:
                _rename(others.clusters[:num_others], others.clusters[other], cluster)
        if num_others < MAX_REPRESENTATIVES // 2 or (cluster < 0 and num_others < MAX_REPRESENTATIVES):
            others.documents[num_others], others.places[num_others] = documents[entry], places[entry]
            others.clusters[num_others] = cluster if cluster >= 0 else num_others
            others.counts[0] += 1
    return edges[:num_edges]


@kernel
def _rename(clusters: np.ndarray, old: int, new: int) -> None:
    for place in range(clusters.size):
        if clusters[place] == old:
            clusters[place] = new


@kernel
def _alike(items: Items, first: int, second: int, rule: PairRule) -> bool:
    """The check of one pair."""
    if rule.verify == 0:
        return True
    a = items.values[items.borders[first] : items.borders[first + 1]]
    b = items.values[items.borders[second] : items.borders[second + 1]]
    if rule.verify == 1:
        num_equal = 0
        for place in range(a.size):
            num_equal += a[place] == b[place]
        return num_equal >= rule.num_agreements
    return _jaccard_reaches(a, b, rule.threshold)


@kernel
def _jaccard_reaches(a: np.ndarray, b: np.ndarray, threshold: float) -> bool:
    """Whether two sorted sets are at least so similar."""
    if min(a.size, b.size) < threshold * max(a.size, b.size) - ROUNDING:
        return False
    num_common, i, j = 0, 0, 0
    while i < a.size and j < b.size:
        if a[i] == b[j]:
            num_common, i, j = num_common + 1, i + 1, j + 1
        elif a[i] < b[j]:
            i += 1
        else:
            j += 1
    return num_common >= threshold * (a.size + b.size - num_common) - ROUNDING
