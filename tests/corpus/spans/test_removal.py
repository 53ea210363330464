"""Documents after a removal: which are cut, which are dropped, and which stay as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.corpus.spans.contamination import find_overlaps, index_examples
from megalite.corpus.spans.lines import count_lines, find_lines
from megalite.corpus.spans.removal import Removal, remove_lines, remove_overlaps, remove_repeats
from megalite.corpus.spans.settings import DecontaminateConfig, LineDedupConfig, SubstringConfig
from megalite.corpus.spans.substring import find_repeats
from megalite.texts import Texts

QUESTION = "which of the four moons did he claim to have seen"

COPIED = "A passage of more than forty bytes that stands in several texts."


def outcome(removal: Removal) -> list[str | None]:
    """The texts, None for those dropped."""
    return [text if kept else None for text, kept in zip(removal.texts, removal.is_kept, strict=True)]


@pytest.mark.parametrize(
    ("action", "max_share", "expected"),
    [
        ("cut", 1.0, [COPIED, "Before it stands this.  And after it this.", None, "no copy", ""]),
        ("cut", 0.5, [COPIED, None, None, "no copy", ""]),
        ("drop", 0.5, [COPIED, None, None, "no copy", ""]),
        ("drop", 0.7, [COPIED, f"Before it stands this. {COPIED} And after it this.", None, "no copy", ""]),
    ],
)
def test_repeats(action, max_share, expected):
    """A document over the share goes whole; below it, its passages go or nothing does; what was empty stays."""
    texts = Texts.of([COPIED, f"Before it stands this. {COPIED} And after it this.", f"\n{COPIED}\n", "no copy", ""])
    config = SubstringConfig(min_bytes=40, action=action, max_repeated_share=max_share)
    removal = remove_repeats(texts, find_repeats(texts, config), config)
    assert outcome(removal) == expected
    assert removal.num_cut == (1 if max_share == 1.0 else 0)
    for number in np.flatnonzero(~removal.is_kept):
        assert removal.texts[number] == texts[number]


def test_lines():
    """The lines go; a document that held nothing else is dropped, one that was blank before is not."""
    texts = Texts.of(["menu of the site\ntext\n  Menu of the Site", "menu of the site\n \n", " ", "text"])
    config = LineDedupConfig()
    frequent = count_lines(Texts.of(["menu of the site"]), config)["key"]
    removal = remove_lines(texts, find_lines(texts, frequent, config))
    assert outcome(removal) == ["text\n", None, " ", "text"]
    assert removal.num_cut == 1


@pytest.mark.parametrize(
    ("action", "min_overlap", "expected"),
    [
        ("drop", 0.0, [None, None, "clean"]),
        ("drop", 0.9, [None, f"He asked: {QUESTION}? Nobody knew it then.", "clean"]),
        ("cut", 0.0, [None, "He asked: ? Nobody knew it then.", "clean"]),
        ("cut", 0.9, [None, f"He asked: {QUESTION}? Nobody knew it then.", "clean"]),
    ],
)
def test_overlaps(action, min_overlap, expected):
    """Contaminated documents are dropped, or only the words that match."""
    texts = Texts.of([QUESTION, f"He asked: {QUESTION}? Nobody knew it then.", "clean"])
    config = DecontaminateConfig(paths=(Path("unused"),), ngram=5, action=action, min_overlap=min_overlap)
    overlaps = find_overlaps(texts, index_examples([("q", QUESTION)], 5))
    assert outcome(remove_overlaps(texts, overlaps, config)) == expected
