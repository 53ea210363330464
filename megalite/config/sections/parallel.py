"""The section `parallel`: how the ranks share the work."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megalite.architecture.settings import MOST_LAYERS
from megalite.section import Section

MOST_RANKS = 100_000


class ParallelConfig(Section):
    """How the ranks share the work: world size = pp x dp x cp x tp."""

    tp: PositiveInt = Field(1, le=MOST_RANKS)
    """Tensor-parallel ranks: each matrix is cut into this many. Keep within a node."""
    pp: PositiveInt = Field(1, le=MOST_LAYERS)
    """Pipeline stages: the list of layers is cut into this many."""
    engine: Literal["native", "deepspeed", "fsdp2"] | None = None
    """Who does the training steps: `native`, our own (ZeRO 0 and 1, and all pipelines), `deepspeed` (ZeRO 0 to 3,
    without a pipeline), or `fsdp2`, torch's (ZeRO 3, compiled, with experts over ranks). null takes native where it can
    be, fsdp2 for ZeRO 3, and DeepSpeed for ZeRO 2 and what FSDP2 does not know: FP8, masters in bf16, noise_scale."""
    schedule: str = "1f1b"
    """Order of a pipeline's passes: `1f1b`, `interleaved`, `zb-h1`, `zb-v`, `dualpipe-v` (docs/train.md says how to
    choose), or a file of one's own, NAME.csv."""
    chunks: PositiveInt | None = Field(None, le=MOST_LAYERS)
    """Chunks of layers that each pipeline stage holds; null is 1, and 2 for interleaved, zb-v and dualpipe-v."""
    blocks_per_chunk: tuple[NonNegativeInt, ...] | None = None
    """Transformer blocks of each chunk, from the first layers to the last; null balances them."""
    blocks_per_stage: tuple[NonNegativeInt, ...] | None = None
    """Transformer blocks of each stage, as in [9, 9, 8, 6]; null balances the stages, counting the head that the last
    one has too."""
    dp: PositiveInt | None = Field(None, le=MOST_RANKS)
    """Data-parallel ranks; null derives it from the world size, which is pp x cp x tp when `megalite train` starts
    the ranks itself."""
    cp: PositiveInt = Field(1, le=MOST_RANKS)
    """Context-parallel ranks: the tokens of each micro-batch are cut over them, for sequences whose activations do not
    fit on one. They count as replicas: ZeRO cuts over dp x cp."""
    cp_kind: Literal["allgather", "ulysses", "ring"] = "allgather"
    """How a context-parallel rank sees the tokens that it has not: `allgather` gathers keys and values, with a cut that
    gives all ranks as much attention to do; `ulysses` exchanges tokens for heads; `ring` has keys and values go round,
    so that no rank has all of them at once."""
    ep: PositiveInt = Field(1, le=MOST_RANKS)
    """Expert-parallel ranks: of the dp x cp replicas so many divide the experts of each block among them, and tokens
    travel to theirs. Gradients of experts are summed, and ZeRO cuts their states, over the dp x cp / ep that have the
    same."""
    sequence_parallel: bool = False
    """Between the tensor-parallel parts, cut the stream of tokens over tp too (Korthikanti et al. 2022): less memory,
    the same traffic."""
    async_tp: bool = False
    """With sequence_parallel, on GPUs of one node: products of tensor-parallel layers send and get their rows through
    memory that the GPUs share, piece by piece beside the multiplication (torch's async tensor parallelism). false sends
    them by collectives beside the products. It has not run on a GPU yet."""
    pad_tokens: bool = False
    """Where sequence_parallel, cp or FP8 do not divide the tokens of a micro-batch, work on some more, which are of no
    sample and count in nothing; false refuses such lengths."""
    dp_replicate: PositiveInt = Field(1, le=MOST_RANKS)
    """FSDP2: so many groups of replicas, each of which divides the weights among its ranks and updates all of them
    (hybrid sharding): weights are gathered within a group, a node perhaps, and gradients summed over all."""
    hpz_size: PositiveInt | None = Field(None, le=MOST_RANKS)
    """FSDP2: so many neighbouring replicas, those of a node perhaps, keep a block's weights among them between its
    forward and its backward pass (ZeRO++'s hpZ): the second gathering does not leave the node. Takes the bytes of the
    weights in dtype, divided by this many. null divides over all replicas again, and gathers from all of them."""
    reduce_within: PositiveInt | None = Field(None, le=MOST_RANKS)
    """precision.reduce_bits: so many neighbouring replicas, those of a node perhaps, add up their gradients first, and
    the sums go on between nodes, rounded once more: so many times fewer bytes leave a node. null sends every gradient
    to its owner at once."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO: what is cut over dp x cp. 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
