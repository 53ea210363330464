"""A model with nothing left to be filled in, and the list of its blocks: one description each.

ModelConfig  --config.fill-->  Architecture  -->  blocks: (BlockSpec, BlockSpec, ...)
                                                    attention     heads, window, rotation, biases
                                                    feed_forward  width, activation, biases; or experts, and a router
                                                    norms         which, and where
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from pydantic import PositiveInt

from megalite.architecture.activations import is_gated
from megalite.architecture.settings import MlaConfig, ModelSettings, MoeConfig, RopeConfig, WeightScales


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention of one block."""

    kind: str
    """Of `architecture.attentions`."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Channels of a query or key."""
    value_dim: int
    """Channels of a value."""
    latent: MlaConfig | None
    """What keys and values are made of; None for the stream."""
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
    sinks: bool
    """Each head has a score that softmax counts besides."""
    query_scale: float
    """Factor on the queries, whose products attention divides by sqrt(head_dim)."""
    soft_cap: float | None

    @property
    def q_width(self) -> int:
        """Channels of all queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all keys."""
        return self.num_kv_heads * self.head_dim

    @property
    def v_width(self) -> int:
        """Channels of all values."""
        return self.num_kv_heads * self.value_dim

    @property
    def mixed_width(self) -> int:
        """Channels of what attention hands to its output projection."""
        return self.num_heads * self.value_dim


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
class ExpertsSpec:
    """Many feed-forward layers of a block, and the router that sends each token to few of them."""

    settings: MoeConfig
    """`ffn_hidden_size` filled in."""
    expert: FeedForwardSpec
    """Each of them."""
    shared: FeedForwardSpec | None
    """Every token goes through it as well."""

    @property
    def active(self) -> tuple[FeedForwardSpec, ...]:
        """The layers that one token goes through."""
        return (self.expert,) * self.settings.top_k + ((self.shared,) if self.shared is not None else ())


@dataclass(frozen=True)
class BlockSpec:
    """One block of the list."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec | ExpertsSpec
    norm: str
    norm_eps: float
    norm_before: bool
    """What goes into attention and MLP is normalised."""
    norm_after: bool
    """What comes out of them is."""
    norm_sums: bool
    """It is once it has been added to the stream: `norm_after` then, and the stream is what norms put out."""
    is_parallel: bool
    """Both read the same stream."""


BlockKind = tuple[bool, bool]
"""Whether a block's window holds, and whether it is sparse: all that sets the blocks of a model apart."""


class Architecture(ModelSettings):
    """A model as it is built; `config.fill` makes it of a section `model`."""

    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    ffn_hidden_size: PositiveInt
    vocab_size: PositiveInt
    """True size; padding for tp is derived."""
    max_positions: PositiveInt
    weight_scales: WeightScales | None = None
    """Scales that are trained beside weights that are rounded; None for none."""

    @property
    def turned_dim(self) -> int:
        """Channels of a head that rotary positions may turn: `rope.fraction` of them."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """The blocks, first to last."""
        kinds = self.kinds()
        made = {kind: self.block_of(kind) for kind in set(kinds)}
        return tuple(made[kind] for kind in kinds)

    @property
    def num_predictions(self) -> int:
        """Layers of multi-token prediction."""
        return 0 if self.mtp is None else self.mtp.num_layers

    def block(self, index: int) -> BlockSpec:
        """A block, or one of those that predict further ahead, which count on and are like the last."""
        return self.block_of(self.kinds()[min(index, self.num_layers - 1)])

    def kinds(self) -> list[BlockKind]:
        """The kind of each block, first to last. Whoever works something out for every block does it for every kind."""
        return list(zip(self._windows(), self.sparse_blocks, strict=True))

    @property
    def sparse_blocks(self) -> list[bool]:
        """For each block whether it has experts."""
        moe = self.moe
        if moe is None:
            return [False] * self.num_layers
        first, every = moe.first_dense, moe.every
        return [index >= first and (index - first) % every == every - 1 for index in range(self.num_layers)]

    def _windows(self) -> list[bool]:
        """For each block whether the window holds there."""
        if self.sliding_window is None:
            return [False] * self.num_layers
        types = self.layer_types or ("sliding_attention",)
        return [types[index % len(types)] == "sliding_attention" for index in range(self.num_layers)]

    def block_of(self, kind: BlockKind) -> BlockSpec:
        """All blocks of a kind."""
        has_window, is_sparse = kind
        has_own_rope = has_window and self.sliding_rope is not None
        attention = AttentionSpec(
            self.attention,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            value_dim=self.head_dim if self.mla is None else self.mla.v_head_dim,
            latent=self.mla,
            window=self.sliding_window if has_window else None,
            rope=None if self.positions != "rope" else self.sliding_rope if has_own_rope else self.rope,
            has_own_rope=has_own_rope,
            qk_norm=self.qk_norm,
            qkv_bias=self.has_qkv_bias,
            output_bias=self.has_output_bias,
            sinks=self.attention_sinks,
            query_scale=query_scale(self),
            soft_cap=self.attention_soft_cap,
        )
        return BlockSpec(
            attention,
            self._experts() if is_sparse else self._feed_forward(self.ffn_hidden_size),
            norm=self.norm,
            norm_eps=self.norm_eps,
            norm_before=self.norm_placement in ("before", "both"),
            norm_after=self.norm_placement in ("after", "both", "post"),
            norm_sums=self.norm_placement == "post",
            is_parallel=self.parallel_residual,
        )

    def _feed_forward(self, width: int) -> FeedForwardSpec:
        return FeedForwardSpec(width, self.activation, self.has_mlp_bias)

    def _experts(self) -> ExpertsSpec:
        moe = self.moe
        assert moe is not None
        assert moe.ffn_hidden_size is not None, "filled in"
        shared = self._feed_forward(moe.shared_ffn_hidden_size) if moe.shared_ffn_hidden_size else None
        return ExpertsSpec(moe, self._feed_forward(moe.ffn_hidden_size), shared)


def query_scale(model: Architecture) -> float:
    """Factor on the queries, of `attention_scale` and of muP (`architecture.mup`)."""
    scale = 1.0 if model.attention_scale is None else model.attention_scale * sqrt(model.head_dim)
    base = None if model.mup is None else model.mup.base_head_dim
    return scale if base is None else scale * sqrt(base / model.head_dim)
