"""A card on one screen of a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.corpus.card.card import Card
from megalite.page.numbers import count, share, short, size

if TYPE_CHECKING:
    from rich.console import JustifyMethod, RenderableType

MAX_SOURCES = 3
MAX_REASONS = 2

BAR_WIDTH = 14


def summary(card: Card) -> RenderableType:
    """Stations, splits and the largest sources, for rich's console."""
    from rich.console import Group
    from rich.text import Text

    tokenizer = card.tokenizer
    line = (
        f"tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, {tokenizer.bytes_per_token:.2f} bytes a token"
    )
    learnt = [
        f"{each.part}: {each.tokens_learnt:,} of {each.tokens:,} tokens learnt, {each.conversations:,} conversations"
        for each in card.splits
        if each.tokens_learnt is not None
    ]
    line = "\n".join([line, *learnt])
    return Group(Text(card.name, style="bold"), _stages(card), _splits(card), Text(line), *_sources(card))


def _stages(card: Card) -> RenderableType:
    from rich import box
    from rich.text import Text

    from megalite.page.terminal import FittingTable

    table = FittingTable(box=box.SIMPLE_HEAD, pad_edge=False)
    sides: dict[str, JustifyMethod] = {"station": "left", "documents": "right", "text": "right", "": "left"}
    for title, side in sides.items():
        table.add_column(title, justify=side, no_wrap=True)
    table.add_column("why")  # the one that gets narrow on a narrow screen
    for stage in card.stages:
        bar = "█" * round(BAR_WIDTH * stage.kept.documents / max(card.read.kept.documents, 1))
        reasons = list(stage.reasons.items())
        why = [f"{reason} {short(number)}" for reason, number in reasons[:MAX_REASONS]]
        if len(reasons) > MAX_REASONS:
            why.append(f"{len(reasons) - MAX_REASONS} more")
        cells = (stage.name, count(stage.kept.documents), size(stage.kept.text_bytes), bar, ", ".join(why))
        # Text, for a name with [brackets] is no style
        table.add_row(*map(Text, cells))
    return table


def _splits(card: Card) -> RenderableType:
    from rich import box

    from megalite.page.terminal import FittingTable

    table = FittingTable("split", box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("documents", "tokens", "sequences", "of", "padding", "cut"):
        table.add_column(title, justify="right")
    for each in card.splits:
        padding, cut = f"{each.padding_percent:.2f} %", share(each.documents_split, each.documents)
        numbers = (each.documents, each.tokens, each.sequences, each.seq_len)
        table.add_row(each.part, *map(count, numbers), padding, cut)
    return table


def _sources(card: Card) -> list[RenderableType]:
    from rich.text import Text

    whole = card.left.kept.text_bytes or 0
    lines = [
        f"source: {each.name}, {count(each.kept.documents)} documents, {size(each.kept.text_bytes)}, "
        f"{share(each.kept.text_bytes or 0, whole)}, licence: {each.license or 'not stated'}"
        for each in card.sources[:MAX_SOURCES]
    ]
    if len(card.sources) > MAX_SOURCES:
        lines.append(f"{len(card.sources) - MAX_SOURCES:,} sources more")
    return [Text(line) for line in lines]
