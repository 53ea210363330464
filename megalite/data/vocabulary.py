"""Whether the ids of token files are those of a model's vocabulary, and where one is that is not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megalite.data.indexed import bin_path
from megalite.data.sources import TokenSource, largest_token


def check_vocabularies(sources: Sequence[TokenSource], vocab_size: int) -> list[str]:
    """What is wrong with sources for a model of so many ids, by their tokenizers' records and their largest ids."""
    problems = []
    for source in sources:
        made_for = source.tokenizer.vocab_size if source.tokenizer else 0
        largest = largest_token(source.tokens)
        if made_for > vocab_size:
            problems.append(
                f"{source.name}: tokenized with a vocabulary of {made_for}, the model has vocab_size={vocab_size}; "
                "raise model.vocab_size or leave it null"
            )
        elif largest >= vocab_size:
            problems.append(beyond_vocabulary(source, largest, vocab_size))
    return problems


def beyond_vocabulary(source: TokenSource, largest: int, vocab_size: int, samples: Sequence[int] = ()) -> str:
    """The complaint about an id, with its place where it is in one of these samples."""
    where = next((text for text in (_find_token(source, largest, sample) for sample in samples) if text), "")
    return (
        f"{source.name} ({source.tokens.prefix}): token id {largest} found{where}, the vocabulary ends at "
        f"{vocab_size - 1}; the data was made with another tokenizer"
    )


def _find_token(source: TokenSource, token: int, sample: int) -> str:
    """Where a sample, or the label behind it, has a token, in words for the owner of the files."""
    tokens, pieces = source.tokens, source.layout.pieces(sample)
    for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
        found = np.flatnonzero(tokens.read(start, start + length + 1) == token)
        if found.size:
            position = start + int(found[0])
            at = position * tokens.dtype.itemsize
            return f" in document {tokens.document_at(position)}, byte {at} of {bin_path(tokens.prefix).name}"
    return ""
