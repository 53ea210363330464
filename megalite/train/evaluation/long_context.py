"""What `megalite eval` asks a saved model about long texts: needles to find, and the loss by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megalite.errors import ConversionError, UserError
from megalite.page.heatmap import heatmap
from megalite.tokenizer.tokenizer import Tokenizer
from megalite.train.device import choose_device
from megalite.train.evaluation.needle import (
    NeedleScore,
    NeedleTest,
    Prompts,
    default_lengths,
    find_needles,
    make_prompts,
)
from megalite.train.evaluation.offline import SavedModel, build_stage
from megalite.train.evaluation.positions import RangeLoss, long_documents, loss_by_position
from megalite.train.evaluation.questions import text_prefix


def needle_prompts(saved: SavedModel, test: NeedleTest, haystack: str) -> list[Prompts]:
    """Hide needles; before any weight is read.

    Args:
        test: without lengths for those up to what the model is meant for.
        haystack: see `needle.read_haystack`.

    Raises:
        UserError: a length has no room for a needle, or is beyond a learned table of positions.
        ConversionError: no tokenizer is known.
    """
    if saved.tokenizer is None:
        raise ConversionError(f"{saved.folder}: records no tokenizer; give its folder with --tokenizer")
    test = test if test.lengths else replace(test, lengths=default_lengths(saved.model.max_positions))
    _check_reach(saved, max(test.lengths))
    tokenizer, prefix = Tokenizer.load(saved.tokenizer), text_prefix(saved.tokenizer)
    return list(make_prompts(test, haystack, lambda text: [*prefix, *tokenizer.encode(text)]))


def needles(saved: SavedModel, prompts: Sequence[Prompts]) -> Iterator[NeedleScore]:
    """Ask for what is hidden.

    Raises:
        UserError: memory does not suffice for a length.
    """
    device = choose_device("auto", 0)
    yield from find_needles(build_stage(saved, device), prompts, device)


def open_documents(saved: SavedModel, source: Path, length: int | None, most: int) -> list[np.ndarray]:
    """The beginnings of long documents that a model can be judged on; before any weight is read.

    Args:
        source: tokenized documents.
        length: tokens read of each; None for as many as the model is meant for.
        most: documents.

    Raises:
        DataError: there are no such documents.
        UserError: the length is beyond a learned table of positions, or tokens beyond the vocabulary.
    """
    length = length or saved.model.max_positions
    _check_reach(saved, length)
    documents = long_documents(source, length, most)
    largest = max(int(document.max()) for document in documents)
    if largest >= saved.model.vocab_size:
        raise UserError(
            f"{source}: holds token {largest}, beyond the model's vocabulary of {saved.model.vocab_size}; name data "
            "that was tokenized with the model's tokenizer"
        )
    return documents


def position_losses(saved: SavedModel, source: Path, length: int | None, most: int) -> list[RangeLoss]:
    """The loss by position over the beginnings of long documents; refuses what `open_documents` does."""
    documents = open_documents(saved, source, length, most)
    device = choose_device("auto", 0)
    return loss_by_position(build_stage(saved, device), documents, device)


def picture(found: Sequence[NeedleScore], model: Path) -> str:
    """An SVG of what was found."""
    shares = {(f"{each.length:,}", f"{100 * each.depth:g}%"): each.share for each in found}
    columns, rows = (list(dict.fromkeys(column)) for column in zip(*shares, strict=True))
    return heatmap(shares, columns, rows, f"needles found by {model.name}: tokens of the text, depth of the needle")


def _check_reach(saved: SavedModel, length: int) -> None:
    if saved.model.positions == "learned" and length > saved.model.max_positions:
        raise UserError(
            f"{saved.folder}: has learned positions up to {saved.model.max_positions}, found a length of {length}; ask "
            "for shorter texts with --lengths"
        )
