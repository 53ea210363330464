"""Conversations as tokens, and which of these are learnt: a chat template's text, cut where answers begin and end.

    messages --template--> <|user|>two and two?<|end|>\n<|assistant|>four<|end|>\n
    learnt                                                            ^^^^^^^^^^^^

Where answers stand is said in `chat_template.py`. The text is encoded in parts that meet at their borders, so that no
token lies across one: what stands before an answer has the ids that it has when a model is asked. A tokenizer that puts
a blank before every part (Llama's of old) gets the text in one piece; a token across a border is then the answer's, as
in transformers' mask, and counted.

Nobody's words become control tokens: where a message spells one, parts meet inside of it.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megalite.errors import DataError
from megalite.tokenizer.chat_template import ChatTemplate, Messages, UnlearnableError, named_tokens, read_template
from megalite.tokenizer.settings import ChatConfig
from megalite.tokenizer.tokenizer import FAST_FILE

GUARDS = [chr(code) for code in range(0xF8F0, 0xF900)]
"""Characters of nobody's: one that a conversation lacks stands, while it is rendered, in control tokens it spells."""


class AnswerSpan(NamedTuple):
    """Characters of an answer, and what each token of it weighs."""

    start: int
    stop: int
    weight: float


@dataclass(frozen=True)
class EncodedChat:
    """One conversation as tokens."""

    ids: np.ndarray
    """int64 [tokens]"""
    weights: np.ndarray
    """float32 [tokens], of each as a label."""
    num_messages_cut: int
    """Messages at its end that did not fit."""
    num_across: int
    """Tokens that lie across the border of an answer."""


class ChatEncoder:
    """Conversations to tokens and their weights.

    Args:
        folder: the tokenizer's, with a tokenizer.json.
        config: what is learnt; `max_tokens` is set.
        eos_id: ends answers of templates that end them by nothing.

    Raises:
        DataError: there is no template, or no tokenizer.json.
    """

    def __init__(self, folder: Path, config: ChatConfig, eos_id: int):
        from tokenizers import Tokenizer as FastTokenizer
        from tokenizers import processors

        if not (folder / FAST_FILE).is_file():
            raise DataError(f"{folder}: has no {FAST_FILE}, by which text and tokens of conversations are matched")
        self._config, self._eos_id = config, eos_id
        self._tokenizer = FastTokenizer.from_file(str(folder / FAST_FILE))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # offsets with their blanks
        added = self._tokenizer.get_added_tokens_decoder().values()
        control = [token.content for token in added if token.special]
        name = str(config.template or folder)
        variables = {**named_tokens(folder), **config.variables}
        self._template = ChatTemplate(read_template(folder, config.template), name, variables, control)

    def encode(self, conversation: Mapping[str, Any]) -> EncodedChat:
        """One conversation, cut at turns where it is too long and the settings allow that.

        Args:
            conversation: `messages`, and `tools` and `weight` if there are any.

        Raises:
            UnlearnableError: it is refused by the template, too long, or nothing of it would be learnt.
            DataError: answers cannot be found with this template.
        """
        messages = conversation["messages"]
        ends = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
        stops = [len(messages)]
        if self._config.too_long == "cut":
            stops += [number + 1 for number in reversed(ends) if number + 1 < len(messages)]
        assert self._config.max_tokens is not None, "filled in"
        for stop in stops:
            found = self._encode(messages[:stop], conversation, len(messages) - stop)
            if found.ids.size <= self._config.max_tokens and found.weights[1:].any():
                return found
        if found.ids.size <= self._config.max_tokens:
            raise UnlearnableError("nothing in it is learnt")
        raise UnlearnableError("too long")

    def encode_pair(self, conversation: Mapping[str, Any]) -> list[EncodedChat]:
        """Both sides of a pair, whole, the chosen one first.

        Args:
            conversation: `messages` and `rejected`, and `tools` if there are any.

        Raises:
            UnlearnableError: as `encode`; the sides are too long together.
            DataError: as `encode`; all turns are to be learnt.
        """
        if self._config.learn == "all":
            raise DataError("chat.learn: all would learn the questions of pairs, which no one prefers; use answers")
        sides = [self._encode(conversation[name], conversation, 0) for name in ("messages", "rejected")]
        assert self._config.max_tokens is not None, "filled in"
        if sum(each.ids.size for each in sides) > self._config.max_tokens:
            raise UnlearnableError("too long")
        if not all(each.weights[1:].any() for each in sides):
            raise UnlearnableError("nothing in it is learnt")
        return sides

    def _encode(self, messages: Messages, conversation: Mapping[str, Any], num_cut: int) -> EncodedChat:
        guard = next((char for char in GUARDS if char not in json.dumps(conversation, ensure_ascii=False)), None)
        if guard is None:
            raise UnlearnableError("private characters of every kind")
        plain = [{key: value for key, value in each.items() if key != "weight"} for each in messages]
        tools = conversation.get("tools")
        text, places = self._template.answers(self._guarded(plain, guard), self._guarded(tools, guard))
        spans = self._spans(text, places, messages, float(conversation.get("weight", 1.0)))
        needs_end = (
            bool(places) and not self._template.ends_turn(text, places[-1][1]) and not text[places[-1][1] :].strip()
        )
        found = [i for i, char in enumerate(text) if char == guard] if guard in text else []
        spans = [
            AnswerSpan(start - bisect(found, start - 1), stop - bisect(found, stop - 1), own)
            for start, stop, own in spans
        ]
        breaks = [place - number for number, place in enumerate(found)]
        ids, offsets = self._tokens(text.replace(guard, ""), breaks, spans)
        weights, num_across = _weigh(offsets, spans, len(text))
        if needs_end:
            last = places[-1][1] - len(found)
            cut = int(np.searchsorted(offsets[:, 0], last))
            ids = np.append(ids[:cut], self._eos_id)
            weights = np.append(weights[:cut], next(own for start, stop, own in spans if stop == last and start < stop))
        return EncodedChat(ids, weights.astype(np.float32), num_cut, num_across)

    def _guarded(self, value: Any, guard: str) -> Any:
        """The same, with a guard in each control token that is spelt out in a text."""
        if isinstance(value, Mapping):
            return {key: self._guarded(each, guard) for key, each in value.items()}
        if isinstance(value, list):
            return [self._guarded(each, guard) for each in value]
        if not isinstance(value, str):
            return value
        for place in reversed(list(self._template.spelt_in(value))):
            value = value[:place] + guard + value[place:]
        return value

    def _spans(self, text: str, places: list[tuple[int, int]], messages: Messages, weight: float) -> list[AnswerSpan]:
        """The stretches that are learnt, in order, and what they weigh."""
        own = [float(each.get("weight", 1.0)) for each in messages if each["role"] == "assistant"]
        if len(own) != len(places):
            if set(own) != {1.0}:
                raise DataError(
                    f"{self._template.name}: {len(places)} generation blocks for {len(own)} answers, which have "
                    "weights of their own: these cannot be told apart"
                )
            own = [1.0] * len(places)
        if self._config.learn == "last":
            own = [0.0] * (len(own) - 1) + own[-1:]
        spans = [AnswerSpan(*place, weight * each) for place, each in zip(places, own, strict=True)]
        if self._config.learn == "all":
            borders = [0, *(place for span in spans for place in span[:2]), len(text)]
            rest = [AnswerSpan(start, stop, weight) for start, stop in zip(borders[::2], borders[1::2], strict=True)]
            spans = sorted([*rest[:-1], *spans, rest[-1]], key=lambda span: span[:2])
        return spans

    def _tokens(self, text: str, breaks: Sequence[int], spans: Sequence[AnswerSpan]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a text, int64 [tokens], and the characters of each, int64 [tokens, 2].

        Args:
            breaks: inside of control tokens that are text.
        """
        if breaks and self._adds_blanks:
            raise UnlearnableError("spells a control token, which this tokenizer cannot take for text")
        borders = {0, len(text), *breaks}
        if not self._adds_blanks:
            borders |= {place for span in spans for place in span[:2]}
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, stop in itertools.pairwise(sorted(borders)):
            found = self._tokenizer.encode(text[start:stop], add_special_tokens=False)
            ids += found.ids
            offsets += [(start + first, start + last) for first, last in found.offsets]
        return np.array(ids, np.int64), np.array(offsets, np.int64).reshape(-1, 2)

    @cached_property
    def _adds_blanks(self) -> bool:
        """Whether a text in two parts would get a blank between them."""
        return any(_puts_blank(each) for each in _parts(json.loads(self._tokenizer.to_str())))


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Normalisers and pre-tokenizers in a tokenizer.json, however deep."""
    for key in ("normalizer", "pre_tokenizer"):
        waiting = [value.get(key)]
        while waiting:
            each = waiting.pop()
            if isinstance(each, dict):
                yield each
                waiting += each.get("normalizers", []) + each.get("pretokenizers", [])


def _puts_blank(part: dict[str, Any]) -> bool:
    if part.get("type") == "Metaspace":
        return part.get("prepend_scheme", "always") != "never"
    return part.get("type") == "Prepend" or bool(part.get("add_prefix_space"))


def _weigh(offsets: np.ndarray, spans: Sequence[AnswerSpan], num_chars: int) -> tuple[np.ndarray, int]:
    """What each token weighs, float64 [tokens], and how many lie across the border of a span."""
    of_chars = np.zeros(num_chars + 1)
    of_span = np.full(num_chars + 1, -1)
    for number, (start, stop, weight) in enumerate(spans):
        of_chars[start:stop], of_span[start:stop] = weight, number
    firsts, lasts = offsets[:, 0], np.maximum(offsets[:, 1] - 1, offsets[:, 0])
    weights = np.maximum(of_chars[firsts], of_chars[lasts])
    across = (of_span[firsts] != of_span[lasts]) & (of_chars[firsts] != of_chars[lasts])
    return weights, int(across.sum())
