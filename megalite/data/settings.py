"""What a recipe may say of packing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from megalite.section import Section

PackMethod = Literal["concat", "best_fit"]


class RepeatConfig(Section):
    """How often documents come that are long enough."""

    from_tokens: int = Field(ge=1, lt=2**62)
    """Of documents with so many tokens or more, up to where another one of `repeats` begins."""
    times: float = Field(ge=1.0, le=100.0)
    """Times in an epoch; with 5.5, half of them come five times and the others six."""


class PackConfig(Section):
    """How documents become sequences."""

    seq_len: PositiveInt = 2048
    """Tokens in a sequence; batch.seq_len of the training must be equal."""
    method: PackMethod = "best_fit"
    """`best_fit` keeps every document whole that fits in a sequence, with a little padding; `concat` cuts the stream
    of documents every seq_len tokens, with none."""
    window_documents: PositiveInt | None = None
    """Documents that `best_fit` looks at together; null for all, which takes 60 bytes a document and pads least. 10,000
    pad half as much again."""
    repeats: tuple[RepeatConfig, ...] = ()
    """Long documents that come more than once in an epoch, for models that are to read further (Fu et al. 2024): the
    mixture of sources stays, and more of each is long. Of training data only, and with `best_fit`."""

    @model_validator(mode="after")
    def _repeats_fit(self) -> PackConfig:
        if self.repeats and self.method != "best_fit":
            raise ValueError("repeats: concat cuts the stream as it is; use method=best_fit")
        if len({each.from_tokens for each in self.repeats}) < len(self.repeats):
            raise ValueError("repeats: two begin at the same number of tokens; leave one of them out")
        return self
