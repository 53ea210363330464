"""The text of a web page, without menus, headers and footers, by resiliparse. The one file that imports it.

Resiliparse follows rules over the parsed tree. Beside trafilatura, which reads more carefully, models trained on its
text came out equal, at an eighth of the time (Li et al. 2024, "DataComp-LM", section 4.2). Like all rules these lose a
few real lines, short lists above all, and let a few menus pass.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter

from megalite.errors import DataError, UnavailableError

MAX_DEPTH = 2000
"""Of elements in each other. By the rules of HTML5 a parser looks through all open elements at each new one, so that
20,000 take four seconds; browsers stop at 512."""

TAG = re.compile(r"<(/?)([a-zA-Z][^\s/>]*)")
"""The beginning of a tag: the stroke of one that closes, and the name."""

ENDLESS = frozenset(
    (
        *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"),
        *("p", "li", "dt", "dd", "td", "th", "tr", "tbody", "thead", "option"),
    )
)
"""Elements that hold no others, or that the next of their kind closes."""

MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def extract(html: bytes | str, *, encoding: str | None = None) -> str:
    """The main text of a page; empty when it has none.

    Args:
        html: the page.
        encoding: of bytes, as the server said; None, or one that does not exist, finds it in the page.

    Raises:
        DataError: elements nested deeper than MAX_DEPTH.
        UnavailableError: resiliparse is not installed.
    """
    try:
        from resiliparse.extract.html2text import extract_plain_text
    except ImportError as error:
        raise UnavailableError("HTML needs resiliparse: pip install 'megalite[data]'") from error
    text = html if isinstance(html, str) else decode(html, encoding)
    if text.count("<") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise DataError(f"HTML elements nested more than {MAX_DEPTH} deep")
    return extract_plain_text(
        text,
        main_content=True,
        preserve_formatting=True,
        list_bullets=True,
        alt_texts=False,
        comments=False,
        post_meta=False,
    )


def decode(page: bytes, encoding: str | None = None) -> str:
    """A page as text: by a byte order mark, the encoding given, UTF-8 if it is that, the page's own <meta>, or a guess.
    What does not fit becomes U+FFFD."""
    from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

    for mark, name in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ):
        if page.startswith(mark):
            return page[len(mark) :].decode(name, errors="replace")
    known = map_encoding_to_html5(encoding, fallback_utf8=False) if encoding else None
    if known is None and not page.isascii():
        try:
            return page.decode()  # what is UTF-8 by form is nothing else
        except UnicodeDecodeError:
            pass
    return page.decode(known or detect_encoding(page, from_html_meta=True) or "utf-8", errors="replace")


def _depth(html: str) -> int:
    """The most elements that are open at once, counted by tags; more rather than less where ends are missing.

    The end of an element that is not open closes nothing: with ends of another name a page gets as deep as it likes.
    """
    open_elements: Counter[str] = Counter()
    depth = deepest = 0
    for stroke, name in TAG.findall(html):
        name = name.lower()
        if name in ENDLESS:
            continue
        if not stroke:
            open_elements[name] += 1
            depth += 1
            deepest = max(deepest, depth)
        elif open_elements[name]:
            open_elements[name] -= 1
            depth -= 1
    return deepest
