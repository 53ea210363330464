"""A page as a strict reader sees it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "input", "wbr"}


class Reader(HTMLParser):
    """Checks that tags balance, and gathers what there is."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
