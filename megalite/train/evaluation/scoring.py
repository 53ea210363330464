"""Log-likelihoods of choices, on any layout: requests packed into streams, streams shared out over dp.

    questions -> requests -> streams of t tokens -> cross-entropy of each token -> sum over each choice -> accuracy

Requests are laid end to end as documents are in training, so they do not see each other, shapes are those of training,
and nothing is padded but the end of a stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalite.data.loader import Batch
from megalite.parallel.axes import SINGLE, Axis
from megalite.parallel.collectives import all_reduce
from megalite.train.evaluation.questions import Question, Request

TokenLosses = Callable[[Sequence[Batch]], Sequence[Tensor]]
"""The cross-entropy of every token `[t]` of some micro-batches, as `Engine.token_losses` computes it."""


@dataclass(frozen=True)
class Shape:
    """Of the micro-batches that an engine takes."""

    seq_len: int
    micro_batch_size: int
    batches_at_once: int = 1
    """Micro-batches in one call."""
    device: torch.device | str = "cpu"

    @property
    def num_tokens(self) -> int:
        """t, of a stream."""
        return self.seq_len * self.micro_batch_size


@dataclass(frozen=True)
class Score:
    """How a task went."""

    accuracy: float
    """Share of the questions whose right choice is the likeliest."""
    accuracy_norm: float
    """The same with each log-likelihood divided by the choice's length in characters."""
    num_questions: int

    @property
    def standard_error(self) -> float:
        """Of the accuracy, if the questions are a sample."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(1, self.num_questions - 1))

    def record(self) -> dict[str, Any]:
        """As events.jsonl keeps it."""
        return {
            "acc": self.accuracy,
            "acc_norm": self.accuracy_norm,
            "acc_stderr": self.standard_error,
            "num": self.num_questions,
        }


def log_likelihoods(
    requests: Sequence[Request], token_losses: TokenLosses, shape: Shape, dp: Axis = SINGLE
) -> list[float]:
    """The log-likelihood of each request's choice. Collective: every rank gets all of them.

    Args:
        requests: none longer than `shape.seq_len`.
        token_losses: of an engine.
        shape: of its micro-batches.
        dp: the data-parallel axis, over which the streams are shared out.
    """
    streams = _place([request.length for request in requests], shape.num_tokens)
    streams += [[]] * (-len(streams) % (dp.size * shape.batches_at_once))
    own = streams[dp.rank :: dp.size]
    found = np.zeros(len(requests))
    for first in range(0, len(own), shape.batches_at_once):
        group = own[first : first + shape.batches_at_once]
        batches = [_make_batch([requests[number] for number in stream], shape).to(shape.device) for stream in group]
        for stream, losses in zip(group, token_losses(batches), strict=True):
            nll = losses.double().cpu().numpy()  # a sync
            stop = 0
            for number in stream:
                stop += requests[number].length
                found[number] = -nll[stop - requests[number].num_scored : stop].sum()
    return all_reduce(torch.from_numpy(found).to(shape.device), dp).tolist()


def score(questions: Sequence[Question], log_likelihoods: Sequence[float]) -> Score:
    """Count the right answers.

    Args:
        log_likelihoods: of every choice of every question, in order.
    """
    values = iter(log_likelihoods)
    right, right_norm = 0, 0
    for question in questions:
        own = np.array([next(values) for _ in question.choices])
        lengths = np.array([len(choice) for choice in question.choices])
        right += int(np.argmax(own)) == question.label
        right_norm += int(np.argmax(own / lengths)) == question.label
    return Score(right / len(questions), right_norm / len(questions), len(questions))


def _place(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which requests each stream holds: in order, a new stream when the next one does not fit."""
    streams: list[list[int]] = []
    left = 0
    for number, length in enumerate(lengths):
        if length > left:
            streams.append([])
            left = room
        streams[-1].append(number)
        left -= length
    return streams


def _make_batch(requests: Sequence[Request], shape: Shape) -> Batch:
    """A stream of requests; what is left over at its end are spans that nobody looks at."""
    num_tokens = shape.num_tokens
    tokens, labels, positions = (np.zeros(num_tokens, np.int64) for _ in range(3))
    scored = np.zeros(num_tokens, bool)
    borders = [0]
    for request in requests:
        start, stop = borders[-1], borders[-1] + request.length
        tokens[start:stop], labels[start:stop] = request.tokens[:-1], request.tokens[1:]
        positions[start:stop] = np.arange(request.length)
        scored[stop - request.num_scored : stop] = True
        borders.append(stop)
    for stop in _cut(borders[-1], num_tokens, shape.seq_len):
        positions[borders[-1] : stop] = np.arange(stop - borders[-1])
        borders.append(stop)
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(scored),
        torch.from_numpy(positions),
        torch.tensor(borders, dtype=torch.int32),
        shape.seq_len,
        torch.arange(num_tokens),
    )


def _cut(start: int, stop: int, longest: int) -> Iterator[int]:
    """The ends of spans that fill what is left."""
    while start < stop:
        start = min(start + longest, stop)
        yield start
