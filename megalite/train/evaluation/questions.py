"""Multiple-choice questions: their file, and what they become in tokens.

    {"context": "The capital of France is", "choices": ["Rome", "Paris"], "label": 1}

Each choice is asked for by itself: how likely does the model find it behind the context? The cut between the two is
made as EleutherAI's lm-evaluation-harness makes it, so that scores agree: spaces at the end of a context go over to the
choice, both are tokenized together, and what the tokens of the context alone do not cover is the choice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.errors import DataError
from megalite.tokenizer.tokenizer import FAST_FILE, Tokenizer

FORMAT = '{"context": "The capital of France is", "choices": ["Rome", "Paris"], "label": 1}'

MAX_PROBLEMS = 10
"""Lines of one file that are complained about."""


@dataclass(frozen=True)
class Question:
    """One question."""

    context: str
    choices: tuple[str, ...]
    label: int
    """Number of the right choice, from 0."""
    delimiter: str = " "
    """Between context and choice."""


@dataclass(frozen=True)
class Request:
    """One choice behind its context, in tokens: the model reads all but the last, and the last ones are scored."""

    tokens: tuple[int, ...]
    num_scored: int
    """Tokens at the end that belong to the choice."""

    @property
    def length(self) -> int:
        """Tokens that the model reads."""
        return len(self.tokens) - 1


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The questions of a jsonl file.

    Raises:
        DataError: it is missing or empty, or a line is not a question; the lines are named.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); a task is a jsonl file with lines like {FORMAT}") from error
    questions: list[Question] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(questions) == limit:
            break
        try:
            questions.append(_question(json.loads(line)))
        except (ValueError, RecursionError) as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise DataError("\n".join([*problems[:MAX_PROBLEMS], *more, f"expected lines like {FORMAT}"]))
    if not questions:
        raise DataError(f"{path}: empty; expected lines like {FORMAT}")
    return questions


def make_requests(question: Question, tokenizer: Tokenizer, seq_len: int, prefix: Sequence[int] = ()) -> list[Request]:
    """The requests of a question's choices. A context that is too long loses its beginning.

    Args:
        prefix: what the tokenizer puts before every text (`text_prefix`).

    Raises:
        DataError: a choice alone is longer than `seq_len`, or has no tokens of its own.
    """
    return [
        _request(question.context, question.delimiter + choice, tokenizer, seq_len, prefix)
        for choice in question.choices
    ]


def text_prefix(folder: Path) -> list[int]:
    """The tokens that a tokenizer's own template puts before every text: for the models of others, often BOS."""
    if not (folder / FAST_FILE).is_file():
        return []
    from tokenizers import Tokenizer as FastTokenizer

    tokenizer = FastTokenizer.from_file(str(folder / FAST_FILE))
    own, framed = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    return next((framed[:n] for n in range(len(framed)) if framed[n : n + len(own)] == own), [])


def _question(record: Any) -> Question:
    """Raises ValueError for what is not a question."""
    if not isinstance(record, dict):
        raise ValueError(f"found {type(record).__name__}, expected an object")
    unknown = record.keys() - {"context", "choices", "label", "delimiter", "id"}
    if unknown:
        raise ValueError(f"unknown key {min(unknown)!r}; expected context, choices, label, and delimiter or id")
    context, choices, label = (record.get(key) for key in ("context", "choices", "label"))
    delimiter = record.get("delimiter", " ")
    if not isinstance(context, str) or not isinstance(delimiter, str):
        raise ValueError("context and delimiter must be texts")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("choices must be a list of two or more texts")
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(choices):
        raise ValueError(f"label must be a number from 0 to {len(choices) - 1}, found {label!r}")
    for text in (context, delimiter, *choices):
        text.encode()  # half of a surrogate pair is no text, which it says
    return Question(context, tuple(choices), label, delimiter)


def _request(context: str, continuation: str, tokenizer: Tokenizer, seq_len: int, prefix: Sequence[int]) -> Request:
    kept = context.rstrip()
    context, continuation = kept, context[len(kept) :] + continuation
    if context:
        whole, first = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
        whole, first = [*prefix, *whole], len(prefix) + first
    else:  # a document begins behind the end of another
        start = list(prefix) or [tokenizer.eos_id]
        whole, first = [*start, *tokenizer.encode(continuation)], len(start)
    num_scored = len(whole) - first
    if num_scored < 1 or num_scored > seq_len:
        what = "no tokens of its own" if num_scored < 1 else f"{num_scored} tokens, more than seq_len={seq_len}"
        raise DataError(f"the choice {continuation!r} behind {context[-40:]!r} has {what}; change or remove it")
    return Request(tuple(whole[-(seq_len + 1) :]), num_scored)
