"""Pages to text: the main part is kept, what surrounds it is left out, any bytes are read."""

from __future__ import annotations

import builtins
import time

import pytest

from megalite.corpus.reading.html import MAX_DEPTH, decode, extract
from megalite.errors import DataError, UnavailableError

pytest.importorskip("resiliparse")

PARAGRAPHS = (
    "The first paragraph says what the page is about, in bold & italic words.",
    "The second paragraph goes on for a while, so that nobody takes it for a menu.",
    "Ein dritter Absatz mit Umlauten: schöne Grüße aus Köln.",
)

PAGE = f"""<!doctype html>
<html><head><title>A page</title><style>p {{ color: red }}</style><script>var hidden = "script text";</script></head>
<body>
<header><nav><ul><li><a href="/">Start</a></li><li><a href="/about">About us</a></li></ul></nav></header>
<main><article>
<h1>The heading</h1>
<p>{PARAGRAPHS[0].replace("bold", "<b>bold</b>").replace("&", "&amp;")}</p>
<p>{PARAGRAPHS[1]}</p>
<pre>def f(x):
    return x</pre>
<p>{PARAGRAPHS[2]}</p>
</article></main>
<footer>Imprint and cookies</footer>
</body></html>"""


def test_the_main_part():
    """Heading, paragraphs and code come in order, with their lines; scripts, styles, menus and the footer do not."""
    text = extract(PAGE)
    assert [line for line in text.split("\n") if line] == [
        "The heading",
        *PARAGRAPHS[:2],
        "def f(x):",
        "    return x",
        PARAGRAPHS[2],
    ]
    assert extract(PAGE.encode()) == text


@pytest.mark.parametrize(
    ("page", "text"),
    [("", ""), ("<html></html>", ""), ("just text", "just text"), ("<p>a<p>b<b", "a\n\nb"), ("<", "<")],
)
def test_odd_pages(page, text):
    """Nothing, no tags, tags that do not end."""
    assert extract(page) == text


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-8", "schöne Grüße aus Köln, und ein paar Wörter mehr"),
        ("windows-1252", "schöne Grüße aus Köln, und ein paar Wörter mehr"),
        ("windows-1251", "Библиотека открывается в девять часов утра"),
        ("koi8-r", "Библиотека открывается в девять часов утра"),
        ("shift_jis", "図書館は朝九時に開いて、夜遅くまで開いています。"),
        ("euc-kr", "도서관은 아침 아홉 시에 문을 엽니다."),
        ("gb18030", "图书馆早上九点开门，晚上很晚才关门。"),
        ("utf-16-le", "schöne Grüße aus Köln"),
    ],
)
def test_encodings(encoding, text):
    """As the server said, as the page itself says, and with a byte order mark, which is believed before both."""
    page = f"<html><body><p>{text}</p></body></html>"
    assert extract(page.encode(encoding), encoding=encoding) == text
    if encoding != "utf-16-le":
        declared = page.replace("<body>", f'<head><meta charset="{encoding}"></head><body>')
        assert extract(declared.encode(encoding)) == text
        assert extract(declared.encode(encoding), encoding="no-such-encoding") == text
    assert extract("\ufeff".encode("utf-16-le") + page.encode("utf-16-le"), encoding="ascii") == text
    assert extract(b"\xef\xbb\xbf" + page.encode(), encoding="ascii") == text


def test_bytes_that_do_not_fit_are_replaced():
    """No page is lost for a broken byte."""
    assert decode(b"caf\xff\xfe!", "utf-8") == "caf\ufffd\ufffd!"
    assert extract(b"<p>a broken \xff byte</p>", encoding="utf-8") == "a broken \ufffd byte"


def test_deep_nesting_is_refused_in_time():
    """Elements in each other without end would take a parser hours; tags that may lack an end are not counted."""
    start = time.process_time()
    for page in ("<div>" * 500_000, "<b><i>" * 100_000 + "x", "</p>" * 99 + "<div><span>" * MAX_DEPTH + "</div>" * 9):
        with pytest.raises(DataError, match=f"nested more than {MAX_DEPTH} deep"):
            extract(page)
    assert "cell" in extract("<table><tr><td>cell" * 3 + "<p>x<br><li>y" * 3 * MAX_DEPTH)
    assert extract("<div><p>line</p></div>" * 3 * MAX_DEPTH).count("line") == 3 * MAX_DEPTH
    assert time.process_time() - start < 30


def test_without_resiliparse(monkeypatch):
    """What is missing is named, with the way to get it."""
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "resiliparse":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnavailableError, match=r"needs resiliparse: pip install 'megalite\[data\]'"):
        extract("<p>x")
