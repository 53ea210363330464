"""Passes of micro-batches through the chunks of one rank, as a program says.

    do F        chunk(input) -> output, kept with its input until the backward pass
    do B        backward from the output's gradient (or the loss): gradients of weights, and of the input
    do I, W     the same in two: gradients of products are held back in I, and made in W
    receive     posted at once, waited for by the pass that needs it
    send        begun at once, and waited for when more are under way than may be

Between chunks travels the stream alone. What every chunk must know of a micro-batch's documents it takes from its own
copy of the batch, which all ranks of a pipeline have read. Chunks of one rank hand the stream on without a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.data.loader import Batch
from megalite.engine.batch_cut import documents_of_batch
from megalite.engine.steps import loss_weights, targets_of_batch
from megalite.layers.documents import Documents
from megalite.model.transformer import Stage
from megalite.parallel.axes import Axes
from megalite.parallel.schedules.operations import Operation, Pass, made_by
from megalite.parallel.schedules.programs import SENDS_UNDER_WAY, Program
from megalite.spans import span

HoldBack = Callable[[], AbstractContextManager[Any]]
"""Entered around I: holds gradients of products back, and yields what `MakeHeld` takes."""
MakeHeld = Callable[[Any], None]

PHASES_OF_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
"""As a profiler's trace names passes that are learned from."""


@dataclass
class _Step:
    """What is under way in one step."""

    batches: Sequence[Batch]
    scale: Tensor | float
    loss: Tensor
    """Of the last chunk's micro-batches so far."""
    losses: list[Tensor] | None = None
    """Of each token, by micro-batch, when they are asked for."""
    documents: dict[int, Documents] = field(default_factory=dict)
    streams: dict[Pass, Tensor] = field(default_factory=dict)
    """What passes of this rank have made for others, or for its own next chunk."""
    arriving: dict[Pass, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    kept: dict[tuple[int, int], tuple[Tensor, Tensor | GradientEdge | None]] = field(default_factory=dict)
    """Of forward passes, by chunk and micro-batch, until their backward pass: the input, and the loss or where the
    output stands in the graph. The output itself is not kept, which no backward pass asks for."""
    held: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Gradients of weights that are yet to be made."""
    leaving: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    """Messages that have been begun, the oldest first. Of gloo's none is known to have gone before it is waited for."""


class ProgramRunner:
    """Runs programs on one rank's stage.

    Args:
        chunks: numbers of the stage's chunks in the whole pipeline, in order.
        num_chunks: of the whole pipeline.
        on_micro_batch: is told whose backward pass comes.
    """

    def __init__(
        self,
        stage: Stage,
        axes: Axes,
        chunks: Sequence[int],
        num_chunks: int,
        *,
        hold_back: HoldBack,
        make_held: MakeHeld,
        on_micro_batch: Callable[[int], None] = lambda micro_batch: None,
    ):
        self._stage, self._axes, self._num_chunks = stage, axes, num_chunks
        self._local = {chunk: number for number, chunk in enumerate(chunks)}
        self._last = chunks[-1]
        self._hold_back, self._make_held, self._on_micro_batch = hold_back, make_held, on_micro_batch
        self._like = next(iter(stage.parameters()))

    def train(self, program: Program, batches: Sequence[Batch], scale: Tensor | float) -> Tensor:
        """All passes of a step. Returns the sum of the micro-batches' losses, fp32 scalar: 0 without the last chunk."""
        return self._run(program, _Step(batches, scale, self._zero())).loss

    @torch.no_grad()
    def evaluate(self, program: Program, batches: Sequence[Batch]) -> Tensor:
        """The sum of all cross-entropies, the same way."""
        return self._run(program, _Step(batches, 1.0, self._zero())).loss

    @torch.no_grad()
    def token_losses(self, program: Program, batches: Sequence[Batch]) -> list[Tensor]:
        """Each token's cross-entropy, fp32 `[t]` by micro-batch: zeros without the last chunk."""
        losses = [torch.zeros_like(batch.loss_mask, dtype=torch.float32) for batch in batches]
        self._run(program, _Step(batches, 1.0, self._zero(), losses))
        return losses

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float32, device=self._like.device)

    def _run(self, program: Program, step: _Step) -> _Step:
        do = {"F": self._forward, "B": self._backward, "I": self._input_gradient, "W": self._weight_gradient}
        for instruction in program:
            if instruction.what == "do":
                with span(PHASES_OF_KINDS[instruction.operation.kind] if torch.is_grad_enabled() else "evaluate"):
                    do[instruction.operation.kind](step, instruction.operation)
            elif instruction.what == "send":
                self._send(step, instruction.operation, instruction.peer)
            else:
                self._receive(step, instruction.operation, instruction.peer)
        self._let_go(step, 0)
        left = [*step.kept, *step.held, *step.arriving, *step.streams]
        assert not left, f"the program, which was proven, has left {left}"
        return step

    def _forward(self, step: _Step, operation: Operation) -> None:
        _, chunk, micro_batch = operation
        batch = step.batches[micro_batch]
        documents = step.documents.pop(micro_batch, None) or _documents(batch, step.scale)
        if chunk < self._last:
            step.documents[micro_batch] = documents  # with its rotations, which chunks share
        x = batch.tokens if chunk == 0 else self._take(step, (True, chunk - 1, micro_batch))
        if chunk > 0 and torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        targets = None
        if chunk == self._num_chunks - 1:
            targets = targets_of_batch(batch, step.scale)
            targets.losses = None if step.losses is None else step.losses[micro_batch]
        y = self._stage(x, documents, targets, self._local[chunk])
        if targets is not None:
            step.loss += y.detach()
        else:
            step.streams[True, chunk, micro_batch] = y.detach()
        if torch.is_grad_enabled():
            of_pass = y if targets is not None else get_gradient_edge(y) if y.requires_grad else None
            step.kept[chunk, micro_batch] = x, of_pass

    def _backward(self, step: _Step, operation: Operation) -> None:
        _, chunk, micro_batch = operation
        x, y = step.kept.pop((chunk, micro_batch))
        is_last = chunk == self._num_chunks - 1
        grad = None if is_last else self._take(step, (False, chunk + 1, micro_batch))
        self._on_micro_batch(micro_batch)
        if y is not None:  # else all that the first chunk has is frozen
            torch.autograd.backward(y, grad)
        if chunk > 0:
            assert x.grad is not None, "the stream of a chunk is a leaf"
            step.streams[False, chunk, micro_batch] = x.grad

    def _input_gradient(self, step: _Step, operation: Operation) -> None:
        with self._hold_back() as held:
            self._backward(step, operation)
        step.held[operation.chunk, operation.micro_batch] = held

    def _weight_gradient(self, step: _Step, operation: Operation) -> None:
        self._on_micro_batch(operation.micro_batch)
        self._make_held(step.held.pop((operation.chunk, operation.micro_batch)))

    def _take(self, step: _Step, made: Pass) -> Tensor:
        """What another pass has made: here, or where a message has come from."""
        if made not in step.arriving:
            return step.streams.pop(made)
        work, stream = step.arriving.pop(made)
        work.wait()
        return stream

    def _send(self, step: _Step, operation: Operation, peer: int) -> None:
        made = made_by(operation)
        assert made is not None
        stream = step.streams.pop(made).contiguous()
        work = dist.isend(stream, self._axes.pp.global_ranks[peer], self._axes.pp.group, self._tag(made))
        assert work is not None
        step.leaving.append((work, stream))
        self._let_go(step, SENDS_UNDER_WAY)

    def _let_go(self, step: _Step, most: int) -> None:
        """Forget messages that have gone, and wait until no more than so many have not. That ends: in the proof every
        send waits at once."""
        while step.leaving and (len(step.leaving) > most or step.leaving[0][0].is_completed()):
            work, _ = step.leaving.popleft()
            work.wait()

    def _receive(self, step: _Step, operation: Operation, peer: int) -> None:
        made = made_by(operation)
        assert made is not None
        num_tokens = step.batches[operation.micro_batch].tokens.shape[0]
        spec = self._stage.spec
        rows = num_tokens // spec.tp.size if spec.sequence_parallel else num_tokens
        stream = self._like.new_empty(rows, spec.model.hidden_size, requires_grad=False)
        work = dist.irecv(stream, self._axes.pp.global_ranks[peer], self._axes.pp.group, self._tag(made))
        assert work is not None
        step.arriving[made] = work, stream

    def _tag(self, made: Pass) -> int:
        """By which gloo tells messages apart; NCCL goes by their order, which the program has proven right."""
        is_forward, chunk, micro_batch = made
        return 2 * (micro_batch * self._num_chunks + chunk) + is_forward


def _documents(batch: Batch, scale: Tensor | float) -> Documents:
    """Of a micro-batch whose valid tokens weigh so much in the loss."""
    documents = documents_of_batch(batch)
    documents.loss_weights = loss_weights(batch) * scale
    return documents
