"""Texts to try the rules on: hand-made traps, random Unicode, and the real text of Python's library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from hypothesis import strategies as st

TRAPS = [
    "",
    "a",
    " ",
    "\n",
    "\n\n",
    ".",
    "...",
    "…",
    "!?—«»",
    "the",
    "The quiet goon.",
    "the cat sat and the cat ran and the cat sat and the cat ran and the cat sat",
    "a b\na b\n a b \n\na b\na b\n\na b\na b\n",
    "\n\n  indented\n\n  indented\n\n",
    "one\r\ntwo\r\none\r\ntwo",
    "no newline at the end\nlike this",
    "漢字は空白なし。次の文！\n漢字は空白なし。次の文！",
    "全角　空白　もある。 全角　空白　もある。",
    "emoji 🙂 👨\u200d👩\u200d👧 🙂 end 🙂.",
    "combining e\u0301 e\u0301\u0301 \u0301alone",
    "x" * 3000,
    "(word) 'word' **word** word, word; #tag don't e-mail ...lead trail... a...b ......",
    "- item\n• item\n* item\n - item…\nitem ...  \nitem….",
    "| a | b |\n| --- | --- |\n| --- | --- |\n" * 3,
    "١٢٣ ½ ² 4 五 Ⅷ",
    "nbsp\u00a0blank\u2003em\u3000ideographic\u2028line\x85next\x1cfile",
]

ALPHABET = st.sampled_from(
    [*"aabbc  \n\n\n.....#-•…,!?\"'{[]12", "\t", "\r", "é", "漢", "。", "\u3000", "🙂", "\u2028", "İ"]
)

random_texts = st.one_of(
    st.text(ALPHABET, max_size=80),
    st.text(max_size=40),
    st.lists(st.sampled_from(["a", "b", "the", "of.", "(a", "…", "--", "é,"]), max_size=60).map(" ".join),
    st.lists(st.sampled_from(["a b", " a b", "", "c.", "the end", " ", "漢字"]), max_size=30).map("\n".join),
)


def library_texts(most: int = 40, most_chars: int = 30_000) -> list[str]:
    """Sources of Python's library: the first ones by name, each up to so many characters."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:most]
    return [path.read_text(encoding="utf-8")[:most_chars] for path in paths]
