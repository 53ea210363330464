"""Mixture of experts: many MLPs of which each token goes to few (Shazeer et al. 2017).

    x [t, h] -> router: k experts for each token, with weights
             -> a copy of each token for each of its experts, in order of the experts       [t k, h]
             -> products in groups (`layers.grouped`)                                       [t k, f] -> [t k, h]
             -> back in order of the tokens, weighed and added up                           [t, h]

Choices that found no room at their expert (`layers.capacity`) are in no group: their rows lie behind those of all
experts, do not travel, are not multiplied, and come out as zeros.

Under expert parallelism each rank has some of the experts, and tokens travel to those that they have chosen and back
(`layers.dispatch`), while the shared MLP is at work.

Under tensor parallelism experts are cut as an MLP is, columns first and rows then: every tp rank has all tokens and a
part of each expert. The shared MLP works on the same gathered tokens, and one collective each way serves both.

Rows are moved by permutations, whose backward pass is the inverse one, so that nothing is added in an order that
chance decides.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.architecture.architecture import ExpertsSpec, FeedForwardSpec
from megalite.layers.dispatch import Permuted, at_their_experts
from megalite.layers.documents import Documents
from megalite.layers.gemm import PLAIN, Gemm
from megalite.layers.grouped import GroupedProduct
from megalite.layers.mlp import MLP, load_activation
from megalite.layers.router import Router, Routing
from megalite.layers.weight_gradients import TakeGradient
from megalite.parallel.axes import SINGLE, Axis
from megalite.parallel.collectives import copy_to, gather_rows, reduce_from, scatter_rows


class Experts(nn.Module):
    """Some MLPs, each of which works on rows of its own. Shape: `[n, h]`, sorted by expert -> `[n, h]`.

    Rows behind those of the experts are of none, and what comes out there is finite.

    Args:
        spec: of each.
        num_experts: that this rank holds.
        tp: the ranks that each is cut over; what comes out are parts of a sum over them.
        may_spare: there may be rows of no expert.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: FeedForwardSpec,
        num_experts: int,
        *,
        tp: Axis,
        gemm: Gemm = PLAIN,
        may_spare: bool = False,
    ):
        super().__init__()
        width = spec.width // tp.size
        expand = nn.Parameter(torch.empty(num_experts * spec.num_expanding * width, hidden_size))
        self._expand_name = "gate_up" if spec.is_gated else "up"
        self.register_parameter(self._expand_name, expand)
        self.down = nn.Parameter(torch.empty(num_experts * hidden_size, width))
        if spec.bias:
            between = torch.empty(num_experts * spec.num_expanding * width)
            self.register_parameter(f"{self._expand_name}_bias", nn.Parameter(between))
            self.down_bias = nn.Parameter(torch.empty(num_experts * hidden_size))
        self.has_bias, self.tp = spec.bias, tp
        self.activation = load_activation(spec.activation)
        self.products = tuple(GroupedProduct(gemm, may_spare=may_spare) for _ in range(2))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        expand, down = self.products
        between = expand(x, getattr(self, self._expand_name), sizes)
        if self.has_bias:
            between = between + _of_rows(getattr(self, f"{self._expand_name}_bias"), sizes, between)
        y = down(self.activation(between), self.down, sizes)
        if not self.has_bias:
            return y
        return y + _of_rows(copy_to(self.down_bias, self.tp), sizes, y) / self.tp.size  # a part of the sum, too

    def by_name(self) -> tuple[tuple[str, GroupedProduct], tuple[str, GroupedProduct]]:
        """The products in their order, with the names of their weights."""
        return (self._expand_name, self.products[0]), ("down", self.products[1])

    def hand_over_gradients(self, take: TakeGradient) -> None:
        """Let somebody else have the gradients of the weights."""
        for name, product in self.by_name():
            product.take = partial(take, getattr(self, name))


def _of_rows(bias: Tensor, sizes: Tensor, rows: Tensor) -> Tensor:
    """The bias of each row's expert, `[n, out]`, given those of all, `[experts x out]`."""
    places = torch.arange(rows.shape[0], device=rows.device)
    experts = torch.searchsorted(sizes.cumsum(0), places, right=True)  # nobody waits for the sizes
    experts = experts.clamp(max=sizes.shape[0] - 1)  # rows of none
    return bias.view(sizes.shape[0], -1).index_select(0, experts)


class SparseMLP(nn.Module):
    """A router and its experts in place of a block's MLP. Shape: `[t, h]`, or `[t/tp, h]` when sequence parallel.

    Args:
        cp: the ranks that share the tokens of a micro-batch.
        ep: the ranks that have other experts.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: ExpertsSpec,
        *,
        tp: Axis,
        sequence_parallel: bool,
        gemm: Gemm = PLAIN,
        cp: Axis = SINGLE,
        ep: Axis = SINGLE,
    ):
        super().__init__()
        settings = spec.settings
        self.router = Router(hidden_size, settings, tp=tp, sequence_parallel=sequence_parallel, cp=cp)
        may_spare = settings.capacity_factor is not None and ep.size == 1  # over ranks no such rows travel
        own = settings.num_experts // ep.size
        self.experts = Experts(hidden_size, spec.expert, own, tp=tp, gemm=gemm, may_spare=may_spare)
        self.shared: MLP | None = None
        if spec.shared is not None:
            self.shared = MLP(hidden_size, spec.shared, tp=tp, sequence_parallel=False, gemm=gemm, is_part=True)
        self.shared_gate = SharedGate(hidden_size, tp) if settings.shared_gate else None
        self.tp, self.ep = tp, ep
        self.enter = gather_rows if sequence_parallel else copy_to
        self.leave = scatter_rows if sequence_parallel else reduce_from

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        routing = self._of_all_rows(self.router(x, documents))
        x = self.enter(x, self.tp)
        y, beside = self.mix(x, routing)
        return self.leave(y if beside is None else y + beside, self.tp)

    def mix(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor | None]:
        """What each token's experts put out, weighed, `[t, h]`, and what the shared MLP does."""
        top_k, num_experts = routing.chosen.shape[1], self.router.settings.num_experts
        flat = routing.chosen.flatten()
        if routing.kept is not None:
            flat = flat.masked_fill(~routing.kept.flatten(), num_experts)
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
        ones = torch.ones_like(flat)
        sizes = torch.zeros(num_experts + 1, dtype=flat.dtype, device=flat.device)
        sizes = sizes.index_add(0, flat, ones)[:num_experts]
        copies = _SortedCopies.apply(x, order, inverse, top_k)
        shared = partial(self._beside, x)
        if self.ep.size == 1:
            y, beside = self.experts(copies, sizes), shared()
        else:
            y, beside = at_their_experts(self.experts, copies, sizes, self.ep, shared)
        by_token = Permuted.apply(y, inverse, order).unflatten(0, (-1, top_k))
        return (by_token * routing.weights.to(y.dtype).unsqueeze(2)).sum(1), beside

    def _beside(self, x: Tensor) -> Tensor | None:
        """What all tokens go through."""
        if self.shared is None:
            return None
        y = self.shared(x)
        return y if self.shared_gate is None else self.shared_gate(x) * y

    def _of_all_rows(self, routing: Routing) -> Routing:
        """Where the tokens go that this rank's parts of the experts work on. Each rank has a part of the gradients of
        their weights, and these are added up."""
        if self.enter is copy_to:
            return routing._replace(weights=copy_to(routing.weights, self.tp))
        with torch.no_grad():
            chosen = gather_rows(routing.chosen, self.tp)
            kept = None if routing.kept is None else gather_rows(routing.kept.byte(), self.tp).bool()
        return Routing(chosen, gather_rows(routing.weights, self.tp), kept)


class SharedGate(nn.Module):
    """A sigmoid of each token, for what the shared MLP puts out (Qwen2-MoE). Shape: `[t, h]` -> `[t, 1]`."""

    def __init__(self, hidden_size: int, tp: Axis):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size))
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, copy_to(self.weight, self.tp)).sigmoid()  # its gradient is of a part of the sum over tp


class _SortedCopies(torch.autograd.Function):
    """k copies of each row, in another order: `[t, h]` -> `[t k, h]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None
