"""A card as one HTML file for someone who decides whether to train on the data: it needs no network and no script.

First what there is (sizes, sources), then what happened to it (stations, reasons, duplicates), then what a model will
see (lengths, tokens, sequences), and at the end what is needed to make it again.
"""

from __future__ import annotations

from megalite.corpus.card import sections
from megalite.corpus.card.card import Card
from megalite.page.markup import Markup, join, tag
from megalite.page.numbers import share, short, size
from megalite.page.style import CSS

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Even a script that got past the escaping would not run."""

HEAD = Markup(
    '<meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
)


def render(card: Card) -> str:
    """The page."""
    body = tag(
        "main",
        tag("h1", card.name),
        tag("p", "Prepared pretraining data, counted from the manifests beside this page.", class_="faint"),
        _tiles(card),
        sections.sources(card),
        sections.stations(card),
        sections.reasons(card),
        sections.redacted(card),
        sections.duplicates(card),
        sections.languages(card),
        sections.licenses(card),
        sections.lengths(card),
        sections.tokens(card),
        sections.sources_by_station(card),
        sections.settings(card),
        sections.provenance(card),
    )
    head = tag("head", HEAD, tag("title", f"{card.name}: data card"), tag("style", Markup(CSS)))
    return f"<!doctype html>\n{tag('html', head, tag('body', body), lang='en')}\n"


def _tiles(card: Card) -> Markup:
    """The numbers that most readers came for."""
    left, tokenizer = card.left.kept, card.tokenizer
    by_part = {split.part: split for split in card.splits}
    train = by_part["train"]
    tiles = [
        ("documents", short(left.documents), f"{share(left.documents, card.read.kept.documents)} of those read"),
        ("text", size(left.text_bytes), f"{size(round(card.lengths.mean))} a document"),
        ("training tokens", short(train.tokens), f"{short(train.sequences)} sequences of {train.seq_len:,}"),
    ]
    if "valid" in by_part:
        valid = by_part["valid"]
        tiles.append(("validation tokens", short(valid.tokens), f"{short(valid.documents)} documents held out"))
    tiles += [
        ("bytes a token", f"{tokenizer.bytes_per_token:.2f}", f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens"),
        ("padding", f"{train.padding_percent:.2f} %", f"{share(train.documents_split, train.documents)} documents cut"),
    ]
    return tag("div", *(_tile(*each) for each in tiles), class_="tiles")


def _tile(name: str, number: str, note: str) -> Markup:
    return tag("div", join(tag("span", name), tag("b", number), tag("span", note)), class_="tile")
