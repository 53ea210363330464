"""Whether a model finds what a long text has told it once: a needle in a haystack, at every length and depth.

    real text ... The code of Goraba is 1365. ... real text   The code of Goraba is | 1365
                 ^ depth: share of the text before it         what is asked at the end

Names and codes are drawn anew for each trial. A needle counts as found when every token of its code is the model's
likeliest, that is when greedy decoding would write the code. Made by chance that happens once in 9000 trials.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.errors import DataError, UserError
from megalite.model.transformer import Stage, documents_of
from megalite.train.evaluation.questions import Request

NEEDLE, QUESTION = "The code of {name} is {code}.", "The code of {name} is"
SYLLABLES = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "wu", "za")

FIRST_LENGTH = 512
"""Tokens of the shortest text, where none are named."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

SHORTFALL = 0.02
"""By this share a text may be shorter than asked: its end is a word's."""
LONGEST_WORD = 40
"""Characters; what has none so long is written without blanks."""
CHARS_A_TOKEN = 4
"""A first guess, which is corrected."""
MOST_TRIES = 12


Reader = Callable[[str], list[int]]

Prompts = tuple[int, float, list[Request]]
"""Length, depth, and the texts of each trial."""


@dataclass(frozen=True)
class NeedleTest:
    """What is asked."""

    lengths: tuple[int, ...]
    """Tokens that the model reads, question included."""
    depths: tuple[float, ...] = DEPTHS
    """Shares of the text that come before the needle, from 0 to 1."""
    trials: int = 4
    """Of each length and depth."""
    seed: int = 0


@dataclass(frozen=True)
class NeedleScore:
    """How one length and depth went."""

    length: int
    """As asked."""
    depth: float
    share: float
    """Of the trials, those whose code the model would have written."""
    loss: float
    """Mean cross-entropy of the codes' tokens, in nats."""
    tokens: int
    """Mean number that the model read."""

    def record(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)


def default_lengths(longest: int) -> tuple[int, ...]:
    """Doubling from `FIRST_LENGTH` up to what a model is meant for."""
    lengths = [min(FIRST_LENGTH, longest)]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return tuple(lengths)


def read_haystack(path: Path | None) -> str:
    """The text that hides needles; None for the reference of the language that comes with every Python.

    Raises:
        DataError: it cannot be read, or holds no text.
    """
    if path is None:
        from pydoc_data.topics import topics

        return _in_one_line(" ".join(topics.values()))
    try:
        text = _in_one_line(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error}); give a file of plain text") from error
    if not text:
        raise DataError(f"{path}: empty; give a file of plain text")
    return text


def make_prompts(test: NeedleTest, haystack: str, read: Reader) -> Iterator[Prompts]:
    """The texts of each length and depth, the longest last.

    Args:
        haystack: in one line.
        read: a text's tokens, with what the model's tokenizer puts before every text.

    Raises:
        DataError: a length has no room for needle and question.
    """
    for length in sorted(test.lengths):
        for depth in test.depths:
            drawn = random.Random(f"{test.seed}/{length}/{depth}")
            prompts = [_make_prompt(drawn, haystack, read, length, depth) for _ in range(test.trials)]
            yield length, depth, prompts


def find_needles(stage: Stage, prompts: Iterable[Prompts], device: torch.device) -> Iterator[NeedleScore]:
    """Ask a whole model, one text at a time.

    Raises:
        UserError: memory does not suffice for a length.
    """
    for length, depth, requests in prompts:
        try:
            answers = [_ask(stage, request, device) for request in requests]
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise UserError(f"{length} tokens do not fit into memory; leave this length out") from error
        share, loss = (sum(column) / len(answers) for column in zip(*answers, strict=True))
        yield NeedleScore(
            length, depth, share, loss, round(sum(request.length for request in requests) / len(requests))
        )


@torch.inference_mode()
def _ask(stage: Stage, request: Request, device: torch.device) -> tuple[bool, float]:
    """Whether the model would write the code, and the mean loss of its tokens."""
    tokens = torch.tensor([request.tokens[:-1]], device=device)
    wanted = torch.tensor(request.tokens[-request.num_scored :], device=device)
    logits = stage.logits(tokens.flatten(), documents_of(tokens), last=request.num_scored).float()
    loss = torch.nn.functional.cross_entropy(logits, wanted)
    return bool((logits.argmax(-1) == wanted).all()), loss.item()


def _make_prompt(drawn: random.Random, text: str, read: Reader, length: int, depth: float) -> Request:
    name = "".join(drawn.choices(SYLLABLES, k=3)).capitalize()
    code = str(drawn.randrange(1000, 10000))
    needle, question, start = (
        NEEDLE.format(name=name, code=code),
        QUESTION.format(name=name),
        drawn.randrange(len(text)),
    )

    def encoded(num_chars: int) -> list[int]:
        hay = _from(text, start, num_chars)
        before = hay if depth == 1.0 else _to_word(hay[: round(depth * len(hay))])
        return read(" ".join(filter(None, (before, needle, hay[len(before) :].strip(), question))))

    answer = read(f"{question} {code}")[len(read(question)) :]
    room, least = length + 1 - len(answer), len(encoded(0))
    if least > room:
        raise DataError(
            f"a text of {length} tokens leaves no room for needle and question, which take {least + len(answer)}; ask "
            "for longer texts with --lengths"
        )
    return Request((*_fill(encoded, room), *answer), len(answer))


def _fill(encoded: Callable[[int], list[int]], room: int) -> list[int]:
    """A text of as many characters as make at most `room` tokens, and not many less.

    Args:
        encoded: the tokens of a text with so many characters of hay.
    """
    best, num_best, num_chars = encoded(0), 0, CHARS_A_TOKEN * room
    most: float = math.inf
    for _ in range(MOST_TRIES):
        tokens = encoded(num_chars)
        if len(tokens) > room:
            most = num_chars
        else:
            best, num_best = tokens, num_chars
        missing = room - len(best)
        if missing <= SHORTFALL * room:
            break
        num_chars = int(min(num_best + 0.99 * missing * max(1, num_chars) / len(tokens), most - 1))
    return best


def _from(text: str, start: int, num_chars: int) -> str:
    """So many characters from somewhere in a text on, which begins anew at its end; whole words but the first."""
    repeated = text[start:] + " "
    while len(repeated) < num_chars:
        repeated += text + " "
    return _to_word(repeated[:num_chars])


def _to_word(text: str) -> str:
    """A text without the word at its end that may be cut; as it is, where words have no end, as in Chinese."""
    whole, blank, rest = text.rpartition(" ")
    return whole if blank and len(rest) <= LONGEST_WORD else text


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
