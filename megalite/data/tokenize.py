"""Station 4: documents to a Megatron-compatible pair of token files, one end-of-text token behind each document.

The documents are read here, encoded by the workers batch by batch, and written here in their order: the bytes are the
same for any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.corpus import Corpus
from megalite.data.documents import Document, Record, Rejected, RejectedPile, batched
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
        num_bytes = 0
        encode = partial(encode_documents, tokenizer_folder=tokenizer_folder)
        with (
            IndexedWriter(folder / TOKENS_NAME, token_dtype(tokenizer.vocab_size)) as writer,
            RejectedPile(folder) as rejected,
        ):
            batches = batched(rejected.sift(_wanted(corpus.read(), split)))
            for tokens, lengths, batch_bytes in ordered_map(encode, batches, num_workers=num_workers):
                writer.add(tokens, lengths)
                num_bytes += batch_bytes
                progress.advance(batch_bytes / 1e6)
        progress.finish(f"{writer.num_tokens:,} tokens in {writer.num_documents:,} documents")
        return {
            "documents": writer.num_documents,
            "tokens": writer.num_tokens,
            "text_bytes": num_bytes,
            "rejected": rejected.counts,
        }

    return run_station("tokenize", out, inputs=inputs, settings=settings, build=build)


def encode_documents(documents: list[Document], tokenizer_folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Encode a batch in a worker.

    Returns:
        All tokens end to end, end-of-text tokens included; the length of each document; bytes of text.
    """
    tokenizer = _load_once(tokenizer_folder)
    texts = [document.text for document in documents]
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
