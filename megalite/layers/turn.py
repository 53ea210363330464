"""The rotation of a block's queries and keys."""

from __future__ import annotations

from torch import Tensor

from megalite.architecture.architecture import AttentionSpec
from megalite.layers.documents import Documents
from megalite.layers.rope import rotate


class Turn:
    """Rotates heads as a block's description says; leaves them alone where positions are none of its business."""

    def __init__(self, spec: AttentionSpec):
        self.rope, self._is_own = spec.rope, spec.has_own_rope

    def __call__(self, heads: Tensor, documents: Documents) -> Tensor:
        """`[t, any, d]` -> the same shape, t being all tokens of `documents`."""
        if self.rope is None:
            return heads
        turn = documents.sliding_rotation if self._is_own else documents.rotation
        assert turn is not None, "the stage turns the stream once a pass"
        return rotate(heads, turn, interleaved=self.rope.interleaved)
