"""The page of a card: well-formed, with nothing in it that a reader's browser would run or fetch."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.console import Console

from megalite.corpus.card.card import Amount, Card, SourceCard
from megalite.corpus.card.make import make_card
from megalite.corpus.card.page import render
from megalite.corpus.card.terminal import summary
from megalite.page.markup import join, link, tag
from megalite.page.numbers import share, short, size
from tests.corpus.card.conftest import HOSTILE
from tests.kit.html import Reader


@pytest.fixture(scope="module")
def card(recipe) -> Card:
    return make_card(recipe.out)


def hostile(card: Card) -> Card:
    """A card with markup wherever words from outside may stand."""
    source = SourceCard(HOSTILE + "2", "<b>bold</b>", "<i>x</i>", "javascript:alert(1)", 1, Amount(1, 1))
    near = card.stages[-1]
    near = replace(
        near,
        reasons={f"{HOSTILE}{'long ' * 20}": 1},
        redacted={HOSTILE: 1},
        languages={"<en>": 7},
        licenses={HOSTILE: 7},
    )
    return replace(card, name=f"</title>{HOSTILE}", sources=(*card.sources, source), stages=(*card.stages[:-1], near))


def test_page_is_well_formed(card):
    """Every tag that opens closes, in order; no id is given twice, and nothing is loaded from anywhere."""
    reader = Reader(render(card))
    names = {name for name, _ in reader.tags}
    assert {"html", "head", "body", "svg", "rect", "table", "details"} <= names
    assert not names & {"script", "link", "img", "iframe", "object", "use", "foreignobject"}
    for name, attributes in reader.tags:
        assert not [key for key in attributes if key.startswith("on") or key in ("src", "style")], (name, attributes)
    assert "url(" not in render(card)
    assert "@import" not in render(card)


def test_hostile_names_are_text(card):
    """Names, ids, reasons, licences and addresses that look like markup show as they are written, and do nothing."""
    page = render(hostile(card))
    reader = Reader(page)
    assert not {"script", "i"} & {name for name, attributes in reader.tags if not attributes}
    assert "<script" not in page
    assert not [attributes for name, attributes in reader.tags if name == "a"]  # javascript: is no address of the web
    for words in (
        HOSTILE,
        HOSTILE + "2",
        "<b>bold</b>",
        "<i>x</i>",
        "javascript:alert(1)",
        "<en>",
        f"</title>{HOSTILE}",
    ):
        assert words in reader.text
    assert f"a{HOSTILE}" in reader.text or f"b{HOSTILE}" in reader.text  # an id, of a cluster


def test_numbers_are_on_the_page(card):
    """The numbers that decide are there to read."""
    text = Reader(render(card)).text
    for split in card.splits:
        assert f"{split.tokens:,}" in text
    for stage in card.stages:
        assert f"{stage.kept.documents:,}" in text
    for station in card.stations:
        assert station.fingerprint in text
    for setting in ("min_chars", "privacy.email", "threshold", "seq_len", "split_digits"):
        assert setting in text


def test_bars_are_to_scale(card):
    """In the funnel, widths of bars stand in the ratio of the documents."""
    page = render(card)
    funnel = re.search(r"<div[^>]*Documents and text after each station\">.*?</section>", page, re.DOTALL)
    assert funnel is not None
    tags = Reader(funnel[0].removesuffix("</section>")).tags
    widths = [float(attributes["width"]) for _, attributes in tags if attributes.get("class") == "a"]
    documents = [stage.kept.documents for stage in card.stages]
    assert len(widths) == len(documents)
    for width, number in zip(widths, documents, strict=True):
        assert width / widths[0] == pytest.approx(number / documents[0], abs=0.001)  # widths are written to 0.1 of 1000


def test_many_sources_are_added_up(card):
    """The ten largest have a row each; the others share one, and nothing is lost."""
    many = tuple(SourceCard(f"source-{n:02}", None, None, None, 10, Amount(5, 1000 * (30 - n))) for n in range(30))
    text = Reader(render(replace(card, sources=many))).text
    assert "source-09" in text
    assert "source-10" not in text
    assert "20 others200100" in text  # 20 x 10 documents read, 20 x 5 kept


def test_markup_escapes_and_links():
    """Only what `tag` made is markup; only addresses of the web become links."""
    assert tag("p", "<", tag("b", "&"), class_='"') == '<p class="&quot;">&lt;<b>&amp;</b></p>'
    assert join("a\x00b", None, 3) == "a\N{REPLACEMENT CHARACTER}b3"
    assert link("https://example.org/?a&b") == (
        '<a href="https://example.org/?a&amp;b" rel="noreferrer">https://example.org/?a&amp;b</a>'
    )
    for address in ("javascript:alert(1)", "JavaScript:alert(1)", "data:text/html,x", "https://[", "//example.org"):
        assert link(address).startswith("<span>"), address


def test_numbers_for_people():
    """Units change where they should, and small shares are not shown as nothing."""
    assert [short(n) for n in (0, 99_999, 100_000, 1_234_567, 999_600_000, 12 * 10**12)] == [
        "0",
        "99,999",
        "100 k",
        "1.23 M",
        "1,000 M",
        "12 T",
    ]
    assert [size(n) for n in (None, 0, 999, 1_000, 41_775_002, 10**13)] == [
        "–",
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "41.8 MB",
        "10.0 TB",
    ]
    assert [share(*pair) for pair in ((0, 5), (1, 5), (1, 10**6), (1, 0))] == ["0.0 %", "20.0 %", "under 0.1 %", "–"]
    assert [share(*pair) for pair in ((5, 5), (9994, 10**4), (9999, 10**4))] == ["100.0 %", "99.9 %", "over 99.9 %"]


def test_summary_fits_on_a_screen(card):
    """24 lines of 80 columns with a name in brackets shown as it is written, and the numbers in full."""
    console = Console(width=80, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary(replace(card, name="[bold]set[/bold]")))
    text = console.export_text()
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "[bold]set[/bold]" in text
    for stage in card.stages:
        assert f"{stage.name}" in text
        assert f"{stage.kept.documents:,}" in text
    for split in card.splits:
        assert f"{split.tokens:,}" in text
