"""Settings of the scores: which model, and which documents stay."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from megalite.config.schema import Section


class PerplexityConfig(Section):
    """Keep the documents that an n-gram model finds least surprising."""

    model: Path | None = None
    """Folder of a model that was trained before; null trains one on `train_on`."""
    train_on: tuple[Path, ...] = ()
    """Files or folders with texts of the kind that is wanted, such as an encyclopedia."""
    train_mb: PositiveFloat = 100.0
    """Train on at most this many million bytes of text; training takes about 30 bytes of memory for each."""
    order: int = Field(5, ge=2, le=5)
    """Words in the longest n-gram. 3 makes a model that is smaller and faster, and knows less of idiom."""
    min_word_count: int = Field(2, ge=1)
    """Words of the sample that occur less often count as one unknown word."""
    prune: tuple[NonNegativeInt, ...] = (0, 1)
    """From pairs of words on, drop n-grams that occur at most this often; the last number holds for all longer ones.
    Growing. The default drops sequences of three words and more that were seen once, most of the model."""
    max_perplexity: PositiveFloat | None = None
    """Keep documents up to this perplexity per word. It means nothing without its model: look at scores first."""
    keep_fraction: float | None = Field(None, gt=0.0, le=1.0)
    """Keep this share of the documents, those with the lowest perplexity."""

    @property
    def samples(self) -> tuple[tuple[Path, ...], ...]:
        """What the model is trained on."""
        return (self.train_on,)

    @model_validator(mode="after")
    def _fits_together(self) -> PerplexityConfig:
        _require_one("model", self.model, "train_on", self.train_on or None)
        _require_one("max_perplexity", self.max_perplexity, "keep_fraction", self.keep_fraction)
        if list(self.prune) != sorted(self.prune):
            raise ValueError(f"prune={list(self.prune)} must not fall: a longer n-gram needs the shorter ones in it")
        return self


class ClassifierConfig(Section):
    """Keep the documents that look more like a good sample than like a bad one."""

    model: Path | None = None
    """File (.npz) of a classifier that was trained before; null trains one on `good` and `bad`."""
    good: tuple[Path, ...] = ()
    """Files or folders with documents as they should be."""
    bad: tuple[Path, ...] = ()
    """Files or folders with documents as they should not be; a random part of the corpus itself is usual."""
    train_mb: PositiveFloat = 100.0
    """Train on at most this many million bytes of each sample."""
    hash_bits: int = Field(20, ge=10, le=28)
    """2^hash_bits weights of 4 bytes each. 20 makes 4 MB, which a processor's cache holds; with more, fewer words share
    a weight."""
    l2: PositiveFloat = 1e-7
    """Pull of the weights towards 0. Raise it tenfold when the bad sample holds many good documents, as a part of the
    corpus does, and the log loss on held-out documents is poor."""
    min_score: float | None = Field(None, ge=0.0, le=1.0)
    """Keep documents whose probability of being good, at even odds, is at least this."""
    keep_fraction: float | None = Field(None, gt=0.0, le=1.0)
    """Keep this share of the documents, those with the highest score."""
    pareto_alpha: PositiveFloat | None = None
    """Keep a document when a random number from a Pareto distribution of this shape exceeds 1 - score, as GPT-3 did
    with 9: mostly high scores, and some of everything. The number depends on the text and `seed` alone."""
    seed: NonNegativeInt = 0
    """Seed of those random numbers."""

    @property
    def samples(self) -> tuple[tuple[Path, ...], ...]:
        """What the model is trained on; what it is to score high comes first."""
        return self.good, self.bad

    @model_validator(mode="after")
    def _fits_together(self) -> ClassifierConfig:
        if bool(self.good) != bool(self.bad):
            raise ValueError("good and bad belong together; give both samples")
        _require_one("model", self.model, "good and bad", self.good or None)
        choices = {name: getattr(self, name) for name in ("min_score", "keep_fraction", "pareto_alpha")}
        if sum(value is not None for value in choices.values()) != 1:
            raise ValueError(f"set exactly one of {', '.join(choices)}")
        return self


class HarmfulConfig(Section):
    """Put documents aside that look more like a harmful sample than like a harmless one.

    No labels and no model come with megalite: what is harmful is yours to say, by documents of both kinds, from the
    corpus that is to be filtered or one like it.
    """

    model: Path | None = None
    """File (.npz) of a classifier that was trained before; null trains one on `harmful` and `harmless`."""
    harmful: tuple[Path, ...] = ()
    """Files or folders with documents that must not stay."""
    harmless: tuple[Path, ...] = ()
    """Files or folders with documents that may stay; among them such as speak of the same things without harm, or the
    classifier learns to put the subject aside."""
    train_mb: PositiveFloat = 100.0
    """Train on at most this many million bytes of each sample."""
    hash_bits: int = Field(20, ge=10, le=28)
    """2^hash_bits weights of 4 bytes each."""
    l2: PositiveFloat = 1e-7
    """Pull of the weights towards 0."""
    max_score: float = Field(0.5, ge=0.0, lt=1.0)
    """Keep documents whose probability of being harmful, at even odds, is at most this. Lower it to miss fewer, and put
    more aside in vain: look at the scores of a sample first."""

    @property
    def samples(self) -> tuple[tuple[Path, ...], ...]:
        """What the model is trained on; what it is to score high comes first."""
        return self.harmful, self.harmless

    @model_validator(mode="after")
    def _fits_together(self) -> HarmfulConfig:
        if bool(self.harmful) != bool(self.harmless):
            raise ValueError("harmful and harmless belong together; give both samples")
        _require_one("model", self.model, "harmful and harmless", self.harmful or None)
        return self


def _require_one(first: str, first_value: object, second: str, second_value: object) -> None:
    if (first_value is None) == (second_value is None):
        found = "neither" if first_value is None else "both"
        raise ValueError(f"set either {first} or {second}; found {found}")
