"""What attention costs, of heads made of the stream and of heads made of latents: multiplications, what is kept between
forward and backward pass, and what ranks send.

Legend: a bytes of an element, h hidden size; widths of all heads divided by tp; numbers are of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.architecture.architecture import AttentionSpec, BlockSpec
from megalite.architecture.norms import NORMS

FP32_BYTES = 4


@dataclass(frozen=True)
class LinearSize:
    """One of a block's linear layers, on one rank."""

    inputs: int
    outputs: int
    makes_latents: bool = False
    """It is whole on every rank, and never in FP8."""


def projections(attention: AttentionSpec, hidden_size: int, tp: int = 1) -> list[LinearSize]:
    """The linear layers of attention."""
    q, kv, v = (width // tp for width in (attention.q_width, attention.kv_width, attention.v_width))
    back = LinearSize(attention.mixed_width // tp, hidden_size)
    mla = attention.latent
    if mla is None:
        return [LinearSize(hidden_size, q + kv + v), back]
    of_heads = LinearSize(mla.kv_lora_rank, attention.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) // tp)
    of_queries = LinearSize(hidden_size if mla.q_lora_rank is None else mla.q_lora_rank, q)
    return [LinearSize(hidden_size, latent_width(attention), makes_latents=True), of_queries, of_heads, back]


def latent_width(attention: AttentionSpec) -> int:
    """Numbers of a token's latents and of the key that all heads share; 0 without."""
    mla = attention.latent
    return 0 if mla is None else (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim


def mixing_multiply_adds(attention: AttentionSpec, seq_len: int) -> float:
    """Those of queries with keys, and of their weights with values, over the mean span."""
    window = min(seq_len, attention.window or seq_len)
    mean_span = window - window * window / (2 * seq_len)
    return (attention.q_width + attention.mixed_width) * mean_span


def mixing_bytes(block: BlockSpec, *, element_bytes: int, tp: int, streams: float, seen: int = 1) -> float:
    """Kept between attention's first products and its last one, where nothing is recomputed.

    Args:
        streams: tokens that a rank norms for each token that it attends with; 1/tp with sequence parallelism.
        seen: tokens whose keys and values it keeps for each of them.
    """
    a, attention = element_bytes, block.attention
    q, mixed = attention.q_width // tp, attention.mixed_width // tp
    kept = a * (q + mixed) + softmax_sums(attention, tp)
    if attention.latent is not None:
        kept += a * seen * (attention.kv_width + attention.v_width) // tp
        return kept + _latent_bytes(block, element_bytes=a, tp=tp, streams=streams, seen=seen)
    kv = seen_kv_width(attention, tp)
    kept += a * 2 * kv
    if attention.rope is not None and attention.qk_norm:
        kept += a * (q + kv)  # unrotated ones too, for the norms' backward pass
    if attention.qk_norm:
        norm = NORMS[block.norm]
        is_wide = attention.qk_norm == "whole" or norm.multiplies_wide
        kept += (a if a == FP32_BYTES else FP32_BYTES + (FP32_BYTES if is_wide else a)) * (q + kv)
    return kept


def _latent_bytes(block: BlockSpec, *, element_bytes: int, tp: int, streams: float, seen: int) -> float:
    """What the norms of latents keep, and the products behind them."""
    a, mla = element_bytes, block.attention.latent
    assert mla is not None
    width = latent_width(block.attention)
    normed = width - mla.qk_rope_head_dim
    is_wide = NORMS[NORMS[block.norm].of_heads].multiplies_wide
    of_norms = a * (width + normed) if a == FP32_BYTES else (FP32_BYTES + (FP32_BYTES if is_wide else a)) * normed
    given = a * (width if tp > 1 else normed)
    if seen > 1:  # the queries' latents, and those of all keys
        given += a * seen * (mla.kv_lora_rank + mla.qk_rope_head_dim) - (0 if tp > 1 else a * mla.kv_lora_rank)
    return streams * of_norms + given


def softmax_sums(attention: AttentionSpec, tp: int) -> int:
    """Bytes of what attention kernels keep of each query."""
    return FP32_BYTES * attention.num_heads // tp


def sharing_ranks(attention: AttentionSpec, tp: int) -> int:
    """Tensor-parallel ranks that have queries of one key and value head: more than 1 where there are more ranks."""
    return max(1, tp // attention.num_kv_heads)


def seen_kv_width(attention: AttentionSpec, tp: int) -> int:
    """Width of the key heads that attention has on one rank: heads that are shared are whole there."""
    return attention.kv_width * sharing_ranks(attention, tp) // tp


def gathered_bytes(block: BlockSpec, *, element_bytes: int, tp: int) -> int:
    """Bytes of one token's keys and values on one tensor-parallel rank; where they travel both are as wide."""
    return element_bytes * 2 * seen_kv_width(block.attention, tp)


def entering_bytes(attention: AttentionSpec, hidden_size: int, *, element_bytes: int) -> int:
    """Bytes of one token that tensor-parallel ranks bring to one another before heads are made, or whose gradients they
    add up: the stream, or the latents, and the stream too where queries are made of it."""
    if attention.latent is None:
        return element_bytes * hidden_size
    stream = hidden_size if attention.latent.q_lora_rank is None else 0
    return element_bytes * (latent_width(attention) + stream)


def context_sent_bytes(
    block: BlockSpec, *, kind: str, element_bytes: int, cp: int, tp: int, recompute: str = "none"
) -> float:
    """Bytes that a rank sends over cp for each of its own tokens in a block, forward and backward.

    Keys and values go to all others, again in the backward pass, and their gradients come back, in fp32 where they go
    round. Of latents these alone go, and again only where they are recomputed. Under Ulysses each rank gets its heads
    of queries, keys, values and results, once a pass.
    """
    passes = 3 if recompute == "full" else 2
    attention = block.attention
    keys_and_values = gathered_bytes(block, element_bytes=element_bytes, tp=tp)
    if kind == "allgather" and attention.latent is not None:
        latents = attention.latent.kv_lora_rank + attention.latent.qk_rope_head_dim
        return (2 if recompute == "none" else 3) * (cp - 1) * element_bytes * latents
    if kind == "allgather":
        return 3 * (cp - 1) * keys_and_values
    if kind == "ring":
        return passes * (cp - 1) * keys_and_values + cp * gathered_bytes(block, element_bytes=FP32_BYTES, tp=tp)
    kv_heads = max(attention.num_kv_heads // tp, cp)  # repeated where they are fewer
    numbers = 2 * attention.q_width / tp + 2 * kv_heads * attention.head_dim
    return passes * (cp - 1) / cp * element_bytes * numbers
