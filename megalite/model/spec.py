"""What a stage is built from."""

from __future__ import annotations

from dataclasses import dataclass, field

from megalite.architecture.architecture import Architecture
from megalite.layers.parts import Parts
from megalite.parallel.axes import SINGLE, Axis


@dataclass(frozen=True)
class ChunkSpec:
    """A run of the model's list of layers."""

    blocks: tuple[int, int]
    """Half-open range of blocks."""
    is_first: bool
    """It begins with the embedding."""
    is_last: bool
    """It ends with the final norm and the head."""


@dataclass(frozen=True)
class StageSpec:
    """Everything a stage is built from."""

    model: Architecture
    """Filled by `config.fill`."""
    chunks: tuple[ChunkSpec, ...] = ()
    """The runs of layers that the stage holds, in the model's order; none is the whole model in one."""
    tp: Axis = SINGLE
    sharers: Axis = SINGLE
    """The ranks of tp that share a key and value head; see `axes.connect_sharers`."""
    cp: Axis = SINGLE
    """The ranks that share the tokens of a micro-batch."""
    ep: Axis = SINGLE
    """The ranks that have other experts."""
    sequence_parallel: bool = False
    async_tp: bool = False
    """Tensor-parallel products send through memory that the ranks' GPUs share (`layers.overlapped`)."""
    recompute: str | tuple[str, ...] = "none"
    """What blocks make again in the backward pass, all of them or each of the model's, those that predict further
    behind."""
    offload: bool = False
    """What full recomputation keeps goes to the host's memory."""
    parts: Parts = field(default_factory=Parts)
    seed: int = 0
    """Seeds dropout, and the initial weights where no other source of them is given."""

    def __post_init__(self) -> None:
        if not self.chunks:
            object.__setattr__(self, "chunks", (ChunkSpec((0, self.model.num_layers), is_first=True, is_last=True),))

    def recompute_of(self, index: int) -> str:
        """What a block of the model makes again."""
        return self.recompute if isinstance(self.recompute, str) else self.recompute[index]

    @property
    def has_embedding(self) -> bool:
        return any(chunk.is_first for chunk in self.chunks)

    @property
    def has_head(self) -> bool:
        return any(chunk.is_last for chunk in self.chunks)

    @property
    def looks_up(self) -> bool:
        """Whether tokens become vectors here: the model's input, or what further predictions are given."""
        return self.has_embedding or (self.has_head and self.model.mtp is not None)
