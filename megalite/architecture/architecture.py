"""A model with nothing left to be filled in, and the list of its blocks: one description each.

ModelConfig  --config.fill-->  Architecture  -->  blocks: (BlockSpec, BlockSpec, ...)
                                                    attention     heads, window, rotation, biases
                                                    feed_forward  width, activation, biases
                                                    norms         which, and where
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from pydantic import PositiveInt

from megalite.architecture.activations import is_gated
from megalite.architecture.settings import ModelSettings, RopeConfig


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention of one block."""

    kind: str
    """Of `architecture.attentions`."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """Tokens that a query sees, itself included; None for its whole document."""
    rope: RopeConfig | None
    """How queries and keys are rotated; None for not at all."""
    has_own_rope: bool
    """`rope` is that of the blocks with a window, not of the others."""
    qk_norm: bool | Literal["whole"]
    """RMSNorm over each query and key head, or over all of them."""
    qkv_bias: bool
    output_bias: bool
    query_scale: float
    """Factor on the queries, whose products attention divides by sqrt(head_dim)."""
    soft_cap: float | None

    @property
    def q_width(self) -> int:
        """Channels of all queries, and of what attention hands to its output projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all keys, or of all values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class FeedForwardSpec:
    """The feed-forward layer of one block."""

    width: int
    """Between its two products."""
    activation: str
    bias: bool

    @property
    def is_gated(self) -> bool:
        """Whether the first product has a gate beside it."""
        return is_gated(self.activation)

    @property
    def num_expanding(self) -> int:
        """Matrices that lead in: with a gate two."""
        return 2 if self.is_gated else 1


@dataclass(frozen=True)
class BlockSpec:
    """One block of the list."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norm: str
    norm_eps: float
    norm_before: bool
    """What goes into attention and MLP is normalised."""
    norm_after: bool
    """What comes out of them is."""
    is_parallel: bool
    """Both read the same stream."""


class Architecture(ModelSettings):
    """A model as it is built; `config.fill` makes it of a section `model`."""

    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    ffn_hidden_size: PositiveInt
    vocab_size: PositiveInt
    """True size; padding for tp is derived."""
    max_positions: PositiveInt

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """The blocks, first to last."""
        made = {has_window: self._block(has_window) for has_window in (False, True)}
        return tuple(made[has_window] for has_window in self._windows())

    def _windows(self) -> list[bool]:
        """For each block whether the window holds there."""
        if self.sliding_window is None:
            return [False] * self.num_layers
        types = self.layer_types or ("sliding_attention",)
        return [types[index % len(types)] == "sliding_attention" for index in range(self.num_layers)]

    def _block(self, has_window: bool) -> BlockSpec:
        has_own_rope = has_window and self.sliding_rope is not None
        attention = AttentionSpec(
            self.attention,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            window=self.sliding_window if has_window else None,
            rope=None if self.positions != "rope" else self.sliding_rope if has_own_rope else self.rope,
            has_own_rope=has_own_rope,
            qk_norm=self.qk_norm,
            qkv_bias=self.has_qkv_bias,
            output_bias=self.has_output_bias,
            query_scale=query_scale(self),
            soft_cap=self.attention_soft_cap,
        )
        return BlockSpec(
            attention,
            FeedForwardSpec(self.ffn_hidden_size, self.activation, self.has_mlp_bias),
            norm=self.norm,
            norm_eps=self.norm_eps,
            norm_before=self.norm_placement in ("before", "both"),
            norm_after=self.norm_placement in ("after", "both"),
            is_parallel=self.parallel_residual,
        )


def query_scale(model: Architecture) -> float:
    """Factor on the queries, of `attention_scale` and of muP (`architecture.mup`)."""
    scale = 1.0 if model.attention_scale is None else model.attention_scale * sqrt(model.head_dim)
    base = None if model.mup is None else model.mup.base_head_dim
    return scale if base is None else scale * sqrt(base / model.head_dim)
