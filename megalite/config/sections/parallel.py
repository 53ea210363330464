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
