"""Station 1: repair each document's text, then keep or reject it by rules.

    records -> repair -> rules, the first that fires names the reason -> part-*.parquet
                                                        \\-> rejected/part-*.parquet, with the reason

A rule is a function from text to None (keep) or a reason. Nothing is thrown away: what is rejected lies beside what is
kept, and the manifest counts each reason.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megalite.data.corpus import Corpus
from megalite.data.documents import Document, Record, Rejected, RejectedPile, ShardWriter, batched
from megalite.data.manifest import StationResult, run_station
from megalite.data.progress import Progress, Silent
from megalite.data.recipe import CleanConfig
from megalite.data.workers import ordered_map
from megalite.errors import DataError

Rule = Callable[[str], str | None]

CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u200b\u2060\ufeff\ufff9-\ufffc]")
"""C0 and C1 controls other than tab and line ends, and characters without width that carry no meaning."""

LINE_ENDS = re.compile("\r\n?|\x85|\u2028|\u2029")

TRAILING_BLANKS = " \t\u00a0"

MANY_EMPTY_LINES = re.compile(r"\n{4,}")

MIN_LINES_FOR_REPETITION = 5
"""In fewer lines a repetition says nothing."""


def clean(
    corpus: Corpus, out: Path, config: CleanConfig, *, num_workers: int = 1, progress: Progress | None = None
) -> StationResult:
    """Run the station.

    Args:
        corpus: what to read.
        out: folder to make.
        config: repair and rules.
        num_workers: processes; the result does not depend on it.
        progress: told of every batch.

    Raises:
        DataError: a record cannot be read and config.on_error is `fail`; a source cannot be read at all.
    """
    progress = progress or Silent()

    def build(folder: Path) -> dict[str, Any]:
        progress.start("clean", corpus.text_mb, "MB")
        counts: Counter[str] = Counter()
        batches = batched(corpus.read())
        with ShardWriter(folder, Document) as kept, RejectedPile(folder) as rejected:
            for batch in ordered_map(partial(clean_batch, config=config), batches, num_workers=num_workers):
                good = list(rejected.sift(batch))
                kept.write(good)
                num_bytes = sum(len(document.text.encode()) for document in good)
                counts.update(documents_in=len(batch), documents=len(good), text_bytes=num_bytes)
                progress.advance(sum(len(record.text) for record in batch) / 1e6)
        progress.finish(f"{counts['documents']:,} of {counts['documents_in']:,} documents kept")
        return {**counts, "rejected": rejected.counts}

    return run_station("clean", out, inputs=corpus.inputs, settings=config.model_dump(mode="json"), build=build)


def clean_batch(records: list[Record], config: CleanConfig) -> list[Record]:
    """Repair and judge a batch; records that reading refused pass through, or stop the station."""
    rules = make_rules(config)
    return [_clean_one(record, rules, config) for record in records]


def repair(text: str, *, unicode_nfc: bool) -> str:
    """One kind of line end, no control characters, no blanks at line ends, at most two empty lines on end."""
    text = LINE_ENDS.sub("\n", text)
    text = CONTROL_CHARACTERS.sub("", text)
    text = "\n".join(line.rstrip(TRAILING_BLANKS) for line in text.split("\n"))
    text = MANY_EMPTY_LINES.sub("\n\n\n", text)
    text = text.strip("\n")
    return unicodedata.normalize("NFC", text) if unicode_nfc else text


def make_rules(config: CleanConfig) -> list[Rule]:
    """The rules that are on, cheapest first."""
    rules: list[Rule] = [_not_empty]
    if config.min_chars is not None:
        rules.append(partial(_long_enough, min_chars=config.min_chars))
    if config.max_chars is not None:
        rules.append(partial(_short_enough, max_chars=config.max_chars))
    if config.min_alphanumeric_share is not None:
        rules.append(partial(_alphanumeric, min_share=config.min_alphanumeric_share))
    if config.max_repeated_line_share is not None:
        rules.append(partial(_few_repeated_lines, max_share=config.max_repeated_line_share))
    return rules


def _clean_one(record: Record, rules: list[Rule], config: CleanConfig) -> Record:
    if isinstance(record, Rejected):
        if config.on_error == "fail":
            raise DataError(f"{record.source}: {record.id}: {record.reason}; set on_error: reject to put it aside")
        return record
    text = repair(record.text, unicode_nfc=config.unicode_nfc)
    reason = next((reason for rule in rules if (reason := rule(text)) is not None), None)
    if reason is not None:
        return Rejected(record.id, record.source, record.text, reason)
    return record._replace(text=text)


def _not_empty(text: str) -> str | None:
    return None if text and not text.isspace() else "empty"


def _long_enough(text: str, min_chars: int) -> str | None:
    return None if len(text) >= min_chars else "too short"


def _short_enough(text: str, max_chars: int) -> str | None:
    return None if len(text) <= max_chars else "too long"


def _alphanumeric(text: str, min_share: float) -> str | None:
    return None if sum(map(str.isalnum, text)) >= min_share * len(text) else "few letters and digits"


def _few_repeated_lines(text: str, max_share: float) -> str | None:
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    if len(lines) < MIN_LINES_FOR_REPETITION:
        return None
    return None if len(lines) - len(set(lines)) <= max_share * len(lines) else "repeated lines"
