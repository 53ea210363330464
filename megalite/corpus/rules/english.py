"""English words as spaCy's tokenizer cuts them, which is what datatrove's filters count. The one file that imports it.

    (don't      prefix (         special case   do  n't
    foo(x):     suffixes ) :     the rest       foo(x
    dyn-o.Mite  infixes - .      the rest       dyn  o  Mite

The tables (prefixes, suffixes, infixes, special cases) are those of the installed package. The walk over them is ours:
spaCy's looks at all that is left again for each character that it takes off, so that 4,000 equal signs on end take it
six seconds; this one takes time in proportion to the length. A test holds the two against each other.

What is left out: a chunk is never taken for an address where the pattern of addresses might try too much, and special
cases are looked for in each chunk by itself, where spaCy also sees pieces of them with blanks between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec

from megalite.errors import UnavailableError

TAIL = 12
"""Characters at the end in which a suffix is looked for; more of them where one goes on before."""

MAX_ADDRESS_WORK = 20_000
"""A chunk's characters, times its colons, times its at signs: what the pattern of addresses tries in the worst case."""

CURRENCY = "$"
"""Prefixes that begin with a letter have it (US$)."""

PLAIN_TAIL = re.compile(r"[A-Za-z_./:=,-]*[A-Za-z]|.*[0-9]", re.DOTALL)
"""What no suffix ends: those that end with a letter stand behind a digit (km) or have an apostrophe ('s)."""

SINGLE_SUFFIXES = ',;:!?)]}>"*'
"""Suffixes that are not the end of a longer one. Most chunks end in one of these, or in a letter."""

Cases = Mapping[str, Sequence[str]]


def refuse_without_spacy() -> None:
    """Look for the package without importing it, which takes three seconds.

    Raises:
        UnavailableError: it is not installed.
    """
    if find_spec("spacy") is None:
        raise UnavailableError(
            "compat: datatrove counts words as spaCy cuts them: pip install 'megalite[spacy]', or leave compat out"
        )


class English:
    """spaCy's tables, and how they cut a chunk.

    Raises:
        UnavailableError: spaCy is not installed.
    """

    def __init__(self) -> None:
        refuse_without_spacy()
        from spacy.lang.en import English as Language
        from spacy.pipeline import Sentencizer
        from spacy.symbols import ORTH
        from spacy.util import compile_infix_regex, compile_suffix_regex

        tables = Language.Defaults
        self._prefix = re.compile("|".join(each for each in tables.prefixes if each.strip()))
        self._suffix: re.Pattern[str] = compile_suffix_regex(tables.suffixes)
        self._infix: re.Pattern[str] = compile_infix_regex(tables.infixes)
        self._is_address: Callable[[str], object] = tables.url_match
        self.end_marks = frozenset(Sentencizer.default_punct_chars)
        """Words that end a sentence."""
        self.cases: Cases = {
            text: [part[ORTH] for part in parts]
            for text, parts in tables.tokenizer_exceptions.items()
            if not text.isspace()
        }
        """Chunks that are cut in a way of their own."""
        self._longest_case = max(map(len, self.cases))
        self._hidden = {
            tuple(self._cut(text, {})): parts for text, parts in self.cases.items() if self._has_affix(text)
        }
        """Special cases by the words that they fall into where they stand inside of a chunk."""
        self._first_of_hidden = {words[0] for words in self._hidden}
        self._hidden_lengths = sorted({len(words) for words in self._hidden}, reverse=True)

    def cut(self, chunk: str) -> list[str]:
        """The words of a chunk, which has no blanks; joined they are the chunk."""
        return self._with_hidden_cases(self._cut(chunk, self.cases))

    def _cut(self, chunk: str, cases: Cases) -> list[str]:
        """Take affixes off both ends, as long as there are any; cut the rest at its infixes."""
        before: list[str] = []
        behind: list[str] = []
        start, end = 0, len(chunk)
        has_currency, bare_end = CURRENCY in chunk, -1
        while start < end and not self._is_case(chunk, start, end, cases):
            may_begin = has_currency or not (chunk[start].isascii() and chunk[start].isalnum())
            prefix = self._prefix.match(chunk, start, end) if may_begin else None
            inner = prefix.end() if prefix else start
            if prefix and self._is_case(chunk, inner, end, cases):
                before.append(chunk[start:inner])
                start = inner
                break
            is_same_tail = end == bare_end and inner <= end - TAIL  # as for the prefix before: no suffix
            outer = end if is_same_tail else self._start_of_suffix(chunk, inner, end)
            bare_end = end if outer == end and inner <= end - TAIL else -1
            if outer < end and self._is_case(chunk, start, outer, cases):
                behind.append(chunk[outer:end])
                end = outer
                break
            if inner == start and outer == end:
                break
            if inner > start:
                before.append(chunk[start:inner])
            if outer < end:
                behind.append(chunk[outer:end])
            start, end = inner, outer
        return [*before, *self._cut_rest(chunk[start:end], cases), *reversed(behind)]

    def _is_case(self, chunk: str, start: int, end: int, cases: Cases) -> bool:
        return 0 < end - start <= self._longest_case and chunk[start:end] in cases

    def _start_of_suffix(self, chunk: str, start: int, end: int) -> int:
        """Where the suffix of chunk[start:end] begins; `end` if there is none."""
        if PLAIN_TAIL.fullmatch(chunk, max(start, end - TAIL), end):
            return end
        if start < end and chunk[end - 1] in SINGLE_SUFFIXES:
            return end - 1
        size = TAIL
        while True:
            tail = max(start, end - size)
            found = self._suffix.search(chunk[tail:end])
            if found is None or found.start() > 0 or tail == start:
                return end if found is None else tail + found.start()
            size *= 2

    def _cut_rest(self, rest: str, cases: Cases) -> Iterator[str]:
        if rest in cases:
            yield from cases[rest]
            return
        if rest.isascii() and rest.isalnum():
            yield rest
            return
        if self._may_be_address(rest) and self._is_address(rest):
            yield rest
            return
        done = 0
        for infix in self._infix.finditer(rest):
            if infix.start() == 0:
                continue
            if infix.start() > done:
                yield rest[done : infix.start()]
            yield infix[0]
            done = infix.end()
        if done < len(rest):
            yield rest[done:]

    def _may_be_address(self, rest: str) -> bool:
        work = len(rest) * (1 + rest.count(":")) * (1 + rest.count("@"))
        return "." in rest and work <= MAX_ADDRESS_WORK

    def _has_affix(self, text: str) -> bool:
        found = self._prefix.match(text), self._suffix.search(text), self._infix.search(text)
        return any(found)

    def _with_hidden_cases(self, words: list[str]) -> list[str]:
        """The words with special cases put together again: the longest first, then the first."""
        if len(words) == 1 or self._first_of_hidden.isdisjoint(words):
            return words
        found: dict[int, int] = {}
        taken: set[int] = set()
        places = [place for place, word in enumerate(words) if word in self._first_of_hidden]
        for length in self._hidden_lengths:
            for place in places:
                end = place + length
                if end <= len(words) and tuple(words[place:end]) in self._hidden:
                    if place not in taken and end - 1 not in taken:
                        found[place] = length
                    taken.update(range(place, end))
        merged: list[str] = []
        place = 0
        while place < len(words):
            length = found.get(place, 0)
            merged += self._hidden[tuple(words[place : place + length])] if length else [words[place]]
            place += length or 1
        return merged
