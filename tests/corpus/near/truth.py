"""The slow and obvious truth about near-duplicates, and small corpora that have some."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WORD = re.compile(rb"[A-Za-z0-9\x80-\xff]+")

VOCABULARY = [f"{syllable}{number}" for syllable in ("ka", "lo", "Mi", "nu") for number in range(200)]


def shingles(text: str, ngram: int) -> set[tuple[bytes, ...]]:
    """The set of word n-grams; all words as one where there are fewer."""
    words = [word.lower() for word in WORD.findall(text.encode())]
    width = min(ngram, len(words))
    return {tuple(words[i : i + width]) for i in range(len(words) - width + 1)} if words else set()


def jaccard(a: set, b: set) -> float:
    """Shared elements over all elements; 0 for two empty sets, which are like nothing."""
    return len(a & b) / len(a | b) if a | b else 0.0


def alike_pairs(texts: Sequence[str], ngram: int, threshold: float) -> set[tuple[int, int]]:
    """All pairs at or above the threshold."""
    sets = [shingles(text, ngram) for text in texts]
    pairs = ((i, j) for j in range(len(texts)) for i in range(j))
    return {(i, j) for i, j in pairs if jaccard(sets[i], sets[j]) >= threshold}


def components(num_documents: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """The smallest document that edges lead to, of each."""
    label = list(range(num_documents))
    pairs = list(pairs)
    for _ in range(num_documents):
        for i, j in pairs:
            label[i] = label[j] = min(label[i], label[j])
    return label


def words(rng: np.random.Generator, num_words: int) -> list[str]:
    """Random words."""
    return rng.choice(VOCABULARY, num_words).tolist()


def edited(rng: np.random.Generator, original: Sequence[str], num_edits: int) -> list[str]:
    """A copy with some words replaced."""
    copy = list(original)
    for place in rng.integers(0, len(copy), num_edits):
        copy[place] = words(rng, 1)[0]
    return copy


def family_corpus(num_families: int, *, seed: int = 0, copies: int = 4, num_words: int = 60) -> list[str]:
    """Texts in families: each an original and edited copies of it, shuffled."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(num_families):
        original = words(rng, int(rng.integers(num_words // 2, num_words * 2)))
        texts.append(" ".join(original))
        texts += [" ".join(edited(rng, original, int(rng.integers(0, 6)))) for _ in range(rng.integers(0, copies))]
    return [texts[i] for i in rng.permutation(len(texts))]


def write_shards(folder: Path, texts: Sequence[str], *, num_shards: int = 1, row_group: int = 16) -> list[dict]:
    """Parquet files of documents, as shards."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for number, part in enumerate(np.array_split(np.arange(len(texts)), num_shards)):
        table = pa.table(
            {
                "id": pa.array([f"document-{i}" for i in part], pa.string()),
                "text": pa.array([texts[i] for i in part], pa.string()),
            }
        )
        path = folder / f"part-{number:05d}.parquet"
        pq.write_table(table, path, row_group_size=row_group)
        shards.append({"path": str(path)})
    return shards
