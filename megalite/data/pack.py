"""Station 5: fit documents into sequences of seq_len tokens.

    concat     the stream is cut every seq_len tokens: no padding, but documents are cut wherever that falls. The cut
               follows from the document offsets, so the folder holds nothing but its manifest
    best_fit   only documents longer than a sequence are cut; some hundredths of a percent are padding. The folder
               holds the list of pieces of each sequence, 20 bytes a piece

Both drop nothing. No tokens are copied: the folder refers to the tokenized one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.indexed import IndexedTokens
from megalite.data.layout import BORDERS_FILE, DOCUMENTS_FILE, LENGTHS_FILE, STARTS_FILE
from megalite.data.manifest import StationResult, run_station
from megalite.data.progress import Progress, Silent
from megalite.data.recipe import PackConfig
from megalite.data.sources import open_tokens
from megalite.errors import DataError


def pack(tokens_path: Path, out: Path, config: PackConfig, *, progress: Progress | None = None) -> StationResult:
    """Run the station.

    Args:
        tokens_path: a tokenized folder, or the prefix of a Megatron pair.
        out: folder to make.
        config: sequence length and method.
        progress: told of the result.

    Raises:
        DataError: the tokens are missing, damaged or empty.
    """
    progress = progress or Silent()
    opened = open_tokens(tokens_path, contents=True)
    if opened.tokens.num_tokens == 0:
        raise DataError(f"{tokens_path}: empty: there is no token to pack")

    def build(folder: Path) -> dict[str, Any]:
        progress.start("pack", opened.tokens.num_tokens / 1e6, "M tokens")
        lengths = opened.tokens.document_lengths()
        write = _pack_best_fit if config.method == "best_fit" else _pack_concat
        counts = write(opened.tokens, lengths, config.seq_len, folder)
        num_slots = counts["samples"] * config.seq_len
        counts["tokens"] = opened.tokens.num_tokens
        counts["documents"] = int(lengths.size)
        counts["padding_percent"] = round(100 * (1 - opened.tokens.num_tokens / num_slots), 4)
        counts["documents_longer_than_seq_len"] = int((lengths > config.seq_len).sum())
        progress.advance(opened.tokens.num_tokens / 1e6)
        progress.finish(
            f"{counts['samples']:,} sequences of {config.seq_len}, {counts['padding_percent']:.3f} % padding, "
            f"{counts['documents_split']:,} of {lengths.size:,} documents cut"
        )
        return counts

    settings = config.model_dump(mode="json")
    return run_station("pack", out, inputs=[(opened.path, opened.fingerprint)], settings=settings, build=build)


def _pack_best_fit(tokens: IndexedTokens, lengths: np.ndarray, seq_len: int, folder: Path) -> dict[str, Any]:
    from megalite.data.best_fit import assign_pieces, cut_documents, group_pieces  # numba takes a second to import

    starts, sizes, documents = cut_documents(lengths, seq_len)
    sequence_of, num_sequences = assign_pieces(sizes, seq_len)
    order, borders = group_pieces(sequence_of, num_sequences)
    np.save(folder / BORDERS_FILE, borders)
    np.save(folder / STARTS_FILE, starts[order])
    np.save(folder / LENGTHS_FILE, sizes[order])
    np.save(folder / DOCUMENTS_FILE, documents[order])
    return {
        "samples": num_sequences,
        "pieces": int(sizes.size),
        "documents_split": int((lengths > seq_len).sum()),
    }


def _pack_concat(tokens: IndexedTokens, lengths: np.ndarray, seq_len: int, folder: Path) -> dict[str, Any]:
    stops = np.cumsum(lengths)
    first, last = (stops - lengths) // seq_len, (stops - 1) // seq_len
    cut = (first != last) & (lengths > 0)
    return {"samples": -(-tokens.num_tokens // seq_len), "documents_split": int(cut.sum())}
