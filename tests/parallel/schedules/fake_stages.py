"""Programs run on stages that compute with integers: what a pipeline must come to, whatever its schedule.

A chunk c multiplies what goes through it by 2 c + 3, forward and backward, modulo a prime, and adds up for its weight
what came in times what came back. Messages wait for each other, as the strictest network would have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megalite.parallel.schedules.operations import ChunkPlacement, Operation
from megalite.parallel.schedules.programs import Program

PRIME = 1_000_003


class Outcome(NamedTuple):
    """What a step comes to."""

    loss: int
    weights: tuple[int, ...]
    """Of each chunk, the sum of its weight's gradients."""


def factor(chunk: int) -> int:
    return 2 * chunk + 3


def expected(num_chunks: int, num_micro_batches: int) -> Outcome:
    """One micro-batch after the other, without a pipeline."""
    loss, weights = 0, [0] * num_chunks
    for micro_batch in range(num_micro_batches):
        inputs = [micro_batch + 1]
        for chunk in range(num_chunks):
            inputs.append(inputs[-1] * factor(chunk) % PRIME)
        loss, gradient = loss + inputs[-1], inputs[-1]
        for chunk in reversed(range(num_chunks)):
            weights[chunk] = (weights[chunk] + inputs[chunk] * gradient) % PRIME
            gradient = gradient * factor(chunk) % PRIME
    return Outcome(loss, tuple(weights))


def run(programs: Sequence[Program], placement: ChunkPlacement) -> Outcome:
    """Run all ranks side by side.

    Raises:
        RuntimeError: ranks wait for each other for ever.
        KeyError: a pass does not find what it needs.
    """
    ranks = [_Rank(program, placement.num_chunks) for program in programs]
    waiting = {number: next(rank.steps, None) for number, rank in enumerate(ranks)}
    while any(waiting.values()):
        met = next(_meetings(waiting), None)
        if met is None:
            raise RuntimeError(f"no rank can go on: {waiting}")
        sender, receiver, key = met
        ranks[receiver].there[key] = ranks[sender].there.pop(key)
        for each in (sender, receiver):
            waiting[each] = next(ranks[each].steps, None)
    sums = [sum(rank.weights[chunk] for rank in ranks) % PRIME for chunk in range(placement.num_chunks)]
    return Outcome(sum(rank.loss for rank in ranks), tuple(sums))


def _meetings(waiting: dict) -> Iterator[tuple[int, int, tuple]]:
    """Two ranks of which one sends what the other receives."""
    for sender, message in waiting.items():
        if message is None or message[0] != "send":
            continue
        _, receiver, key = message
        if waiting[receiver] == ("receive", sender, key):
            yield sender, receiver, key


class _Rank:
    """One rank: `steps` goes through its program, and stops at every message."""

    def __init__(self, program: Program, num_chunks: int):
        self.there: dict[tuple[bool, int, int], int] = {}
        """What passes have made, here or elsewhere: forward or backward, chunk and micro-batch."""
        self.loss, self.weights = 0, [0] * num_chunks
        self._inputs: dict[tuple[int, int], int] = {}
        self._gradients: dict[tuple[int, int], int] = {}
        self._num_chunks = num_chunks
        self.steps = self._go(program)

    def _go(self, program: Program) -> Iterator[tuple[str, int, tuple[bool, int, int]]]:
        for instruction in program:
            kind, chunk, micro_batch = instruction.operation
            if instruction.what == "do":
                self._do(instruction.operation)
            else:
                yield instruction.what, instruction.peer, (kind == "F", chunk, micro_batch)

    def _do(self, operation: Operation) -> None:
        kind, chunk, micro_batch = operation
        is_last = chunk == self._num_chunks - 1
        if kind == "F":
            x = self.there.pop((True, chunk - 1, micro_batch)) if chunk else micro_batch + 1
            self._inputs[chunk, micro_batch] = x
            y = x * factor(chunk) % PRIME
            self.loss += y if is_last else 0
            self.there[True, chunk, micro_batch] = y
        if kind in "BI":
            key = (True, chunk, micro_batch) if is_last else (False, chunk + 1, micro_batch)
            gradient = self._gradients[chunk, micro_batch] = self.there.pop(key)
            self.there[False, chunk, micro_batch] = gradient * factor(chunk) % PRIME
        if kind in "BW":
            product = self._inputs.pop((chunk, micro_batch)) * self._gradients.pop((chunk, micro_batch))
            self.weights[chunk] = (self.weights[chunk] + product) % PRIME
