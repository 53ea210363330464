"""Output head and cross-entropy in one, over a vocabulary cut across tensor-parallel ranks.

Logits are the largest activation of a small model, and most of their memory is waste: here they exist for one chunk of
tokens at a time, and no rank ever sees another's part of the vocabulary. For each chunk of c tokens

    logits = hidden @ weight.T            [c, v]     v: this rank's true vocabulary rows, padding left out
    log(Z), target's logit                [c] each   reduced over tp: two small messages
    d logits = (softmax - one-hot) * w    [c, v]     in place of the logits, a part at a time on a CPU (see below)
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
from megalite.config.plan import CACHED_LOGITS, LOSS_CHUNK_TOKENS
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
        gemm, num_tokens = head.gemm, hidden.shape[0]
        matrix = weight[: head.num_true_rows]
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if want_grad else None
        grad_weight = None  # of a frozen one too
        if want_grad and weight.requires_grad:
            grad_weight = torch.empty_like(weight, dtype=accumulate)
        loss = torch.zeros((), dtype=accumulate, device=hidden.device)
        chunks = _chunks(slice(0, num_tokens), head.spec.chunk_tokens)
        whole = hidden.new_empty(min(num_tokens, head.spec.chunk_tokens), matrix.shape[0])

        for number, tokens in enumerate(chunks):
            chunk = hidden[tokens]
            logits = gemm.multiply(chunk, matrix, out=whole[: chunk.shape[0]])
            for rows in _chunks(tokens, _tokens_at_once(head, logits)):
                part = logits[rows.start - tokens.start : rows.stop - tokens.start]
                loss += _measure(head, part, rows, targets, accumulate, want_grad=want_grad)
            if grad_hidden is not None:  # the logits' gradient is in their place
                grad_hidden[tokens] = gemm.multiply(logits, matrix.t())
            if grad_weight is not None:
                put = gemm.add_product if number else gemm.begin_product
                put(grad_weight[: head.num_true_rows], logits, chunk)

        ctx.head, ctx.weight_dtype = head, weight.dtype
        if grad_weight is not None:
            grad_weight[head.num_true_rows if num_tokens else 0 :].zero_()
        if want_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        head: Head = ctx.head
        if grad_weight is None:
            return grad_hidden * grad, None, None, None, None
        if head.take_gradient is None:
            return grad_hidden * grad, (grad_weight * grad).to(ctx.weight_dtype), None, None, None
        head.take_gradient(head.weight, ScaledGradient(grad_weight, grad))
        return grad_hidden * grad, None, None, None, None


def _chunks(tokens: slice, size: int) -> list[slice]:
    return [slice(start, min(start + size, tokens.stop)) for start in range(tokens.start, tokens.stop, size)]


def _tokens_at_once(head: Head, logits: Tensor) -> int:
    """Tokens of a chunk `[c, v]` that are measured together: what fits into a CPU's caches, unless it takes a message;
    a GPU would rather have them all."""
    if logits.device.type != "cpu" or head.tp.size > 1 or not logits.numel():
        return max(1, logits.shape[0])
    return max(1, CACHED_LOGITS // logits.shape[1])


def _measure(
    head: Head, logits: Tensor, tokens: slice, targets: Targets, accumulate: torch.dtype, *, want_grad: bool
) -> Tensor:
    """The weighted loss of some tokens, and in place of their logits `[c, v]` its gradient if wanted, else anything."""
    spec, weights = head.spec, targets.weights[tokens].to(accumulate)
    wide = logits.to(accumulate)  # themselves where they are
    slope = _bound(wide, spec.soft_cap) if spec.soft_cap is not None else None
    measure = _cross_entropy if spec.token_loss is None or not want_grad else _other_loss
    losses, grad = measure(head, wide, targets.labels[tokens], weights, want_grad=want_grad)
    if targets.losses is not None:
        targets.losses[tokens] = losses
    if grad is not None:
        grad = grad if slope is None else grad.mul_(slope)
        if grad is not logits:
            logits.copy_(grad)
    return torch.dot(losses, weights)


def _cross_entropy(
    head: Head, logits: Tensor, labels: Tensor, weights: Tensor, *, want_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Each token's cross-entropy `[c]` and, if wanted, its weighted gradient, with the z-loss's; both in place of the
    logits `[c, v]`.

    Whatever is exponentiated or subtracted is relative to the largest logit, so that large ones lose no digits.
    """
    labels = labels - head.first_row
    own = _softmax(logits, labels)
    largest, total, target = _over_vocabulary(own, head.tp)
    log_total = total.log()
    nll, log_z = log_total - target, largest + log_total
    if head.see_log_z is not None:
        head.see_log_z(log_z, weights)
    if not want_grad:
        return nll, None
    scale = weights * (1.0 + 2.0 * head.spec.z_loss * log_z) * (own.maximum - largest).exp() * own.unit / total
    return nll, _grad_logits(logits, labels, weights, scale=scale)


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


@dataclass(frozen=True)
class _OwnColumns:
    """Of a rank's columns, `[c]` each; exponentials are of the logits less the maximum."""

    maximum: Tensor
    unit: Tensor
    """The exponential that a softmax of 1 stands for."""
    total: Tensor
    """Sum of exponentials."""
    target: Tensor
    """The label's logit less the maximum."""
    here: Tensor
    """Whether the label is among these columns."""


def _softmax(logits: Tensor, local_labels: Tensor) -> _OwnColumns:
    """Turn logits `[c, v]` into their softmax in place, by torch's kernel, which passes over a row while it is at hand.

    Its exponentials follow from the largest entry, which stands for 1. What it has added them up to is too coarse where
    there are 100,000: so they are added up once more.
    """
    here, columns = _places(logits, local_labels)
    if not logits.shape[1]:
        none = logits.new_zeros(logits.shape[0])
        return _OwnColumns(torch.full_like(none, float("-inf")), none, none, none, here)
    maximum = logits.amax(dim=1)
    target = logits.gather(1, columns).squeeze(1) - maximum
    torch.softmax(logits, 1, out=logits)
    unit = 1.0 / logits.amax(dim=1)
    return _OwnColumns(maximum, unit, logits.sum(dim=1) * unit, target, here)


def _over_vocabulary(own: _OwnColumns, tp: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Over the whole vocabulary, `[c]` each: the largest logit, the sum of exponentials of logits less that, and the
    label's logit less that; 0 for a label that is nowhere. Collective."""
    if tp.size == 1:
        return own.maximum, own.total, own.target * own.here
    largest = all_reduce(own.maximum.clone(), tp, dist.ReduceOp.MAX)
    below = own.maximum - largest
    target = torch.where(own.here, own.target + below, 0.0)
    total, target = all_reduce(torch.stack((own.total * below.exp(), target)), tp).unbind()
    return largest, total, target


def _grad_logits(softmax: Tensor, local_labels: Tensor, weights: Tensor, *, scale: Tensor) -> Tensor:
    """`softmax * scale - one_hot * weights`, in place of a rank's softmax `[c, v]`."""
    if not softmax.shape[1]:
        return softmax
    here, columns = _places(softmax, local_labels)
    softmax.mul_(scale.unsqueeze(1))
    with _one_place_a_row():
        return softmax.scatter_add_(1, columns, -(weights * here).unsqueeze(1))


def _places(logits: Tensor, local_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which labels `[c]` are among these columns, and the column of each `[c, 1]`; any where it is elsewhere."""
    here = (local_labels >= 0) & (local_labels < logits.shape[1])
    return here, torch.where(here, local_labels, 0).unsqueeze(1)


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
