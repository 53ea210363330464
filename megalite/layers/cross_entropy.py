"""Output head and cross-entropy in one, over a vocabulary cut across tensor-parallel ranks.

Logits are the largest activation of a small model, and most of their memory is waste: here they exist for one chunk of
tokens at a time, and no rank ever sees another's part of the vocabulary. For each chunk of c tokens

    logits = hidden @ weight.T            [c, v]     v: this rank's true vocabulary rows, padding left out
    max, sum of exp, target's logit       [c] each   reduced over tp: two small messages
    d logits = (softmax - one-hot) * w    [c, v]     in place of the logits
    d hidden, d weight                    two products, accumulated

With a z-loss of coefficient z (PaLM, Chowdhery et al. 2022, section 5) training minimises nll + z log(Z)^2, Z being the
sum of exponentials of the logits as they are, which keeps them from drifting: d logits gets 2 z log(Z) softmax w more.
The loss that is returned stays the cross-entropy, so that curves with and without it compare.

The gradients are made in the forward pass, while the chunk is at hand (as in Liger Kernel, Hsu et al. 2024), and scaled
by the incoming gradient in the backward pass, so nothing is computed twice. Softmax is fp32 whatever the stream's
format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.addition import naming
from megalite.architecture.weights import vocab_rows_per_rank
from megalite.config.plan import LOSS_CHUNK_TOKENS
from megalite.layers.documents import Targets
from megalite.layers.gemm import PLAIN, Gemm
from megalite.layers.weight_gradients import ScaledGradient, TakeGradient
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import all_reduce, copy_to, gather_rows

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""From logits `[c, vocabulary]`, at least fp32, and labels `[c]` to a loss of each token `[c]`; differentiable."""


@dataclass(frozen=True)
class HeadSpec:
    """How logits are made, and what the loss of them is."""

    chunk_tokens: int = LOSS_CHUNK_TOKENS["cpu"]
    """Tokens whose logits exist at once."""
    z_loss: float = 0.0
    """Coefficient of the z-loss."""
    soft_cap: float | None = None
    """Bound c of the logits, as c tanh(x / c); None for none."""
    token_loss: TokenLoss | None = None
    """What training minimises in place of the cross-entropy."""


class Head(nn.Module):
    """The output matrix and the loss over it.

    Args:
        vocab_size: true vocabulary size.
        hidden_size: width of the stream.
        tp: the tensor-parallel axis.
        tied_to: the embedding's parameter when the two are one; None for a matrix of its own.
        sequence_parallel: the input is cut over tokens.
        gemm: how to multiply.
        spec: of the logits and the loss.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: Axis,
        tied_to: nn.Parameter | None = None,
        sequence_parallel: bool = False,
        gemm: Gemm = PLAIN,
        spec: HeadSpec = HeadSpec(),
    ):
        super().__init__()
        self.gemm, self.spec = gemm, spec
        self.see_log_z: Callable[[Tensor, Tensor], None] | None = None
        """Whoever looks at log(Z) sets it for a while; called with log(Z) `[c]` and the tokens' weights `[c]`."""
        self.take_gradient: TakeGradient | None = None
        """Gets the gradients of the weight; None leaves them to autograd."""
        self.vocab_size = vocab_size
        rows = vocab_rows_per_rank(vocab_size, tp.size)
        self.weight = nn.Parameter(torch.empty(rows, hidden_size)) if tied_to is None else tied_to
        self.first_row = rows * tp.rank
        self.num_true_rows = max(0, min(rows, vocab_size - self.first_row))
        self.tp = tp
        self.enter = gather_rows if sequence_parallel else copy_to

    def forward(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Weighted sum of the tokens' cross-entropies.

        Args:
            hidden: `[t, h]`, or `[t/tp, h]` when sequence parallel.
            targets: labels and weights of all t tokens.

        Returns:
            fp32 scalar, the same on every tp rank.
        """
        return _loss(self.enter(hidden, self.tp), self.weight, targets, self)

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's true columns of the logits, `[t, v]`. For evaluation; needs the weight whole, so not ZeRO-3."""
        logits = self.gemm.linear(self.enter(hidden, self.tp), self.weight[: self.num_true_rows])
        soft_cap = self.spec.soft_cap
        return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


@torch.compiler.disable
def _loss(hidden: Tensor, weight: Tensor, targets: Targets, head: Head) -> Tensor:
    return _LinearCrossEntropy.apply(hidden, weight, targets, head, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Targets, head: Head, want_grad: bool) -> Tensor:
        gemm, spec, num_rows = head.gemm, head.spec, head.num_true_rows
        matrix = weight[:num_rows]
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if want_grad else None
        grad_weight = torch.zeros_like(weight, dtype=accumulate) if want_grad else None
        loss = torch.zeros((), dtype=accumulate, device=hidden.device)

        for tokens in _chunks(hidden.shape[0], spec.chunk_tokens):
            chunk = hidden[tokens]
            logits = gemm.multiply(chunk, matrix).to(accumulate)
            slope = _bound(logits, spec.soft_cap) if spec.soft_cap is not None else None
            weights = targets.weights[tokens].to(accumulate)
            measure = _cross_entropy if spec.token_loss is None or not want_grad else _other_loss
            losses, grad_logits = measure(head, logits, targets.labels[tokens], weights, want_grad=want_grad)
            loss += torch.dot(losses, weights)
            if targets.losses is not None:
                targets.losses[tokens] = losses
            if grad_hidden is not None and grad_weight is not None and grad_logits is not None:
                grad_logits = (grad_logits if slope is None else grad_logits.mul_(slope)).to(chunk.dtype)
                grad_hidden[tokens] = gemm.multiply(grad_logits, matrix.t())
                gemm.add_product(grad_weight[:num_rows], grad_logits, chunk)

        ctx.head, ctx.weight_dtype = head, weight.dtype
        if want_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        head: Head = ctx.head
        if head.take_gradient is None:
            return grad_hidden * grad, (grad_weight * grad).to(ctx.weight_dtype), None, None, None
        head.take_gradient(head.weight, ScaledGradient(grad_weight, grad))
        return grad_hidden * grad, None, None, None, None


def _chunks(num_tokens: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _cross_entropy(
    head: Head, logits: Tensor, labels: Tensor, weights: Tensor, *, want_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Each token's cross-entropy `[c]` and, if wanted, its weighted gradient, with the z-loss's; both in place of the
    logits `[c, v]`."""
    labels = labels - head.first_row
    nll, total, log_z = _exponentiate(logits, labels, head.tp)
    if head.see_log_z is not None:
        head.see_log_z(log_z, weights)
    if not want_grad:
        return nll, None
    softmax_weights = weights * (1.0 + 2.0 * head.spec.z_loss * log_z)
    return nll, _grad_logits(logits, total, labels, weights, softmax_weights=softmax_weights)


def _other_loss(
    head: Head, logits: Tensor, labels: Tensor, weights: Tensor, *, want_grad: bool
) -> tuple[Tensor, Tensor]:
    """The same of a plug-in's loss, which sees all columns of a chunk."""
    assert want_grad, "validations measure the cross-entropy"
    measure = head.spec.token_loss
    assert measure is not None, "somebody brought one"
    mine = slice(head.first_row, head.first_row + head.num_true_rows)
    whole = logits.new_zeros(logits.shape[0], head.vocab_size)
    whole[:, mine] = logits
    whole = all_reduce(whole, head.tp)
    if head.see_log_z is not None:
        head.see_log_z(whole.logsumexp(1), weights)
    with naming("the loss of a plug-in (train.loss)"), torch.enable_grad():
        whole.requires_grad_()
        losses = measure(whole, labels)
        if losses.shape != labels.shape:
            raise ValueError(f"its shape is {list(losses.shape)}, expected {list(labels.shape)}")
        (grad,) = torch.autograd.grad(torch.dot(losses, weights), whole)
    return losses.detach(), grad[:, mine]


def _bound(logits: Tensor, soft_cap: float) -> Tensor:
    """Turn logits `[c, v]` into `soft_cap x tanh(logits / soft_cap)` in place; returns the slope there."""
    bounded = logits.div_(soft_cap).tanh_()
    slope = 1.0 - bounded.square()
    bounded.mul_(soft_cap)
    return slope


def _exponentiate(logits: Tensor, local_labels: Tensor, tp: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits `[c, v]` into exponentials in place.

    Returns:
        The negative log-likelihood `[c]`; over the whole vocabulary the sum of these exponentials `[c]`, and the
        logarithm `[c]` of the sum of those of the logits as they were.
    """
    num_columns = logits.shape[1]
    maximum = logits.amax(dim=1) if num_columns else logits.new_full((logits.shape[0],), float("-inf"))
    maximum = all_reduce(maximum, tp, dist.ReduceOp.MAX)
    logits.sub_(maximum.unsqueeze(1))
    here = (local_labels >= 0) & (local_labels < num_columns)
    if num_columns:
        columns = torch.where(here, local_labels, 0).unsqueeze(1)
        target = logits.gather(1, columns).squeeze(1) * here
    else:
        target = torch.zeros_like(maximum)
    total = logits.exp_().sum(dim=1)
    sums = all_reduce(torch.stack((total, target)), tp)
    total, target = sums[0], sums[1]
    log_total = total.log()
    return log_total - target, total, log_total + maximum


def _grad_logits(
    exponentials: Tensor, total: Tensor, local_labels: Tensor, weights: Tensor, *, softmax_weights: Tensor
) -> Tensor:
    """`exponentials / total * softmax_weights - one_hot * weights`, in place of the exponentials `[c, v]`."""
    num_columns = exponentials.shape[1]
    if not num_columns:
        return exponentials
    here = (local_labels >= 0) & (local_labels < num_columns)
    columns = torch.where(here, local_labels, 0).unsqueeze(1)
    exponentials.mul_((softmax_weights / total).unsqueeze(1))
    with _one_place_a_row():
        return exponentials.scatter_add_(1, columns, -(weights * here).unsqueeze(1))


@contextmanager
def _one_place_a_row() -> Iterator[None]:
    """Scatter as fast as it goes though algorithms are to be deterministic: every row is added to in one place, so no
    order matters. Torch's deterministic form on a GPU sorts the places, and waits for the device."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
