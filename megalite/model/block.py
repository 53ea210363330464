"""One transformer block: attention and MLP, normalised, each added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megalite.architecture.activations import ACTIVATIONS
from megalite.architecture.architecture import BlockSpec, FeedForwardSpec
from megalite.architecture.attentions import ATTENTIONS
from megalite.architecture.norms import NORMS
from megalite.layers.attention import attend_by_document, takes_sinks
from megalite.layers.attention_dropout import DroppingAttention
from megalite.layers.documents import Documents
from megalite.layers.experts import SparseMLP
from megalite.layers.latent_attention import LatentAttention
from megalite.layers.mlp import MLP
from megalite.layers.precision import ONE_FORMAT
from megalite.layers.self_attention import SelfAttention
from megalite.model.spec import StageSpec
from megalite.parallel.axes import Axis, TensorParallel
from megalite.parallel.collectives import keep, own_rows
from megalite.parallel.random import dropout, name_seed


class Dropout(nn.Module):
    """Dropout whose mask depends on the token, not on the layout; identity in evaluation.

    Shape: `[t, h]`, or `[t/tp, h]` when sequence parallel.
    """

    def __init__(self, rate: float, *, seed: int, site: str, tp: Axis, sequence_parallel: bool):
        super().__init__()
        self.rate = rate
        # A tensor, for the compiler would make another graph for each number; not a buffer: it is nobody's state
        self.seed = torch.tensor(name_seed(seed, site), device="cpu")
        self.tp = tp
        self.own = own_rows if sequence_parallel else keep

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        return dropout(x, self.own(documents.keys, self.tp), rate=self.rate, seed=self.seed)


class Block(nn.Module):
    """A block as its description says. Shape: `[t, h]`, or `[t/tp, h]` when sequence parallel.

    one after the other    x + attention(norm(x)), then x + mlp(norm(x))
    parallel               x + attention(norm(x)) + mlp(norm(x))
    norms after            x + norm(attention(...))
    norms of sums          norm(x + attention(x)), then norm(x + mlp(x))

    Args:
        stage: that it is part of.
        index: which block of the model; `Architecture.block` says what one behind the last is like.
    """

    def __init__(self, stage: StageSpec, index: int):
        super().__init__()
        model, parts = stage.model, stage.parts
        spec, hidden = model.block(index), model.hidden_size
        self.recompute = stage.recompute_of(index)
        self.is_one_graph = _is_one_graph(stage, spec)
        options: TensorParallel = {"tp": stage.tp, "sequence_parallel": stage.sequence_parallel}
        norm = partial(parts.norm, hidden, spec.norm_eps, **options)
        self.attention_norm = norm() if spec.norm_before else nn.Identity()
        self.attention = _attention(stage, index, options)
        self.attention_out_norm = norm() if spec.norm_after else nn.Identity()
        self.mlp_norm = norm() if spec.norm_before else nn.Identity()
        self.mlp = _feed_forward(stage, spec, options)
        self.mlp_out_norm = norm() if spec.norm_after else nn.Identity()
        self.attention_dropout = Dropout(model.dropout, seed=stage.seed, site=f"blocks.{index}.attention", **options)
        self.mlp_dropout = Dropout(model.dropout, seed=stage.seed, site=f"blocks.{index}.mlp", **options)
        self.is_parallel = spec.is_parallel
        self.add = _add_then_norm if spec.norm_sums else _norm_then_add

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        mixed = self.attention(self.attention_norm(x), documents)
        after = self.add(x, mixed, self.attention_out_norm, partial(self.attention_dropout, documents=documents))
        expanded = self.mlp(self.mlp_norm(x if self.is_parallel else after), documents)
        return self.add(after, expanded, self.mlp_out_norm, partial(self.mlp_dropout, documents=documents))


def _is_one_graph(stage: StageSpec, block: BlockSpec) -> bool:
    """Whether the compiler surely makes one graph of a dense block, in which nothing counts how often it is run."""
    model, parts, attention = stage.model, stage.parts, block.attention
    is_plain = parts.precision is ONE_FORMAT and parts.mlp_chunk_tokens is None and stage.cp.size == 1
    has_kernel = parts.attend is not attend_by_document
    is_spelled_out = model.attention_dropout > 0.0 or attention.soft_cap is not None
    is_spelled_out |= attention.sinks and not takes_sinks(parts.attend)
    if not isinstance(block.feed_forward, FeedForwardSpec) or ATTENTIONS.is_brought(model.attention):
        return False
    is_ours = not NORMS.is_brought(block.norm) and not ACTIVATIONS.is_brought(block.feed_forward.activation)
    return is_plain and is_ours and has_kernel and not is_spelled_out


Layer = Callable[[Tensor], Tensor]


def _norm_then_add(x: Tensor, branch: Tensor, norm: Layer, drop: Layer) -> Tensor:
    return x + drop(norm(branch))


def _add_then_norm(x: Tensor, branch: Tensor, norm: Layer, drop: Layer) -> Tensor:
    return norm(x + drop(branch))


def _attention(stage: StageSpec, index: int, options: TensorParallel) -> SelfAttention | LatentAttention:
    block, parts, hidden = stage.model.block(index), stage.parts, stage.model.hidden_size
    soft_cap, rate = block.attention.soft_cap, stage.model.attention_dropout
    is_redone = stage.recompute_of(index) != "none"
    is_latent, has_sinks = block.attention.latent is not None, block.attention.sinks
    choose = partial(parts.attend_latents, soft_cap)
    if not is_latent:
        choose = partial(parts.attend_within, soft_cap, sinks=has_sinks, is_redone=is_redone)
    dropping = None
    if rate:
        site, num_heads = f"blocks.{index}.attention.weights", block.attention.num_heads // stage.tp.size
        dropping = DroppingAttention(choose(drop=rate), seed=stage.seed, site=site, num_heads=num_heads, tp=stage.tp)
    if is_latent:
        whole = parts.over_latents.whole
        return LatentAttention(
            hidden, block, attend=choose(), whole=whole, dropping=dropping, gemm=parts.gemm, **options
        )
    return SelfAttention(
        hidden, block, attend=choose(), dropping=dropping, gemm=parts.gemm, sharers=stage.sharers, **options
    )


def _feed_forward(stage: StageSpec, block: BlockSpec, options: TensorParallel) -> MLP | SparseMLP:
    spec, hidden, parts = block.feed_forward, stage.model.hidden_size, stage.parts
    if isinstance(spec, FeedForwardSpec):
        return MLP(hidden, spec, gemm=parts.gemm, chunk_tokens=parts.mlp_chunk_tokens, **options)
    return SparseMLP(hidden, spec, gemm=parts.gemm, cp=stage.cp, ep=stage.ep, **options)
