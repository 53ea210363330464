"""What stations do with conversations: repair what is said in them, refuse to edit them, make tokens of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megalite.corpus.conversations import (
    METADATA_KEY,
    REJECTED,
    Conversation,
    from_metadata,
    has_empty_turn,
    text_of,
    to_metadata,
    with_data,
    with_prose,
)
from megalite.corpus.documents import ARROW_TYPE, DocumentBatch, Rejected, with_column
from megalite.corpus.json_texts import Visit
from megalite.data.indexed import WEIGHT_DTYPE
from megalite.errors import DataError
from megalite.texts import Texts
from megalite.tokenizer.chat import ChatEncoder
from megalite.tokenizer.chat_template import UnlearnableError, read_template
from megalite.tokenizer.settings import ChatConfig
from megalite.tokenizer.tokenizer import Tokenizer

Change = Callable[[Texts], tuple[Texts, Mapping[str, int]]]
"""Repairs texts, and counts what it replaced."""


def has_conversations(documents: pa.RecordBatch) -> bool:
    """Whether some documents of a batch may be conversations."""
    return bool(pc.any(pc.match_substring(documents.column("metadata"), METADATA_KEY)).as_py())


EDITS = "edits texts, and a conversation stays whole or goes; leave it out where there are any"


def refuse_conversations(documents: pa.RecordBatch, why: str) -> None:
    """What works on texts alone would miss what is said in a conversation.

    Raises:
        DataError: there is one among the documents.
    """
    if has_conversations(documents):
        raise DataError(f"found conversations: {why}")


class Repaired(NamedTuple):
    """A batch whose conversations are repaired."""

    documents: pa.RecordBatch
    is_conversation: np.ndarray
    """bool [documents]"""
    replaced: Counter[str]
    """What was replaced in conversations, by kind."""


def repaired(documents: pa.RecordBatch, change: Change, redact: Change | None) -> Repaired:
    """The documents with their conversations repaired. One of which a turn is left empty has no text any more.

    Args:
        documents: columns of SCHEMA.
        change: repairs and redacts what is said and thought.
        redact: does that alone to all else that templates are given: blanks in what a tool is called with are meant.
            None leaves it as it is.
    """
    is_conversation = np.zeros(len(documents), bool)
    if not has_conversations(documents):
        return Repaired(documents, is_conversation, Counter())
    metadata = documents.column("metadata").to_pylist()
    texts = documents.column("text").to_pylist()
    found = {row: each for row, text in enumerate(metadata) if (each := from_metadata(text)) is not None}
    before = list(found.values())
    conversations, replaced = _changed(before, with_prose, lambda texts, names: change(Texts.of(texts)))
    also: Mapping[str, int] = {}
    if redact is not None:
        conversations, also = _changed(conversations, with_data, partial(_redacted, redact))
    for row, old, conversation in zip(found, before, conversations, strict=True):
        texts[row] = "" if has_empty_turn(conversation) else text_of(conversation)
        if conversation is not old:
            metadata[row] = to_metadata(conversation, metadata[row])
    is_conversation[list(found)] = True
    documents = with_column(documents, "metadata", pa.array(metadata, ARROW_TYPE))
    documents = with_column(documents, "text", pa.array(texts, ARROW_TYPE))
    return Repaired(documents, is_conversation, Counter(replaced) + Counter(also))


def _changed(
    conversations: Sequence[Conversation],
    walk: Callable[[Conversation, Visit], Conversation],
    change: Callable[[list[str], list[str]], tuple[Iterable[str], Mapping[str, int]]],
) -> tuple[list[Conversation], Mapping[str, int]]:
    """The conversations with all texts changed that a walk visits, in one go, and what was replaced.

    Args:
        conversations: not changed.
        walk: goes through the texts of one.
        change: of texts and the names of the fields that hold them.
    """
    texts: list[str] = []
    names: list[str] = []

    def gather(text: str, name: str) -> str:
        texts.append(text)
        names.append(name)
        return text

    borders = [0]
    for each in conversations:
        walk(each, gather)
        borders.append(len(texts))
    if not texts:
        return list(conversations), {}
    found, replaced = change(texts, names)
    new, changed = list(found), []
    for each, (begin, end) in zip(conversations, itertools.pairwise(borders), strict=True):
        is_same = new[begin:end] == texts[begin:end]
        changed.append(each if is_same else walk(each, _in_turn(new[begin:end])))
    return changed, replaced


def _in_turn(texts: list[str]) -> Visit:
    """Puts these in the places that a walk visits."""
    left = iter(texts)
    return lambda _text, _name: next(left)


def _redacted(redact: Change, texts: list[str], names: list[str]) -> tuple[Iterable[str], Mapping[str, int]]:
    """The texts redacted, first where only the name before one tells that it is secret; and what was replaced."""
    texts, assigned = _behind_names(redact, texts, names)
    changed, others = redact(Texts.of(texts))
    return changed, Counter(assigned) + Counter(others)


def _behind_names(redact: Change, texts: list[str], names: list[str]) -> tuple[list[str], Mapping[str, int]]:
    """The texts redacted where they stand behind their names, which alone tell that some are secret; and what was
    replaced."""
    lines = [f'{name}: "{text}"' for name, text in zip(names, texts, strict=True)]
    changed, redacted = list(texts), redact(Texts.of(lines))[0]
    for number, (name, line) in enumerate(zip(names, redacted, strict=True)):
        if line.startswith(f'{name}: "') and line.endswith('"'):  # or the name itself was replaced
            changed[number] = line[len(name) + 3 : -1]
    told = [line for line, old, new in zip(lines, texts, changed, strict=True) if old != new]
    return changed, redact(Texts.of(told))[1]


COUNTED = ("conversations", "pairs", "conversations_cut", "messages_cut", "tokens_learnt", "tokens_across_borders")
"""What is told of conversations."""


class MixedEncoder:
    """Batches of plain documents and conversations to tokens with weights.

    Args:
        folder: the tokenizer's.
        tokenizer: loaded from there.
        config: what of conversations is learnt, its `max_tokens` filled in.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, config: ChatConfig):
        self._tokenizer, self._config = tokenizer, config
        self._chats = chat_encoder(folder, tokenizer, config)
        self.tally: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.rejected: list[Rejected] = []

    def encode(self, batch: DocumentBatch, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The wanted documents of a batch.

        Args:
            wanted: bool [documents]; False is put where a conversation cannot be learnt.

        Returns:
            Tokens end to end, their weights in `WEIGHT_DTYPE`, and the number of each document's: a pair is two, the
            chosen side first.

        Raises:
            DataError: a conversation cannot be learnt and on_error is `fail`, or answers cannot be told apart.
        """
        self.rejected = []
        names = batch.documents.column("id").to_pylist(), batch.documents.column("source").to_pylist()
        metadata, parts = batch.documents.column("metadata").to_pylist(), []
        for row in np.flatnonzero(wanted).tolist():
            conversation = from_metadata(metadata[row])
            if conversation is None:
                ids = np.append(self._tokenizer.encode(batch.texts[row]), self._tokenizer.eos_id)
                parts.append((ids, np.ones(ids.size)))
            elif (own := self._learn(conversation, names[0][row], names[1][row], batch.texts[row])) is not None:
                parts += own
            else:
                wanted[row] = False
        tokens = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in parts)])
        weights = np.concatenate([np.zeros(0), *(own for _, own in parts)]).astype(WEIGHT_DTYPE)
        self.tally["tokens_learnt"] += int((weights > 0).sum())
        return tokens, weights, np.array([ids.size for ids, _ in parts], np.int64)

    def _learn(
        self, conversation: dict[str, Any], id: str, source: str, text: str
    ) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Of one conversation, or of both sides of a pair; None where it is put aside."""
        try:
            found = (
                self._chats.encode_pair(conversation)
                if REJECTED in conversation
                else [self._chats.encode(conversation)]
            )
        except UnlearnableError as error:
            if self._config.on_error == "fail":
                raise DataError(f"{source}: {id}: {error}; set chat.on_error: drop to count it and go on") from error
            self.rejected.append(Rejected(id, source, text, f"conversation: {error}"))
            return None
        self.tally.update(
            conversations=1,
            pairs=int(len(found) > 1),
            conversations_cut=int(found[0].num_messages_cut > 0),
            messages_cut=found[0].num_messages_cut,
            tokens_across_borders=sum(each.num_across for each in found),
        )
        return [(each.ids, each.weights) for each in found]


def chat_encoder(folder: Path, tokenizer: Tokenizer, config: ChatConfig) -> ChatEncoder:
    """The encoder of conversations, which a process keeps from shard to shard, as long as it is the same one.

    Raises:
        DataError: there is no template, or no tokenizer.json.
    """
    return _make_once(folder, (tokenizer.fingerprint, read_template(folder, config.template)), config, tokenizer.eos_id)


@lru_cache(maxsize=1)
def _make_once(folder: Path, _fingerprints: tuple[str, str], config: ChatConfig, eos_id: int) -> ChatEncoder:
    return ChatEncoder(folder, config, eos_id)
