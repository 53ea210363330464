"""What a recipe may say of packing."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from megalite.section import Section

PackMethod = Literal["concat", "best_fit"]


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
