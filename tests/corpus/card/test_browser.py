"""The card in a real browser: whole at every width, whatever names and shares stand in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megalite.corpus.card.card import Amount, Card, SourceCard, StageCard
from megalite.corpus.card.make import make_card
from megalite.corpus.card.measure import Bin, Lengths
from megalite.corpus.card.page import render
from tests.kit.browser import WIDTHS, find_browser, layout_faults, show


def wide(card: Card) -> Card:
    """A card of a large set: tiny shares, long reasons, names and addresses, thirty classes of lengths."""
    first = card.stages[0]
    read = replace(first, kept=Amount(1_234_567_890, 9_876_543_210_123))
    reasons = {"a line that says in many words why it went": 1, "under_a_name_without_any_space_at_all_in_it": 2}
    clean = replace(card.stages[1], kept=Amount(1_234_567_887, 9_876_543_209_999), removed=3, reasons=reasons)
    more = StageCard("near-dedup", Amount(1_234_560_000, 9_876_543_300_000), 7887, {"near": 7887}, {}, {}, None, {})
    bins = tuple(Bin(2**n, 2 ** (n + 1) - 1, 10 + n, 2**n) for n in range(30))
    lengths = Lengths(sum(each.documents for each in bins), 2**30, 1, 2**30, bins)
    name = "a-source_with/a/long/path/and-a-very-long-name-2026-11-22.jsonl.zst"
    source = SourceCard(
        name, "What it is. " * 9, "CC-BY-SA-4.0", f"https://example.org/{'x' * 90}", 10**9, Amount(1, 1)
    )
    return replace(
        card,
        stages=(read, clean, more),
        lengths=lengths,
        sources=(source, *(replace(source, name=f"{name}{n}") for n in range(11))),
    )


@pytest.fixture(scope="module")
def pages(recipe, tmp_path_factory) -> list[Path]:
    """The small card, and one whose figures are as wide as they come."""
    find_browser()
    folder = tmp_path_factory.mktemp("card-pages")
    card = make_card(recipe.out)
    for name, each in (("small", card), ("wide", wide(card))):
        (folder / f"{name}.html").write_text(render(each), encoding="utf-8")
    return [folder / "small.html", folder / "wide.html"]


@pytest.mark.parametrize("width", WIDTHS)
def test_reads_well_at_every_width(pages, width):
    """Nothing is cut off ("under 0.1 % of text less" was), broken inside a word, overlapping, tiny or wider than the
    window; with everything unfolded too."""
    for page in pages:
        with show(page, width=width, dark=width == WIDTHS[0]) as tab:
            assert layout_faults(tab) == []
            tab.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
            assert layout_faults(tab) == []
            assert tab.said == []
            text = tab.evaluate("document.body.innerText")
    assert "under 0.1 % of documents less" in text
    assert "of text more" in text
