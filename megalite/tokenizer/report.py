"""Tokenizers side by side on the same documents, source by source.

    tokenizer  source  bytes/token  tokens/word  unknown  bytes  wrong  vocabulary  MB/s
    ours       web            4.31         1.38        0   0.1%      0         71%   101
    ours       all            3.90         1.52 ...

Bytes a token says how much text a budget of tokens holds, but only compares tokenizers of one vocabulary size; tokens a
word (fertility) shows which source a vocabulary serves badly; the share of byte tokens which characters it lacks.
Speed is of one core, of `Tokenizer.encode_texts`, words of this text not met before.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from megalite.errors import DataError
from megalite.texts import Texts
from megalite.tokenizer.encoders.reference import FallbackTokens
from megalite.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.table import Table

ALL_SOURCES = "all"
"""Name of the line that adds up the sources of a tokenizer."""

BAR = "█"

BAR_PARTS = " ▏▎▍▌▋▊▉"
"""Eighths of a bar's last character."""


@dataclass(frozen=True)
class TokenizerScores:
    """How one tokenizer does on the documents of one source."""

    tokenizer: str
    source: str
    backend: str
    """Encoder that the speed is of."""
    vocab_size: int
    num_documents: int
    num_bytes: int
    num_words: int
    """Runs of characters between blanks and line ends."""
    num_tokens: int
    num_unknown: int
    """Tokens that stand for text which is lost."""
    num_byte_tokens: int
    """Tokens that are one byte of a character which the vocabulary lacks; byte-level BPE has none such."""
    num_wrong: int
    """Documents that do not decode to themselves."""
    num_used: int
    """Different tokens."""
    cpu_seconds: float

    @property
    def bytes_per_token(self) -> float:
        return _ratio(self.num_bytes, self.num_tokens)

    @property
    def tokens_per_word(self) -> float:
        return _ratio(self.num_tokens, self.num_words)

    @property
    def unknown_share(self) -> float:
        return _ratio(self.num_unknown, self.num_tokens)

    @property
    def byte_share(self) -> float:
        return _ratio(self.num_byte_tokens, self.num_tokens)

    @property
    def vocabulary_use(self) -> float:
        """Share of the vocabulary that these documents need."""
        return _ratio(self.num_used, self.vocab_size)

    @property
    def mb_per_second(self) -> float:
        """Million bytes of text a CPU second."""
        return _ratio(self.num_bytes / 1e6, self.cpu_seconds)


def texts_by_source(documents: Iterable[tuple[str, str]], most_mb: float) -> dict[str, Texts]:
    """The first documents of each source, up to about `most_mb` million bytes of each.

    Args:
        documents: source and text of each, those of one source behind each other, as a corpus gives them.
        most_mb: the document that reaches it is the last one of its source.

    Raises:
        DataError: there is none.
    """
    gathered: dict[str, list[bytes]] = {}
    for source, group in groupby(documents, key=itemgetter(0)):
        texts = gathered.setdefault(source, [])
        left = most_mb * 1e6 - sum(map(len, texts))
        for _, text in group:
            if left > 0:
                texts.append(text.encode())
                left -= len(texts[-1])
    if not any(gathered.values()):
        raise DataError("there is no document to compare on; name files with text")
    return {source: Texts.of(texts) for source, texts in gathered.items()}


def compare_tokenizers(tokenizers: Mapping[str, Tokenizer], sources: Mapping[str, Texts]) -> list[TokenizerScores]:
    """Encode and decode all documents with every tokenizer.

    Args:
        tokenizers: by the name that the report gives them.
        sources: texts by source.

    Returns:
        By tokenizer, then source; behind several sources a line for ALL_SOURCES together.
    """
    words = {source: sum(len(text.split()) for text in texts) for source, texts in sources.items()}
    scores = []
    for name, tokenizer in tokenizers.items():
        tokenizer.encode_texts(Texts.of(["warm up"]))  # the encoder is chosen and compiled on the first call
        stopgaps = tokenizer.stopgaps()
        counts = {source: _count(tokenizer, texts) for source, texts in sources.items()}
        num_words = dict(words)
        if len(sources) > 1:
            counts[ALL_SOURCES] = _add(list(counts.values()))
            num_words[ALL_SOURCES] = sum(words.values())
        scores += [_scores(name, tokenizer, stopgaps, source, num_words[source], counts[source]) for source in counts]
    return scores


def report_table(scores: Iterable[TokenizerScores]) -> Table:
    """The scores for a terminal."""
    from megalite.page.terminal import FittingTable

    table = FittingTable(title="tokenizers")
    for column in ("tokenizer", "source"):
        table.add_column(column)
    for column in ("MB", "bytes/token", "tokens/word", "unknown", "byte tokens", "wrong documents", "vocabulary used"):
        table.add_column(column, justify="right")
    table.add_column("MB/s/core", justify="right")
    table.add_column("encoder")
    last = None
    for line in scores:
        if last is not None and line.tokenizer != last:
            table.add_section()
        table.add_row(
            "" if line.tokenizer == last else line.tokenizer,
            line.source,
            f"{line.num_bytes / 1e6:,.1f}",
            f"{line.bytes_per_token:.3f}",
            f"{line.tokens_per_word:.3f}",
            f"{line.unknown_share:.3%}",
            f"{line.byte_share:.3%}",
            f"{line.num_wrong:,} of {line.num_documents:,}",
            f"{line.vocabulary_use:.1%}",
            f"{line.mb_per_second:.1f}",
            line.backend,
        )
        last = line.tokenizer
    return table


def bar_plot(scores: Iterable[TokenizerScores], measure: str = "bytes_per_token", *, width: int = 40) -> str:
    """One measure as bars of text, the tokenizers of each source below each other.

    Args:
        scores: what to show.
        measure: a property of TokenizerScores.
        width: characters of the longest bar.
    """
    by_source: dict[str, list[TokenizerScores]] = {}
    for line in scores:
        by_source.setdefault(line.source, []).append(line)
    values = [getattr(line, measure) for lines in by_source.values() for line in lines]
    longest = max(values, default=0.0) or 1.0
    indent = max((len(line.tokenizer) for lines in by_source.values() for line in lines), default=0)
    rows = [measure.replace("_", " ")]
    for source, lines in by_source.items():
        rows.append(source)
        for line in lines:
            value = getattr(line, measure)
            rows.append(f"  {line.tokenizer:<{indent}} {_bar(value / longest * width):<{width}} {value:.3f}")
    return "\n".join(rows)


@dataclass(frozen=True)
class _TokenCounts:
    num_documents: int
    num_bytes: int
    num_wrong: int
    cpu_seconds: float
    uses: np.ndarray
    """int64 [vocab]: how often each token came."""


def _count(tokenizer: Tokenizer, texts: Texts) -> _TokenCounts:
    began = time.process_time()
    tokens, lengths = tokenizer.encode_texts(texts)
    seconds = time.process_time() - began
    rows = np.split(tokens, np.cumsum(lengths))[:-1]
    wrong = sum(tokenizer.decode(row.tolist()) != text for row, text in zip(rows, texts, strict=True))
    return _TokenCounts(
        len(texts), texts.num_bytes, wrong, seconds, np.bincount(tokens, minlength=tokenizer.vocab_size)
    )


def _add(counts: list[_TokenCounts]) -> _TokenCounts:
    fields = ("num_documents", "num_bytes", "num_wrong", "cpu_seconds", "uses")
    return _TokenCounts(**{field: sum(getattr(count, field) for count in counts) for field in fields})


def _scores(
    name: str, tokenizer: Tokenizer, stopgaps: FallbackTokens, source: str, num_words: int, counts: _TokenCounts
) -> TokenizerScores:
    uses, (unknown_id, byte_ids) = counts.uses, stopgaps
    return TokenizerScores(
        tokenizer=name,
        source=source,
        backend=tokenizer.backend,
        vocab_size=tokenizer.vocab_size,
        num_documents=counts.num_documents,
        num_bytes=counts.num_bytes,
        num_words=num_words,
        num_tokens=int(uses.sum()),
        num_unknown=0 if unknown_id is None else int(uses[unknown_id]),
        num_byte_tokens=int(uses[byte_ids].sum()),
        num_wrong=counts.num_wrong,
        num_used=int(np.count_nonzero(uses)),
        cpu_seconds=counts.cpu_seconds,
    )


def _bar(eighths: float) -> str:
    whole, part = divmod(round(8 * eighths), 8)
    return BAR * whole + BAR_PARTS[part].strip()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
