"""What other tools read out of a station's manifest, and of which type it is.

A manifest holds all settings and counts of its station, some dozens. Those that somebody relies on are declared here,
and `manifest.find_manifest` refuses a file in which one of them is missing or is something else; the rest is for
people.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megalite.records import OpenRecord, Record

Counts = dict[str, NonNegativeInt]
"""Numbers by name."""


class TokenizerFacts(Record):
    """The tokenizer that a station used."""

    fingerprint: str
    vocab_size: PositiveInt


class SplitFacts(Record):
    """The side of the hold-out that a station took."""

    part: Literal["all", "train", "valid"]
    valid_fraction: float
    seed: int


class DocumentCounts(OpenRecord):
    """Of stations that leave documents."""

    documents: NonNegativeInt
    documents_in: NonNegativeInt
    text_bytes: NonNegativeInt
    text_bytes_in: NonNegativeInt | None = None
    rejected: Counts = Field(default_factory=dict)
    removed: Counts = Field(default_factory=dict)
    redacted: Counts = Field(default_factory=dict)
    languages: Counts = Field(default_factory=dict)
    licenses: Counts = Field(default_factory=dict)


class ClusterCounts(DocumentCounts):
    """Of stations that keep one document of several that are alike."""

    clusters: NonNegativeInt = 0
    largest_cluster: NonNegativeInt = 0
    cluster_sizes: dict[Annotated[str, Field(pattern=r"^[0-9]+(-[0-9]+)?$")], NonNegativeInt] = Field(
        default_factory=dict
    )
    examples: list[list[str]] = Field(default_factory=list)


class TokenizeSettings(OpenRecord):
    """Of `tokenize`."""

    tokenizer: TokenizerFacts
    tokenizer_input: NonNegativeInt
    split: SplitFacts | None = None


class TokenizeCounts(OpenRecord):
    """Of `tokenize`."""

    documents: NonNegativeInt
    tokens: NonNegativeInt
    text_bytes: NonNegativeInt
    rejected: Counts = Field(default_factory=dict)
    conversations: NonNegativeInt = 0
    pairs: NonNegativeInt = 0
    """Chosen and rejected answers, a document each."""
    tokens_learnt: NonNegativeInt | None = None
    """Those with a loss weight above 0, where tokens have any."""


class PackSettings(OpenRecord):
    """Of `pack`."""

    seq_len: PositiveInt
    method: Literal["concat", "best_fit"]


class PackCounts(OpenRecord):
    """Of `pack`."""

    samples: NonNegativeInt
    tokens: NonNegativeInt
    tokens_with_repeats: NonNegativeInt | None = None
    """Where long documents come more than once."""
    documents: NonNegativeInt
    documents_split: NonNegativeInt
    documents_longer_than_seq_len: NonNegativeInt
    padding_percent: float
    cuts_in_learnt: NonNegativeInt | None = None
    """Borders put inside what is learnt, where tokens have loss weights."""
    pairs: NonNegativeInt = 0
    report: dict[str, int | float | Counts] = Field(default_factory=dict)


class TrainTokenizerCounts(OpenRecord):
    """Of `train-tokenizer`."""

    documents: NonNegativeInt
    text_bytes: NonNegativeInt


class ModelFacts(OpenRecord):
    """The model, or the tokenizer, that made embeddings."""

    fingerprint: str


class EmbedSettings(OpenRecord):
    """Of `embed`."""

    model: ModelFacts
    tokenizer: ModelFacts


class EmbedCounts(OpenRecord):
    """Of `embed`."""

    documents: NonNegativeInt
    tokens: NonNegativeInt
    text_bytes: NonNegativeInt
    truncated: NonNegativeInt


class Facts(OpenRecord):
    """Of a station that nobody reads anything from."""

    settings: Any
    counts: Any


class DocumentFacts(Facts):
    """Of stations that leave documents."""

    counts: DocumentCounts


class ClusterFacts(Facts):
    """Of stations that keep one document of several that are alike."""

    counts: ClusterCounts


class TokenizeFacts(Facts):
    """Of `tokenize`."""

    settings: TokenizeSettings
    counts: TokenizeCounts


class PackFacts(Facts):
    """Of `pack`."""

    settings: PackSettings
    counts: PackCounts


class EmbedFacts(Facts):
    """Of `embed`."""

    settings: EmbedSettings
    counts: EmbedCounts


class TrainTokenizerFacts(Facts):
    """Of `train-tokenizer`."""

    counts: TrainTokenizerCounts


DOCUMENT_STATIONS = (
    "clean",
    "url-dedup",
    "dedup",
    "near-dedup",
    "line-dedup",
    "substring-dedup",
    "decontaminate",
    "harmful",
    "perplexity",
    "classifier",
    "semantic-dedup",
)
"""Stations that leave documents behind."""

FACTS: dict[str, type[Facts]] = {
    **dict.fromkeys(DOCUMENT_STATIONS, DocumentFacts),
    "dedup": ClusterFacts,
    "near-dedup": ClusterFacts,
    "semantic-dedup": ClusterFacts,
    "embed": EmbedFacts,
    "tokenize": TokenizeFacts,
    "pack": PackFacts,
    "train-tokenizer": TrainTokenizerFacts,
    "chat-tokenizer": Facts,
}
"""By station."""

LEAST_INPUTS = {
    **dict.fromkeys(DOCUMENT_STATIONS, 1),
    "clean": 0,
    "tokenize": 1,
    "pack": 1,
    "train-tokenizer": 0,
    "chat-tokenizer": 1,
    "embed": 1,
}
"""Inputs that a station has at least, as far as others follow them."""
