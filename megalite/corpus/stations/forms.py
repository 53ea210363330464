"""The forms that documents take as tokens: a text and its end, a conversation, a text with a hole to be filled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from pydantic import NonNegativeInt, PositiveInt

from megalite.corpus.documents import DocumentBatch, Rejected
from megalite.corpus.stations.conversing import MixedEncoder, chat_encoder, refuse_conversations
from megalite.data.indexed import WEIGHT_DTYPE
from megalite.errors import DataError
from megalite.section import Problem, Section
from megalite.tokenizer.chat_template import read_template
from megalite.tokenizer.fill_in import FillIn, sentinel_ids
from megalite.tokenizer.settings import ChatConfig, FillInConfig
from megalite.tokenizer.tokenizer import Tokenizer

LEAST_CONTEXT = 16
"""Tokens of a sequence that texts are taken apart for."""

NO_WEIGHTS = np.zeros(0, WEIGHT_DTYPE)


class DocumentEncoder(Protocol):
    """Makes tokens of a shard's documents, batch by batch."""

    @property
    def rejected(self) -> Sequence[Rejected]:
        """Of the last batch: what could not be encoded."""
        ...

    def encode(self, batch: DocumentBatch, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of the wanted documents end to end, their loss weights if there are any, and the number of each
        document's. `wanted`, bool [documents], becomes False for those that are put aside."""
        ...

    def counts(self) -> dict[str, int]:
        """What became of the shard's documents, by name."""
        ...


@dataclass(frozen=True)
class Forms:
    """Which forms there are; none are plain texts."""

    chat: ChatConfig | None = None
    """Conversations, its `max_tokens` filled in."""
    fim: FillInConfig | None = None
    """Holes to be filled."""
    seq_len: int = 0
    """Of the sequences that will be packed; what `fim` at the level of contexts cuts by."""
    seed: int = 0

    def settings(self, tokenizer: Path) -> dict[str, Any]:
        """By which a finished folder is known; nothing where there are none."""
        found: dict[str, Any] = {}
        if self.chat is not None:
            text = read_template(tokenizer, self.chat.template)
            chat = self.chat.model_dump(mode="json", exclude={"template"})
            found["chat"] = {**chat, "template": xxhash.xxh3_128_hexdigest(text.encode())}
        if self.fim is not None:
            found["fim"] = {**self.fim.model_dump(mode="json"), "seed": self.seed, "seq_len": self._fim_length}
        return found

    @property
    def _fim_length(self) -> int | None:
        return self.seq_len if self.fim is not None and self.fim.level == "context" else None

    def check(self, tokenizer: Tokenizer, *, describe: bool) -> None:
        """Whether a tokenizer has what they need, and whether each document can be described.

        Raises:
            DataError: a token is missing, there is no template, or documents are taken apart that are to be described.
        """
        if describe and self.fim is not None and self.fim.level == "context":
            raise DataError(
                "--describe has a line for each document, and fim.level=context makes several of one; leave one out"
            )
        if self.fim is not None:
            sentinel_ids(tokenizer, self.fim)
        if self.chat is not None:
            chat_encoder(tokenizer.folder.absolute(), tokenizer, self.chat)

    def task(self) -> dict[str, Any]:
        """What a task is told; JSON-ready."""
        chat, fim = (None if each is None else each.model_dump(mode="json") for each in (self.chat, self.fim))
        if chat is not None and self.chat is not None and self.chat.template is not None:
            chat["template"] = str(self.chat.template.absolute())
        return {"chat": chat, "fim": fim, "seq_len": self._fim_length, "seed": self.seed}

    def refuse_without_effect(self, counts: Mapping[str, Any], part: str) -> None:
        """What was asked for and met no document is a mistake.

        Raises:
            DataError: there was no conversation.
        """
        if self.chat is not None and part != "valid" and not counts["conversations"]:
            why = ", ".join(f"{reason}: {count}" for reason, count in counts["rejected"].items())
            raise DataError(
                f"chat: no document is a conversation that can be learnt ({why or 'all are plain texts'}); set "
                "`conversations` of a source, or leave chat out"
            )

    def in_words(self, counts: Mapping[str, Any]) -> str:
        """What became of the documents, for people."""
        told = ""
        if self.chat is not None:
            dropped = sum(count for why, count in counts["rejected"].items() if why.startswith("conversation: "))
            told += f"; {counts['conversations']:,} conversations, {counts['tokens_learnt']:,} tokens learnt"
            told += f", {counts['conversations_cut']:,} cut, {dropped:,} dropped"
        if self.fim is not None:
            holes = counts["psm"] + counts["spm"]
            told += f"; {holes:,} of {counts['fim_pieces']:,} with a hole ({counts['spm']:,} SPM)"
        return told


class FormsConfig(Section):
    """What may be said of forms outside of a recipe, where nothing says how long sequences are."""

    chat: ChatConfig | None = None
    """Conversations."""
    fim: FillInConfig | None = None
    """Texts with holes."""
    seq_len: PositiveInt | None = None
    """Tokens in a sequence, for fim.level=context."""
    seed: NonNegativeInt = 0
    """Of what is taken apart."""

    def problems(self) -> Iterator[Problem]:
        if self.chat is not None and self.chat.max_tokens is None:
            yield ("chat", "max_tokens"), "is missing: give the seq_len that the tokens will be packed with"
        if self.chat is not None and self.fim is not None:
            yield ("fim",), "takes texts apart, which conversations are not; tokenize them apart"
        is_cut = self.fim is not None and self.fim.level == "context"
        if is_cut and (self.seq_len is None or self.seq_len < LEAST_CONTEXT):
            yield ("seq_len",), f"found {self.seq_len}, expected {LEAST_CONTEXT} or more, for fim.level=context"
        if not is_cut and self.seq_len is not None:
            yield ("seq_len",), f"found {self.seq_len}, which only fim.level=context reads; leave it out"
        if self.fim is None and self.seed:
            yield ("seed",), f"found {self.seed}, which only fim reads; leave it out"

    def forms(self) -> Forms:
        """For the station."""
        return Forms(self.chat, self.fim, seq_len=self.seq_len or 0, seed=self.seed)


PLAIN = Forms()
"""Texts and their ends."""


def make_encoder(folder: Path, tokenizer: Tokenizer, forms: Mapping[str, Any]) -> DocumentEncoder:
    """The encoder of a task.

    Args:
        folder: the tokenizer's.
        forms: from `Forms.task`.
    """
    if forms.get("chat"):
        return ChatDocuments(folder, tokenizer, ChatConfig.model_validate(forms["chat"]))
    if forms.get("fim"):
        config = FillInConfig.model_validate(forms["fim"])
        return FilledDocuments(FillIn(tokenizer, config, seed=forms["seed"], seq_len=forms["seq_len"]))
    return PlainDocuments(tokenizer)


class PlainDocuments:
    """A text and the token that ends it."""

    rejected: Sequence[Rejected] = ()

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, batch: DocumentBatch, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        refuse_conversations(
            batch.documents, "say what of them is learnt: `chat: {}` in a recipe, or -s chat.max_tokens=N"
        )
        texts = batch.texts if wanted.all() else batch.texts.take(wanted)
        tokens, sizes = self._tokenizer.encode_texts(texts, with_eos=True)
        return tokens, NO_WEIGHTS, sizes

    def counts(self) -> dict[str, int]:
        return {}


class ChatDocuments(MixedEncoder):
    """Conversations, and plain documents among them."""

    def counts(self) -> dict[str, int]:
        """What became of the shard's documents, by name."""
        return dict(self.tally)


class FilledDocuments:
    """Texts, some of them with a hole."""

    rejected: Sequence[Rejected] = ()

    def __init__(self, fill_in: FillIn):
        self._fill_in = fill_in

    def encode(self, batch: DocumentBatch, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        refuse_conversations(batch.documents, "fim takes texts apart; make two recipes, and mix what they make")
        found = [part for row in np.flatnonzero(wanted) for part in self._fill_in.encode(batch.texts[int(row)])]
        tokens = np.concatenate([np.zeros(0, np.int64), *(np.array(part, np.int64) for part in found)])
        return tokens, NO_WEIGHTS, np.array([len(part) for part in found], np.int64)

    def counts(self) -> dict[str, int]:
        return dict(self._fill_in.counts)
