"""What software does beside what a layout says, and which layouts it has: megalite, and that of other people's runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Practice:
    """The defaults are ours."""

    fused_attention: bool = True
    """Scores are never written (FlashAttention), nor kept."""
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
    logit_bytes: float = 12.0
    """Of a logit, read and written in all passes of the loss; ours is two kernels, or as one."""
    cast_bytes: float = 0.0
    """Read and written to turn a number into FP8 for a product, in passes of their own: 0 where they are part of the
    passes before."""
    visible_messages: float = 1.0
    """Of messages between ranks of a micro-batch, the share that products do not hide; ours hide none."""
    waits_for_stages: bool = False
    """A stage stands still while it is sent a stream and sends one, of which ranks of tp without sequence parallelism
    send a part each and gather the whole; ours waits for what it needs alone, and sends behind its passes."""
    axes: frozenset[str] = frozenset({"tp", "cp", "ep", "pp", "dp"})
    """That it has."""
    divides_sequences: bool = True
    """It has sequence parallelism."""
    divides_state: bool = True
    """The optimizer's, over dp (ZeRO 1)."""
    divides_weights: bool | None = None
    """Over dp: always, or never; None for both."""
    schedules: frozenset[str] = frozenset({"1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"})
    """Of its pipelines."""
    least_stages_of_chunks: int = 2
    """Of a pipeline whose stages have several chunks in turns."""
    recomputes: frozenset[str] = frozenset({"none", "selective", "full"})
    """Ways to make activations again."""
    makes_some_again: bool = True
    """Some blocks may be made again whole, and of the others nothing."""
    offloads: bool = True
    """Inputs of blocks may wait in the host's memory."""


OURS = Practice()
