"""What software does beside what a layout says: of megalite, and of other people's runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Practice:
    """The defaults are ours."""

    fused_attention: bool = True
    """Scores are never written (FlashAttention)."""
    skips_hidden: bool = True
    """Scores of later tokens are never made."""
    hides_reductions: bool = True
    """Gradients travel behind the backward pass."""
    redoes_attention: bool = False
    """Selective recomputation makes the inside of attention again (Korthikanti et al. 2022); ours keeps its result and
    makes norms and activations again."""
    copied_bytes: float | None = None
    """Read and written of a divided weight in a micro-batch, beside messages; None for what FSDP2 does, and
    DeepSpeed much alike."""
    visible_messages: float = 1.0
    """Of messages between ranks of a micro-batch, the share that products do not hide; ours hide none."""


OURS = Practice()
