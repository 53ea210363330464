"""Plain text out of the files of a Debian machine: manual pages, HTML, sources, documentation."""

from __future__ import annotations

import gzip
import html
import os
import re
import zlib

MAX_FILE_BYTES = 32 << 20
"""Larger files are no texts."""

MAX_TEXT_BYTES = 4 << 20
"""Longer texts are cut at a line end."""

MIN_CHARS = 200

TEXT_SUFFIX = re.compile(
    r"|\.(txt|md|rst|html?|py|h|c|pod|pm|tex|xml|adoc|asciidoc|texi|info|js|sh|pl|rs|go|java|[0-9].*)"
)
"""Of a file name in lower case; manual pages have their section there, and many documents nothing."""

NAMES = ("copyright", "changelog.debian", "news.debian")
"""Files of /usr/share/doc, in lower case, whose suffix is none."""

MANUAL_SUFFIX = re.compile(r"\.[0-9]")

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")
BLANKS = re.compile(r"[ \t]{2,}")
EMPTY_LINES = re.compile(r"\n{3,}")

HTML_UNSEEN = re.compile(r"<(script|style|head|nav)\b.*?</\1\s*>|<!--.*?-->", re.IGNORECASE | re.DOTALL)
HTML_BLOCK = re.compile(
    r"</?(p|div|br|li|tr|h[1-6]|pre|table|ul|ol|dl|dt|dd|section|blockquote)\b[^>]*>", re.IGNORECASE
)
HTML_TAG = re.compile(r"<[^>]{0,400}>")

ROFF_ESCAPE = re.compile(r"\\f[BIRPCW]|\\f\(..|\\f\[[^]]*\]|\\[&|^%,/]|\\s[-+]?\d")
ROFF_UNSEEN = ('.\\"', "'\\\"", ".de", ".ds", ".nr", ".if", ".ie", ".el", ".so", ".ad", ".nh", ".hy")
ROFF_HEADINGS = frozenset([".SH", ".SS", ".TH", ".Sh", ".Ss"])
ROFF_BREAKS = frozenset([".PP", ".P", ".LP", ".TP", ".IP", ".Pp", ".sp"])
ROFF_CHARACTERS = (("\\-", "-"), ("\\e", "\\"), ("\\(aq", "'"))


def is_text_file(path: str) -> bool:
    """Whether a file is worth reading, by its name; .gz is looked through."""
    inner = path.removesuffix(".gz")
    suffix = os.path.splitext(inner)[1].lower()
    named = os.path.basename(inner).lower() in NAMES
    return named or TEXT_SUFFIX.fullmatch(suffix) is not None


def read_text(path: str) -> str | None:
    """The text of a file, markup taken off; None when it is not text, or too short."""
    content = _read_bytes(path)
    text = None if content is None else _decode(content)
    if text is None:
        return None
    inner = path.removesuffix(".gz")
    suffix = os.path.splitext(inner)[1].lower()
    if suffix in (".html", ".htm", ".xml"):
        text = strip_html(text)
    elif "/man/" in inner and MANUAL_SUFFIX.match(suffix):
        text = strip_roff(text)
    text = CONTROL.sub("", text.replace("\r\n", "\n").strip())
    return _cut(text) if len(text) >= MIN_CHARS else None


def strip_html(text: str) -> str:
    """What a reader sees of HTML, one block a line."""
    text = HTML_BLOCK.sub("\n", HTML_UNSEEN.sub(" ", text))
    text = html.unescape(HTML_TAG.sub("", text))
    lines = (BLANKS.sub(" ", line).strip() for line in text.split("\n"))
    return EMPTY_LINES.sub("\n\n", "\n".join(lines)).strip()


def strip_roff(text: str) -> str:
    """What a reader sees of a manual page, without its indentation."""
    lines = []
    for line in text.split("\n"):
        if line.startswith(ROFF_UNSEEN):
            continue
        if not line.startswith((".", "'")):
            lines.append(line)
            continue
        macro, argument = [*line.split(None, 1), ""][:2]
        if macro in ROFF_HEADINGS:
            lines.append("\n" + argument)
        elif macro in ROFF_BREAKS:
            lines.append("")
        elif argument and len(macro) <= 4:
            lines.append(argument)
    text = ROFF_ESCAPE.sub("", "\n".join(lines))
    for escape, character in ROFF_CHARACTERS:
        text = text.replace(escape, character)
    return EMPTY_LINES.sub("\n\n", text).strip()


def _read_bytes(path: str) -> bytes | None:
    try:
        if os.path.getsize(path) > MAX_FILE_BYTES:
            return None
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            return file.read()
    except (OSError, EOFError, zlib.error):
        return None


def _decode(content: bytes) -> str | None:
    """UTF-8, or else Latin-1 unless it has too many control characters for that; None for binary files."""
    if b"\0" in content[:8192]:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        num_controls = sum(byte < 9 or 127 <= byte < 160 for byte in content[:4096])
        return content.decode("latin-1") if num_controls <= 8 else None


def _cut(text: str) -> str:
    """The text up to the last line end that leaves it short enough."""
    encoded = text.encode("utf-8", "ignore")
    if len(encoded) > MAX_TEXT_BYTES:
        head, line_end, _ = encoded[:MAX_TEXT_BYTES].rpartition(b"\n")
        encoded = head if line_end else encoded[:MAX_TEXT_BYTES]
    return encoded.decode("utf-8", "ignore")
