"""Output head and cross-entropy in one, over a vocabulary cut across tensor-parallel ranks.

Logits are the largest activation of a small model, and most of their memory is waste: here they exist for one chunk of
tokens at a time, and no rank ever sees another's part of the vocabulary. For each chunk of c tokens

    logits = hidden @ weight.T            [c, v]     v: this rank's true vocabulary rows, padding left out
    log(Z), target's logit                [c] each   reduced over tp: two small messages
    d logits = (softmax - one-hot) * w    [c, v]     in place of the logits (`layers.logits`)
    d hidden, d weight                    two products, accumulated

With a z-loss of coefficient z (PaLM, Chowdhery et al. 2022, section 5) training minimises nll + z log(Z)^2, Z being the
sum of exponentials of the logits as they are, which keeps them from drifting: d logits gets 2 z log(Z) softmax w more.
The loss that is returned stays the cross-entropy, so that curves with and without it compare.

The gradients are made in the forward pass, while the chunk is at hand (as in Liger Kernel, Hsu et al. 2024), and scaled
by the incoming gradient in the backward pass, so nothing is computed twice. Softmax is fp32 whatever the stream's
format.
"""

from __future__ import annotations

from collections.abc import Callable
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
from megalite.layers.logits import Columns, OwnColumns, SpelledOutColumns, columns_of
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
    weights, labels = targets.weights[tokens].to(accumulate), targets.labels[tokens]
    if head.spec.token_loss is None or not want_grad:
        columns = columns_of(logits, labels - head.first_row, head.spec.soft_cap)
        losses = _cross_entropy(head, columns, weights, want_grad=want_grad)
    else:
        losses = _other_loss(head, SpelledOutColumns(logits, labels, head.spec.soft_cap), labels, weights)
    if targets.losses is not None:
        targets.losses[tokens] = losses
    return torch.dot(losses, weights)


def _cross_entropy(head: Head, columns: Columns, weights: Tensor, *, want_grad: bool) -> Tensor:
    """Each token's cross-entropy `[c]`, and in place of the logits its weighted gradient if wanted, with the z-loss's.

    Whatever is exponentiated or subtracted is relative to the largest logit, so that large ones lose no digits.
    """
    own = columns.measure()
    largest, total, target = _over_vocabulary(own, head.tp)
    log_total = total.log()
    nll, log_z = log_total - target, largest + log_total
    if head.see_log_z is not None:
        head.see_log_z(log_z, weights)
    if want_grad:
        scale = weights * (1.0 + 2.0 * head.spec.z_loss * log_z) * (own.maximum - largest).exp() / total
        columns.put_gradient(scale, weights)
    return nll


def _other_loss(head: Head, columns: SpelledOutColumns, labels: Tensor, weights: Tensor) -> Tensor:
    """The same of a plug-in's loss, which sees all columns of a chunk."""
    measure = head.spec.token_loss
    assert measure is not None, "somebody brought one"
    mine = slice(head.first_row, head.first_row + head.num_true_rows)
    whole = columns.wide.new_zeros(len(labels), head.vocab_size)
    whole[:, mine] = columns.wide
    whole = all_reduce(whole, head.tp)
    if head.see_log_z is not None:
        head.see_log_z(whole.logsumexp(1), weights)
    with naming("the loss of a plug-in (train.loss)"), torch.enable_grad():
        whole.requires_grad_()
        losses = measure(whole, labels)
        if losses.shape != labels.shape:
            raise ValueError(f"its shape is {list(losses.shape)}, expected {list(labels.shape)}")
        (grad,) = torch.autograd.grad(torch.dot(losses, weights), whole)
    columns.put(grad[:, mine])
    return losses.detach()


def _over_vocabulary(own: OwnColumns, tp: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Over the whole vocabulary, `[c]` each: the largest logit, the sum of exponentials of logits less that, and the
    label's logit less that; 0 for a label that is nowhere. Collective."""
    if tp.size == 1:
        return own.maximum, own.total, own.target * own.here
    largest = all_reduce(own.maximum.clone(), tp, dist.ReduceOp.MAX)
    below = own.maximum - largest
    target = torch.where(own.here, own.target + below, 0.0)
    total, target = all_reduce(torch.stack((own.total * below.exp(), target)), tp).unbind()
    return largest, total, target
