"""Station 4: documents to a Megatron-compatible pair of token files, one end-of-text token behind each document.

The documents are read here, encoded by the workers batch by batch, and written here in their order: the bytes are the
same for any number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.corpus import Corpus
from megalite.data.documents import Document, Record, Rejected, ShardWriter, batched
from megalite.data.indexed import IndexedWriter, token_dtype
from megalite.data.manifest import StationResult, run_station
from megalite.data.progress import Progress, Silent
from megalite.data.sources import TOKENS_NAME
from megalite.data.split import ALL, Split
from megalite.data.tokenizer import Tokenizer
from megalite.data.workers import ordered_map


def tokenize(
    corpus: Corpus,
    tokenizer_folder: Path,
    out: Path,
    *,
    split: Split = ALL,
    num_workers: int = 1,
    progress: Progress | None = None,
) -> StationResult:
    """Run the station.

    Args:
        corpus: what to read.
        tokenizer_folder: a tokenizer's folder.
        out: folder to make.
        split: the side of the hold-out that is wanted.
        num_workers: processes; the result does not depend on it.
        progress: told of every batch.

    Raises:
        DataError: the tokenizer cannot be loaded.
    """
    progress = progress or Silent()
    tokenizer = Tokenizer.load(tokenizer_folder)
    inputs = [*corpus.inputs, (tokenizer_folder, tokenizer.fingerprint)]
    settings = {
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "tokenizer_input": len(inputs) - 1,
        "eos_id": tokenizer.eos_id,
        "split": split.settings(),
    }

    def build(folder: Path) -> dict[str, Any]:
        title = "tokenize" if split.part == "all" else f"tokenize {split.part}"
        progress.start(title, split.share_of(corpus.text_mb), "MB")
        counts: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        encode = partial(encode_documents, tokenizer_folder=tokenizer_folder)
        with (
            IndexedWriter(folder / TOKENS_NAME, token_dtype(tokenizer.vocab_size)) as writer,
            ShardWriter(folder / "rejected", Rejected) as rejected,
        ):
            batches = _put_rejected_aside(batched(_wanted(corpus.read(), split)), rejected, reasons)
            for tokens, lengths, num_bytes in ordered_map(encode, batches, num_workers=num_workers):
                writer.add(tokens, lengths)
                counts["text_bytes"] += num_bytes
                progress.advance(num_bytes / 1e6)
        progress.finish(f"{writer.num_tokens:,} tokens in {writer.num_documents:,} documents")
        return {
            "documents": writer.num_documents,
            "tokens": writer.num_tokens,
            "text_bytes": counts["text_bytes"],
            "rejected": dict(sorted(reasons.items())),
        }

    return run_station("tokenize", out, inputs=inputs, settings=settings, build=build)


def encode_documents(texts: list[str], tokenizer_folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Encode texts in a worker.

    Returns:
        All tokens end to end, end-of-text tokens included; the length of each document; bytes of text.
    """
    tokenizer = _load_once(tokenizer_folder)
    encoded = tokenizer.encode_batch(texts)
    lengths = np.array([len(ids) + 1 for ids in encoded], dtype=np.int32)
    tokens = np.empty(int(lengths.sum()), dtype=token_dtype(tokenizer.vocab_size))
    start = 0
    for ids, length in zip(encoded, lengths.tolist(), strict=True):
        tokens[start : start + length - 1] = ids
        tokens[start + length - 1] = tokenizer.eos_id
        start += length
    return tokens, lengths, sum(len(text.encode()) for text in texts)


@lru_cache(maxsize=1)
def _load_once(folder: Path) -> Tokenizer:
    """A worker keeps its tokenizer from batch to batch."""
    return Tokenizer.load(folder)


def _wanted(records: Iterable[Record], split: Split) -> Iterator[Record]:
    """Documents of the wanted side, empty ones turned into rejects; what could not be read stays."""
    for record in records:
        if isinstance(record, Document) and not record.text:
            yield Rejected(*record, reason="empty")
        elif isinstance(record, Rejected) or split.keeps(record.text):
            yield record


def _put_rejected_aside(
    batches: Iterable[list[Record]], rejected: ShardWriter, reasons: Counter[str]
) -> Iterator[list[str]]:
    """Pass on the texts of each batch, after writing away what cannot be encoded."""
    for batch in batches:
        bad = [record for record in batch if isinstance(record, Rejected)]
        rejected.write(bad)
        reasons.update(record.reason for record in bad)
        yield [record.text for record in batch if isinstance(record, Document)]
