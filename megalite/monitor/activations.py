"""What happens inside the model: the stream's size, attention's sharpness, units that never fire, the head's logits.

    stream      rms, max and kurtosis of a block's output: outliers that low precision cannot hold come up here
    attention   entropy in nats, the mean and the lowest head's: attention that collapses onto one token goes to 0
                (Zhai et al. 2023); the largest logit, which grows before a run diverges (Dehghani et al. 2023)
    log Z       of the sum that the head's softmax divides by: it drifts before bf16 logits lose their meaning (PaLM)
    dead units  share of the MLP's units that stay below a hundredth of the layer's rms for every token

One forward pass over a step's whole global batch, without gradients and dropout, is watched; the training step itself
runs as it is, compiled, recomputed or not. So the numbers belong to the batch and the weights, not to the layout, and
looking changes nothing. Attention's kernels never show their scores, so they are made once more: for every query of
sequences up to so many tokens (`monitor.attention_queries`), and of longer ones for a random sample of so many, the
same in every layout. `attention_queries` in the record says for what share: below 1, the entropies are a sample's,
without bias. What a plug-in's attention does with scores is not known, so nothing is said of it. Layers that predict
further ahead do not take part in such a pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megalite.architecture.attentions import ATTENTIONS
from megalite.engine.steps import token_axes
from megalite.layers.context import whole_stream
from megalite.layers.documents import Documents
from megalite.layers.mlp import MLP
from megalite.layers.router import Router
from megalite.model.transformer import Stage
from megalite.monitor.routers import RouterStatistics
from megalite.parallel.axes import Axes, Axis
from megalite.parallel.collectives import all_reduce, from_all

HASH_MULTIPLIER = 2654435761
"""Prime, near 2^32 over the golden ratio (Knuth, The Art of Computer Programming, 6.4)."""

SCORES_AT_ONCE = 1 << 22
"""Attention scores that are made at once: 16 MB."""

DEAD = 0.01
"""Of the layer's rms."""

HEAD = "head"

SUMS = ("count", "square", "fourth", "queries", "unit_count", "unit_square")

Statistics = dict[str, dict[str, float]]
"""By block, and of the head."""


class Activations:
    """Looks into the blocks and the head of a stage while a forward pass runs.

    Args:
        most_queries: of a sequence whose attention is looked at: of one n times as long, one in n. None for all.
    """

    def __init__(self, stage: Stage, axes: Axes, seq_len: int, most_queries: int | None):
        self._stage, self._axes = stage, axes
        self._stride = 1 if most_queries is None else -(-seq_len // most_queries)
        self._model = stage.spec.model
        self._has_softmax = ATTENTIONS[self._model.attention].function is None
        self._device = next(stage.parameters()).device

    @torch.no_grad()
    def measure(self, forward: Callable[[], Any]) -> Statistics:
        """Run a forward pass over the global batch and return what it shows. Collective."""
        self._start()
        with self._watching(), uncompiled():
            forward()
        return self._collect()

    def _start(self) -> None:
        num_blocks, width = self._model.num_layers, self._model.ffn_hidden_size // self._axes.tp.size
        new = partial(torch.zeros, dtype=torch.float64, device=self._device)
        self._sums = {name: new(num_blocks) for name in SUMS}
        self._entropy = new(num_blocks, self._model.num_heads)
        self._largest = new(num_blocks)
        self._largest_logit = torch.full_like(self._largest, -torch.inf)
        self._log_z, self._largest_log_z = new(2), new(1)  # sum of squares and number of tokens; largest size
        self._unit_largest = {index: torch.zeros(width, device=self._device) for index in self._dense_blocks()}
        self._routers = RouterStatistics(self._routers_of_blocks(), self._device)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """The stage with an eye in each seam; as it was afterwards."""
        hooks: list[RemovableHandle] = []
        seams: list[tuple[nn.Module, str, Callable[..., Any] | None]] = []
        hooks += self._routers.hooks()
        if self._stage.head is not None and self._axes.tp.rank == 0:  # all tp ranks have the same
            seams.append((self._stage.head, "see_log_z", None))
            self._stage.head.see_log_z = self._see_log_z
        for index, block in self._stage.blocks_by_index().items():
            hooks.append(block.register_forward_hook(partial(self._see_stream, index)))
            watched = list[tuple[nn.Module, str, Callable[..., Any]]]()
            if isinstance(block.mlp, MLP):
                watched.append((block.mlp, "activation", partial(self._see_units, index)))
            if self._has_softmax:
                watched.append((block.attention, "attend", partial(self._see_attention, index)))
            for module, seam, see in watched:
                seams.append((module, seam, getattr(module, seam)))
                setattr(module, seam, partial(see, getattr(module, seam)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for seen, seam, former in seams:
                setattr(seen, seam, former)

    def _routers_of_blocks(self) -> dict[str, Router]:
        routers = self._stage.routers.by_name
        return {name: router for name, router in routers.items() if name.startswith("blocks.")}

    def _dense_blocks(self) -> list[int]:
        return [index for index, block in self._stage.blocks_by_index().items() if isinstance(block.mlp, MLP)]

    def _see_stream(self, index: int, block: nn.Module, inputs: Any, stream: Tensor) -> None:
        if not self._stage.spec.sequence_parallel and self._axes.tp.rank:
            return  # the first tp rank has the same
        x = stream.float()
        squares = x.square()
        self._sums["count"][index] += x.numel()
        self._sums["square"][index] += squares.sum(dtype=torch.float64)
        self._sums["fourth"][index] += squares.square().sum(dtype=torch.float64)
        self._largest[index] = torch.maximum(self._largest[index], x.abs().max().double())

    def _see_log_z(self, log_z: Tensor, weights: Tensor) -> None:
        sizes = log_z[weights > 0].double().abs()
        if sizes.numel():
            self._log_z += torch.stack((sizes.square().sum(), torch.tensor(float(sizes.numel())).to(sizes)))
            self._largest_log_z = torch.maximum(self._largest_log_z, sizes.max())

    def _see_units(self, index: int, activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        units = activation(x)
        sizes = units.float().abs()
        self._sums["unit_count"][index] += sizes.numel()
        self._sums["unit_square"][index] += sizes.square().sum(dtype=torch.float64)
        self._unit_largest[index] = torch.maximum(self._unit_largest[index], sizes.amax(0))
        return units

    def _see_attention(
        self,
        index: int,
        attend: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents,
        window: int | None,
        **sinks: Tensor,
    ) -> Tensor:
        chosen = sample_queries(documents.keys, self._stride)
        places, keys = seen_keys(q, k, documents, self._axes.cp)
        first_head = self._axes.tp.rank * q.shape[1]
        heads = slice(first_head, first_head + q.shape[1])
        size = max(1, SCORES_AT_ONCE // (q.shape[1] * keys.shape[0]))
        for queries in chosen.split(size) if chosen.numel() else ():
            where = places[queries], documents.positions[queries]
            entropy, largest = scores_of(q[queries], keys, *where, window, self._model.attention_soft_cap, **sinks)
            self._entropy[index, heads] += entropy.sum(1, dtype=torch.float64)
            self._largest_logit[index] = torch.maximum(self._largest_logit[index], largest.double())
        if self._axes.tp.rank == 0:
            self._sums["queries"][index] += chosen.numel()
        return attend(q, k, v, documents, window, **sinks)

    def _collect(self) -> Statistics:
        axes = self._axes
        sums = all_reduce(torch.stack([*self._sums.values()]), axes.world)
        count, square, fourth, queries, unit_count, unit_square = sums
        bounds = all_reduce(torch.stack([self._largest, self._largest_logit]), axes.world, dist.ReduceOp.MAX)
        dead = torch.zeros_like(count)
        for index, largest in self._unit_largest.items():
            over_dp = all_reduce(largest, axes.replicas, dist.ReduceOp.MAX)
            if axes.replicas.rank == 0:
                dead[index] = (over_dp < DEAD * (unit_square[index] / unit_count[index]).sqrt()).sum()
        dead = all_reduce(dead, axes.world) / self._model.ffn_hidden_size
        columns = {
            "rms": (square / count).sqrt(),
            "max": bounds[0],
            "kurtosis": fourth * count / square.square(),
            "dead_units": dead,
        }
        if self._has_softmax:
            entropy = all_reduce(self._entropy, axes.world) / queries.clamp(min=1.0).unsqueeze(1)
            columns |= {
                "attention_queries": torch.full_like(count, 1.0 / self._stride),
                "attention_entropy": entropy.mean(1),
                "attention_entropy_min": entropy.amin(1),
                "attention_logit_max": bounds[1],
            }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        found = {f"blocks.{index}": dict(zip(columns, row, strict=True)) for index, row in enumerate(rows)}
        for index, is_sparse in enumerate(self._model.sparse_blocks):
            if is_sparse:
                del found[f"blocks.{index}"]["dead_units"]
        for of_stage in from_all(self._routers.collect(token_axes(self._stage, axes)), axes.pp):
            for layer, numbers in of_stage.items():
                found[layer] |= numbers
        return {**found, HEAD: self._collect_head()}

    def _collect_head(self) -> dict[str, float]:
        square, count = all_reduce(self._log_z, self._axes.world).tolist()
        largest = all_reduce(self._largest_log_z, self._axes.world, dist.ReduceOp.MAX).item()
        mean_square = square / max(count, 1.0)
        found = {"log_z_rms": mean_square**0.5, "log_z_max": largest}
        return {**found, "z_loss": self._model.z_loss * mean_square} if self._model.z_loss else found


def sample_queries(keys: Tensor, stride: int) -> Tensor:
    """Which of `[t]` tokens are looked at: one of each `stride` in a row, at a place drawn by a hash of their number.

    A fixed place would not do: queries further back in a document see more tokens, and their entropy is higher.

    Args:
        keys: `[t]` int64, of each token in the whole training.
        stride: 1 for all of them.

    Returns:
        `[c]` int64, ascending.
    """
    drawn = ((keys // stride) * HASH_MULTIPLIER >> 15) % stride
    return (keys % stride == drawn).nonzero().squeeze(1)


def uncompiled() -> AbstractContextManager[Any]:
    """Within it compiled blocks run as they are written. Where nothing is compiled, torch's compiler, whose import
    takes seconds, is left alone."""
    is_there = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_there else nullcontext()


def seen_keys(q: Tensor, k: Tensor, documents: Documents, cp: Axis) -> tuple[Tensor, Tensor]:
    """The places of this rank's queries `[c]` among all tokens, and the keys of all `[t, m, d]`. Collective over cp."""
    if documents.share is None:
        return torch.arange(q.shape[0], device=q.device), k
    is_whole = k.shape[0] != q.shape[0]  # made of all ranks' latents
    return documents.share.own, k if is_whole else whole_stream(k, cp, documents.share)


def scores_of(
    q: Tensor,
    k: Tensor,
    places: Tensor,
    positions: Tensor,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Entropy of some queries' attention, and their largest logit.

    Args:
        q: `[c, n, d]`.
        k: `[t, m, d]`, n a multiple of m.
        places: `[c]` int64, of the queries among the t tokens, ascending.
        positions: `[c]`, of the queries in their documents.
        window: tokens that a query sees, itself included; None for all before it.
        soft_cap: bound c of the scores s, as c tanh(s / c); None for none.
        sinks: `[n]`, a score that each head's softmax counts besides, and which counts in its entropy; None for none.

    Returns:
        entropy `[n, c]` in nats, and a scalar.
    """
    logits, seen = logits_of(q, k, places, positions, window)
    if soft_cap is not None:
        logits = (soft_cap * torch.tanh(logits / soft_cap)).masked_fill(~seen, -torch.inf)
    largest = logits.max()
    if sinks is not None:
        logits = torch.cat((logits, sinks.float().view(-1, 1, 1).expand(-1, logits.shape[1], 1)), dim=2)
        seen = F.pad(seen, (0, 1), value=True)
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(~seen, 0.0)).sum(-1), largest


def logits_of(q: Tensor, k: Tensor, places: Tensor, positions: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Logits `[n, c, k]` of some queries, -inf of what they do not see, and what they see `[c, k]`; see `scores_of`."""
    group = q.shape[1] // k.shape[1]
    chosen = q.float().unflatten(1, (-1, group))
    seen_back = positions if window is None else positions.clamp(max=window - 1)
    first, last = int((places - seen_back).min()), int(places[-1])  # a sync; most keys are of other documents
    logits = torch.einsum("cmgd,kmd->mgck", chosen, k[first : last + 1].float()).flatten(0, 1) / q.shape[-1] ** 0.5
    place = torch.arange(first, last + 1, device=k.device)
    seen = (place <= places.unsqueeze(1)) & (place >= (places - seen_back).unsqueeze(1))
    return logits.masked_fill(~seen, -torch.inf), seen
