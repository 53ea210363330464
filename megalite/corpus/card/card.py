"""What a card says, as plain data: `card.json` is exactly this.

No times and no absolute paths, so the card of equal data is equal byte for byte.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from megalite.corpus.card.measure import Lengths

FORMAT = 1
"""Version of card.json."""


@dataclass(frozen=True)
class Amount:
    """Documents, and bytes of their text where they are known."""

    documents: int
    text_bytes: int | None = None


@dataclass(frozen=True)
class SourceCard:
    """Where documents come from."""

    name: str
    description: str | None
    license: str | None
    url: str | None
    read: int
    """Documents that were read."""
    kept: Amount
    """What is left of them in the end."""


@dataclass(frozen=True)
class Clusters:
    """Groups of documents that are the same, or nearly."""

    clusters: int
    largest: int
    sizes: dict[str, int]
    """Clusters by number of documents; empty where it was not counted."""
    examples: tuple[tuple[str, ...], ...] = ()
    """Some of them, by the ids of their documents."""


@dataclass(frozen=True)
class StageCard:
    """What came out of one station of documents; the first stage is what was read."""

    name: str
    kept: Amount
    removed: int
    """Documents that went in and did not come out."""
    reasons: dict[str, int]
    """Removed documents by reason, the most frequent first."""
    by_source: dict[str, Amount]
    redacted: dict[str, int]
    """Replaced personal data and secrets, by kind."""
    clusters: Clusters | None
    languages: dict[str, int]
    """Documents by language, where they were counted."""


@dataclass(frozen=True)
class TokenizerCard:
    """The tokenizer of the set."""

    kind: str
    vocab_size: int
    fingerprint: str
    trained_on: Amount | None
    """Documents of this set; None for a tokenizer that was there before."""
    bytes_per_token: float
    """Of the training part, end-of-text tokens counted."""


@dataclass(frozen=True)
class SplitCard:
    """Training or validation data."""

    part: str
    documents: int
    text_bytes: int
    tokens: int
    lengths: Lengths
    """Of its documents, in tokens."""
    method: str
    seq_len: int
    sequences: int
    padding_percent: float
    documents_split: int
    documents_longer_than_seq_len: int
    report: dict[str, Any]
    """Further numbers of the pack station."""
    conversations: int = 0
    """Documents that are conversations."""
    tokens_learnt: int | None = None
    """Tokens with a loss weight above 0, where tokens have weights."""


@dataclass(frozen=True)
class StationCard:
    """How one station was run, to do it again."""

    folder: str
    station: str
    version: str
    format: int
    fingerprint: str
    settings: dict[str, Any]
    inputs: tuple[tuple[str, str], ...]
    """Name and fingerprint of each."""
    num_files: int
    num_bytes: int


@dataclass(frozen=True)
class Card:
    """The card of a prepared set."""

    name: str
    format: int
    sources: tuple[SourceCard, ...]
    """The largest first."""
    stages: tuple[StageCard, ...]
    lengths: Lengths
    """Of the documents that are left, in bytes."""
    tokenizer: TokenizerCard
    splits: tuple[SplitCard, ...]
    stations: tuple[StationCard, ...]

    @property
    def read(self) -> StageCard:
        """What was read."""
        return self.stages[0]

    @property
    def left(self) -> StageCard:
        """What the tokenizer got."""
        return self.stages[-1]

    def dumps(self) -> str:
        """The card as JSON text, the same for the same card."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
