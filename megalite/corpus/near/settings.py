"""Settings of near-duplicate removal, and how the bands follow from the threshold."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megalite.config.schema import Section
from megalite.corpus.near.curve import collision_probability, draw_s_curve, removal_probability

MIN_RECALL = 0.99
"""Recall that derived bands reach at `recall_point`."""

Verify = Literal["signature", "jaccard", "none"]

Keep = Literal["first", "longest", "best"]


class Banding(NamedTuple):
    """How a signature is cut: `bands` runs of `rows` values each."""

    bands: int
    rows: int


class NearDedupConfig(Section):
    """When two documents count as near-duplicates, and which one stays."""

    threshold: float = Field(0.7, gt=0.0, le=1.0)
    """Jaccard similarity of the sets of word n-grams from which on two documents are near-duplicates. 0.7 with 5 words
    allows for one changed word in 28; 0.8 finds fewer and surer ones."""
    ngram: PositiveInt = Field(5, le=64)
    """Words in a shingle. A word is a run of letters and digits. Fewer words forgive more edits, and bring together
    texts that only share phrases."""
    num_hashes: PositiveInt = Field(256, le=4096)
    """Values in a signature. The similarity s is estimated with a standard error of sqrt(s (1 - s) / num_hashes): .029
    at s = .7. Disk space is 4 bytes a document for each."""
    bands: PositiveInt | None = None
    """Bands that a signature is cut into; two documents are compared when they agree in one. null derives bands and
    rows from the threshold; set both or neither."""
    rows: PositiveInt | None = None
    """Values in a band."""
    verify: Verify = "signature"
    """What a pair that agrees in a band must pass. `signature`: the estimate reaches the threshold. `jaccard`: the true
    similarity does; it is exact, takes twice the time, and half of the text's size on disk. `none`: nothing, as most
    tools do it; about a third of what it removes is less similar than the threshold."""
    keep: Keep = "first"
    """Who stays of a cluster: the first document, the longest in bytes, or the one with the best score. The earlier one
    wins a tie."""
    score_field: str = "score"
    """With keep=best: the field of the documents' metadata that holds the score (`keep_fields` of a source brings it,
    `classifier` and `perplexity` add theirs). The highest is best; with a minus in front, as in -perplexity, the
    lowest. A document without it is worse than all others."""
    seed: NonNegativeInt = Field(0, lt=2**63)
    """Seed of the hash functions. Signatures can be compared only under one seed."""

    @model_validator(mode="after")
    def _bands_fit(self) -> NearDedupConfig:
        if (self.bands is None) != (self.rows is None):
            raise ValueError(f"bands={self.bands}, rows={self.rows}; set both, or leave out both to derive them")
        if self.bands is None or self.rows is None:
            derive_banding(self.threshold, self.num_hashes)
        elif self.bands * self.rows > self.num_hashes:
            raise ValueError(
                f"bands={self.bands} x rows={self.rows} is {self.bands * self.rows} values, more than "
                f"num_hashes={self.num_hashes}; raise num_hashes or use fewer bands"
            )
        return self

    @property
    def banding(self) -> Banding:
        """The bands in use, given or derived."""
        if self.bands is None or self.rows is None:
            return derive_banding(self.threshold, self.num_hashes)
        return Banding(self.bands, self.rows)

    def removal_probability(self, similarity: float) -> float:
        """How likely a pair of documents of this similarity is to meet in a band and to pass the check."""
        bands, rows = self.banding
        if self.verify == "signature":
            return removal_probability(similarity, bands, rows, num_hashes=self.num_hashes, threshold=self.threshold)
        if self.verify == "jaccard" and similarity < self.threshold:
            return 0.0
        return collision_probability(similarity, bands, rows)

    def draw(self) -> str:
        """The S-curve of these settings as a table for a terminal."""
        return draw_s_curve(*self.banding, self.removal_probability)


def recall_point(threshold: float) -> float:
    """The similarity at which recall is promised: .1 above the threshold, or a third of the way to 1 where that is
    less. Between the threshold and it recall rises along the S-curve."""
    return threshold + min(0.1, (1.0 - threshold) / 3)


def derive_banding(threshold: float, num_hashes: int) -> Banding:
    """The steepest curve that still has the recall.

    Of all row counts r with floor(num_hashes / r) bands, it takes the largest for which

        1 - (1 - s^r)^bands >= .99        at s = recall_point(threshold)

    For a threshold of .7 and 256 values: 8 rows and 32 bands give .997 at s = .8, while 9 rows and 28 bands give .982.

    Raises:
        ValueError: not even one row reaches it.
    """
    similarity = recall_point(threshold)
    for rows in range(num_hashes, 0, -1):
        bands = num_hashes // rows
        if collision_probability(similarity, bands, rows) >= MIN_RECALL:
            return Banding(bands, rows)
    raise ValueError(
        f"num_hashes={num_hashes} cannot find {MIN_RECALL:.0%} of the pairs of similarity {similarity:.2f} with "
        f"threshold={threshold}; raise num_hashes"
    )
