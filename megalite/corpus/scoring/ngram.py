"""Perplexity: how surprising a text is to an n-gram model of sample texts.

    samples --hash words, count--> Kneser-Ney estimates --> one hash table --> perplexity of any text

The model is trained here, from files the user trusts (Wikipedia, books, hand-picked pages), as CCNet does with KenLM
(Wenzek et al. 2020; Heafield 2011). It knows words by their hashes only, so it holds no text. What it costs against
KenLM's binary: 16 bytes an entry and at most half of the slots empty, but no build step and no C++.

Perplexity is per word, line ends included: exp(-log p(text) / (words + lines with words)). A text without a word has
perplexity infinity. Values compare only under one model.

Words that are rare in the sample count as one, the unknown word. What is unknown in a text gets that word's probability
divided by how many there were (adjusted perplexity, Ueberla 1994). Without the division gibberish would look familiar:
unknown words are frequent together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import TypeAdapter, ValidationError

from megalite.arrays import load_array
from megalite.errors import DataError
from megalite.records import explain, parse_json
from megalite.stations.tasks import replacing
from megalite.texts import Texts

if TYPE_CHECKING:
    from megalite.corpus.scoring.kneser_ney import Estimates

FORMAT = 1

SETTINGS_FILE, TABLE_FILE = "ngram.json", "table.npy"

MAX_LOAD = 0.75
"""Largest share of the table's slots that are taken."""


@dataclass(frozen=True)
class NgramSettings:
    """What a model is, besides its table."""

    order: int
    min_word_count: int
    prune: tuple[int, ...]
    num_sample_words: int
    num_ngrams: tuple[int, ...]
    """Of each order, kept."""
    discounts: tuple[tuple[float, ...], ...]
    fallback_orders: tuple[int, ...]
    """Orders of which the sample had too little for the formula of the discounts."""
    format: int = FORMAT


class NgramModel:
    """An interpolated modified Kneser-Ney model.

    Args:
        table: uint64 [slots, 2], see `ngram_kernel`.
        settings: what it is.
    """

    higher_is_better = False

    def __init__(self, table: np.ndarray, settings: NgramSettings):
        self.table = table
        self.settings = settings

    def log_likelihoods(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Log probability of each text in nats (float64 [texts]), and its number of words and line ends (int64)."""
        from megalite.corpus.scoring.ngram_kernel import log_likelihoods
        from megalite.corpus.scoring.words import hash_batches

        parts = [log_likelihoods(*batch, self.table, self.settings.order) for batch in hash_batches(texts)]
        log_likelihood = np.concatenate([np.zeros(0), *(part[0] for part in parts)])
        num_words = np.concatenate([np.zeros(0, np.int64), *(part[1] for part in parts)])
        return log_likelihood, num_words

    def perplexity(self, texts: Texts) -> np.ndarray:
        """Perplexity per word of each text, float64 [texts]; infinity for a text without a word."""
        log_likelihood, num_words = self.log_likelihoods(texts)
        mean = np.divide(-log_likelihood, num_words, out=np.full(len(texts), np.inf), where=num_words > 0)
        return np.exp(mean)

    score = perplexity

    def save(self, folder: Path) -> None:
        """Write the model into a folder; the same model gives the same bytes."""
        with replacing(folder / TABLE_FILE) as path, open(path, "wb") as file:
            np.save(file, self.table, allow_pickle=False)
        with replacing(folder / SETTINGS_FILE) as path:
            path.write_text(json.dumps(asdict(self.settings), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> NgramModel:
        """Map a model into memory: workers of one machine share it.

        Raises:
            DataError: no such model, one of another format, or a damaged one.
        """
        settings_path, table_path = folder / SETTINGS_FILE, folder / TABLE_FILE
        if not settings_path.is_file() or not table_path.is_file():
            raise DataError(f"{folder}: no n-gram model here; expected {SETTINGS_FILE} and {TABLE_FILE}")
        content = settings_path.read_bytes()
        plain = parse_json(content, settings_path, "train it again")
        if (found := plain.get("format") if isinstance(plain, dict) else None) != FORMAT:
            raise DataError(f"{settings_path}: format {found!r:.40}, expected {FORMAT}; train it again")
        try:
            settings = TypeAdapter(NgramSettings).validate_json(content)
        except ValidationError as error:
            raise DataError(f"{settings_path}: damaged: {explain(error)}; train it again") from error
        table = load_array(table_path, "train it again", mapped=True)
        if table.dtype != np.uint64 or table.ndim != 2 or table.shape[1] != 2 or len(table).bit_count() != 1:
            raise DataError(
                f"{table_path}: damaged: shape {table.shape} of {table.dtype}, expected (a power of two, 2) of uint64; "
                "train it again"
            )
        return cls(np.asarray(table), settings)


def train_ngram(
    samples: Iterable[Texts], *, order: int = 5, min_word_count: int = 2, prune: Sequence[int] = (0, 1)
) -> NgramModel:
    """Train a model.

    Args:
        samples: texts in batches. Memory: about 30 bytes a byte of text.
        order: longest n-gram, 2 to 5.
        min_word_count: rarer words count as one unknown word.
        prune: from order 2 on, n-grams with at most this many occurrences are dropped; the last holds for all above.

    Raises:
        DataError: the samples have no word.
    """
    from megalite.corpus.scoring.kneser_ney import estimate
    from megalite.corpus.scoring.words import hash_batches

    streams = [stream.copy() for texts in samples for stream, _ in hash_batches(texts)]
    stream = np.concatenate(streams) if streams else np.zeros(0, np.uint64)
    if stream.size == 0:
        raise DataError("the samples for the n-gram model have no word in them; is text_field right for their files?")
    estimates = estimate(stream, order=order, min_word_count=min_word_count, prune=prune)
    settings = NgramSettings(
        order=order,
        min_word_count=min_word_count,
        prune=tuple(prune),
        num_sample_words=int(stream.size),
        num_ngrams=tuple(each.left.size for each in estimates.orders),
        discounts=estimates.discounts,
        fallback_orders=estimates.fallbacks,
    )
    return NgramModel(_build_table(estimates), settings)


def _build_table(estimates: Estimates) -> np.ndarray:
    """uint64 [slots, 2]"""
    from megalite.corpus.scoring.kneser_ney import UNKNOWN_ID
    from megalite.corpus.scoring.ngram_kernel import MAX_SLOTS, insert, pair_keys

    num_entries = sum(each.left.size for each in estimates.orders)
    num_slots = 1
    while num_slots * MAX_LOAD < num_entries:
        num_slots *= 2
    if num_slots > MAX_SLOTS:
        raise DataError(
            f"an n-gram model of {num_entries:,} n-grams is larger than the {int(MAX_SLOTS * MAX_LOAD):,} it can hold; "
            "train it on less text, prune more or lower the order"
        )
    table = np.zeros((num_slots, 2), np.uint64)
    slots: list[np.ndarray] = []
    last = np.arange(estimates.words.size)  # last word of each n-gram
    share = np.log(max(1, estimates.num_rare_words))
    for each in estimates.orders:
        with np.errstate(divide="ignore"):  # the start of a line has probability 0
            values = np.log(np.stack([each.probability, each.backoff], axis=1)).astype(np.float32)
        last = last[each.suffix] if slots else last
        values[last == UNKNOWN_ID, 0] -= share
        keys = pair_keys(slots[-1][each.suffix], slots[0][each.left]) if slots else estimates.words
        slots.append(insert(table, keys, values))
    return table
