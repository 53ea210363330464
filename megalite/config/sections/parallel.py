"""The section `parallel`: how the ranks share the work."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megalite.section import Section


class ParallelConfig(Section):
    """How the ranks share the work: world size = pp x dp x cp x tp."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks: each matrix is cut into this many. Keep within a node."""
    pp: PositiveInt = 1
    """Pipeline stages: the list of layers is cut into this many."""
    engine: Literal["native", "deepspeed"] | None = None
    """Who does the training steps: `native`, our own (ZeRO 0 and 1, and all pipelines), or DeepSpeed (ZeRO 0 to 3,
    without a pipeline). null takes native where it can be, else DeepSpeed."""
    schedule: str = "1f1b"
    """Order of a pipeline's passes: `1f1b`, `interleaved`, `zb-h1`, `zb-v`, `dualpipe-v` (docs/train.md says how to
    choose), or a file of one's own, NAME.csv."""
    chunks: PositiveInt | None = None
    """Chunks of layers that each pipeline stage holds; null is 1, and 2 for interleaved, zb-v and dualpipe-v."""
    blocks_per_chunk: tuple[NonNegativeInt, ...] | None = None
    """Transformer blocks of each chunk, from the first layers to the last; null balances them."""
    blocks_per_stage: tuple[NonNegativeInt, ...] | None = None
    """Transformer blocks of each stage, as in [9, 9, 8, 6]; null balances the stages, counting the head that the last
    one has too."""
    dp: PositiveInt | None = None
    """Data-parallel ranks; null derives it from the world size, which is pp x tp when `megalite train` starts the
    ranks itself."""
    cp: PositiveInt = 1
    """Context-parallel ranks. Only 1 is built so far; anything else is refused."""
    sequence_parallel: bool = False
    """Between the tensor-parallel parts, cut the stream of tokens over tp too (Korthikanti et al. 2022): less memory,
    the same traffic."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO: what is cut over dp. 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
