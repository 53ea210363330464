"""Texts made to be slow: every pattern and every scanner that reads documents takes time in proportion to their length.

Each is fed what is worst for it: its beginnings end to end, near matches that fail late, places that overlap. An eighth
of a megabyte is compared with a whole one, in CPU time of this process, so that the machine's speed does not matter.
Eight times, not twice: what is not in proportion stands out so far then that caches which others fill cannot hide it.
"""

from __future__ import annotations

import base64
import gc
import importlib
import json
import pkgutil
import re
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import megalite.corpus.privacy
from megalite.corpus.privacy.redact import redact
from megalite.corpus.privacy.settings import PrivacyConfig
from megalite.corpus.reading.html import extract
from megalite.corpus.repair.repair import repair
from megalite.corpus.rules.apply import apply_rules
from megalite.corpus.rules.settings import (
    C4Config,
    CodeConfig,
    FineWebConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    RulesConfig,
)
from megalite.corpus.scoring.words import hash_words
from megalite.corpus.spans.settings import UrlDedupConfig
from megalite.corpus.spans.urls import normalise_url
from megalite.errors import DataError
from megalite.texts import Texts

WHOLE = 1_000_000

PART = WHOLE // 8

MAX_GROWTH = 12.0
"""Eight times, and what a processor's caches add. Time in proportion to the square of the length grows 64 times; where
that is only a part of all, it is found from two thirds of the other part on, as it is by twice the length and 2.5."""

NOISE_SECONDS = 0.02

TRIES = 12

Step = Callable[[str], object]

EVERYTHING = PrivacyConfig(
    us_ssn="<SSN>", address="<ADDRESS>", name="<NAME>", password="<PASSWORD>", private_ip_addresses=True
)

RULES = RulesConfig(
    c4=C4Config(),
    gopher_quality=GopherQualityConfig(),
    gopher_repetition=GopherRepetitionConfig(),
    fineweb=FineWebConfig(),
    code=CodeConfig(),
)

HEADER = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "typ": "JWT"}).encode()).decode().rstrip("=")

PRIVATE = {
    "addresses.STREET": ("1 A A A A ", "12 1st A. ", "1 Aaaaaaaaaaaaaaaaaaaaaaaaa Street "),
    "addresses.BEHIND": (
        "1 A St, A A A A A A A A A A A A A A A A",
        "1 A St, Aaaaaaaaaaaaa, Aaaaaaaaaaaaa, Aaaaaaaaaa, ",
    ),
    "addresses.FLAT_BEFORE": ("Flat 2, 1 A Street ",),
    "addresses.NO_HOUSE_BEFORE": ("1-1 Aaa ",),
    "addresses.YEAR": ("2019 Wall Street ",),
    "addresses.YEAR_BEFORE": ("in 2019 Wall Street ",),
    "addresses.HOUSE_NUMBER": ("Aweg 1 ", "Aweg 1-"),
    "addresses.GERMAN_TOWN": ("Aweg 1, 10115 Aaaaaaaaaaaaaaaaaaaaaaaaaaa-",),
    "addresses.GERMAN_STREET_BEFORE": ("Aaa-Aaa-Aaa-Aweg 1 ", "Aaa-Aaa-Aaa-Aaa-Aaa weg 1 "),
    "addresses.HIGHWAY": ("Bundesstraße 1 ",),
    "addresses.NAME_BEFORE": ("A den A den A den 1, 10115 A", "Aaaaaaaa 1, 10115 Aaaaaaaaa "),
    "addresses.BOX_BEFORE": ("P.O. Box 1 ",),
    "addresses.BOX_NUMBER": ("Postfach 10 20 30 40 ",),
    "credentials.KEY": ("sk-", "sk-sk-a1-", "xoxb-", "xoxb-a_", "glpat-", "pypi-", "xapp-1-", "gho_a ", "AIza-"),
    "credentials.PREFIX": ("sk-" + "aB1" * 9 + " ",),
    "credentials.PEM_BEGIN": ("-----BEGIN A1 B2 C3 PRIVATE KEY-", "-----BEGIN PRIVATE KEY-----"),
    "credentials.JWT_HEADER": ("eyJ-" * 64 + ".eyJ", "eyJ-" * 64 + ".", "eyJ-", f"{HEADER}-"),
    "credentials.JWT_BODY": (f"{HEADER}.", f"{HEADER}.eyJ-", f"{HEADER}.{HEADER}-{HEADER}"),
    "credentials.VALUE": ("password=", 'password="', "password = 'aaaaaa", "token=" + "a" * 128 + "\\"),
    "credentials.NAME_OF_AWS_SECRET": ("aws_secret=aws", "aws access key = aA0"),
    "credentials.AWS_SECRET": ("aws_secret_access_key=" + "aB1/" * 10 + ";",),
    "credentials.PLACEHOLDER": ("token=" + "/" * 60 + " ", "secret='A1_A1_A1_A1_A1_a'"),
    "credentials.LETTER": ("token=" + "1" * 120 + " ",),
    "credentials.ATTRIBUTE": ("token=" + "a.1" * 40 + " ",),
    "network.DOMAIN": ("a@" + "a." * 127, "a@" + "a-" * 31 + "a.", "x@y.", "a." * 30 + "a1@b.c"),
    "network.DOTTED_QUAD": ("1.", "11.22.33.44,", "1.1.1.1 "),
    "network.VERSION_BEFORE": ("version      1.2.3.4 ", "section. 93.184.215.14 "),
    "network.HEX_RUN": ("1:", "a::", " 1:2:3:4:5:6:7:8:9", " ::1"),
    "network.SLICE_BEFORE": ("x[::1]",),
    "payment.IBAN": ("DE89 ", "DE89 A A A A A A A A A A A ", "DE89" + "A" * 30 + " "),
    "payment.CARD": ("4111 1111 1111 1111 ", "4111-1111-1111-111 ", "1" * 19 + " "),
    "payment.CARD_FORMS": ("4111111111111111 ", "62" + "1" * 17 + " "),
    "people.WORDS": ("Anna ", "Anna A. von ", "John Aaaaaaaaaaaaaaaaaaaaaaa-", "Dear McMcMc"),
    "people.TITLE_BEFORE": ("Mr. Aa ", "Mr\n\n\nAa"),
    "people.INTRODUCTION_BEFORE": ("my name is Aa ", "name:  Aa Aa "),
    "telephone.INTERNATIONAL": ("+1", "+1" + "1" * 45, "\n+1 22 33 44 55 66", "+1(11)", "+49 1" + "1-11 22" * 6),
    "telephone.NORTH_AMERICA": ("212.555.1234 ", "212-555-1234-"),
    "telephone.NORTH_AMERICA_OPENED": ("(212) 555-123 ", "(212)"),
    "telephone.NATIONAL": ("01 23 45 67 89 ", "030/1234567 ", "0"),
    "telephone.NATIONAL_OPENED": ("(0301) 11111",),
    "telephone.PAIRS": ("01 02 03 04 05 x", "01 "),
    "telephone.HEX_PAIR_BEFORE": ("ab 01 23 45 67 89x",),
    "telephone.HEX_PAIR_BEHIND": ("01 23 45 67 89 ab ",),
    "telephone.PATCH_LINE": ("+49 30 1234567\n" + "-" * 300 + "\n",),
    "telephone.SSN": ("123-45-6789-", "123-45-6789 ", "123 45 6789 "),
    "telephone.SSN_BEFORE": ("SSN 123 45 6789 ", "social security 123 45 6789"),
}
"""Texts that are bad for each pattern, or for what is done with what it finds: of a megabyte the first of each, the
others of a fifth of one, which is enough to see a square."""

MARKS = "\u0301\u0316"
"""Two combining marks in the wrong order."""

SCANNED = (
    *(MARKS, "\u0f73\u0316", "e\u0301", "\u1100\u1161\u11a8", "\n", " \n", "\r", "\u00a0", "\u200b", "\x00"),
    *("a ", "A", "the ", "a\n", "[1", "[1]", "[", "...", "…", '.""', "!)", "#", "- ", "{", "漢", "。", "🙂"),
    *("lorem ipsu", "javascrip", "use of cookie", "a b\n\n", "1", "_", "="),
)

PAGES = ("<div>z</b>w", "<b></div>", "<p></b>", "<div></applet>", "<a><p>", "<", "</", "<a b", "<!--", "&am", "<pre>\n")

ADDRESSES = ("http://h/?&a", "http://h/?utm_a=1&", "http://[", "//", "a.", "http://h:1", "?", "@", "%41", "*")


def filled(unit: str, size: int) -> str:
    """So many bytes of a unit, again and again."""
    raw = unit.encode()
    return (raw * (size // len(raw) + 1))[:size].decode(errors="ignore")


def seconds(step: Step, text: str) -> float:
    gc.disable()
    start = time.process_time()
    try:
        step(text)
    except DataError:
        pass  # refused is done
    finally:
        gc.enable()
    return time.process_time() - start


NOISY_SECONDS = 0.5
"""Of which much may be the machine's."""


def assert_linear(step: Step, unit: str, whole: int = WHOLE) -> None:
    """The best of a few tries counts: others may be at work on the machine."""
    part = whole * PART // WHOLE
    few, many = filled(unit, part), filled(unit, whole)
    bound, best, least = float("inf"), float("inf"), float("inf")
    for _ in range(TRIES):
        least = min(least, seconds(step, few))
        best = min(best, seconds(step, many))
        bound = MAX_GROWTH * least + NOISE_SECONDS
        if best <= bound:
            return
    if best < NOISY_SECONDS:  # on a busy machine a longer text tells more
        assert_linear(step, unit, 4 * whole)
        return
    raise AssertionError(f"{unit[:60]!r}: {best:.2f} s for {whole:,} bytes, {least:.2f} s for {part:,}")


def of_one_text(function: Callable[[Texts], object]) -> Step:
    return lambda text: function(Texts.of([text]))


STEPS: dict[str, Step] = {
    "repair": of_one_text(repair),
    "judge": of_one_text(partial(apply_rules, config=RULES)),
    "words": of_one_text(lambda texts: hash_words(texts.buffer, texts.offsets)),
}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Nothing is compiled while the clock runs."""
    redact(Texts.of(["a@b.com"]), EVERYTHING)
    for step in STEPS.values():
        step(f"a. {MARKS}")
    gc.collect()


def patterns() -> set[str]:
    """Every regular expression of the package, as module.NAME."""
    package = megalite.corpus.privacy
    modules = {
        info.name: importlib.import_module(f"{package.__name__}.{info.name}")
        for info in pkgutil.iter_modules(package.__path__)
    }
    return {
        f"{name}.{attribute}"
        for name, module in modules.items()
        for attribute, value in vars(module).items()
        if isinstance(value, re.Pattern)
    }


def test_every_pattern_has_its_worst_text():
    """A new pattern in megalite/corpus/privacy needs a line in PRIVATE."""
    assert patterns() == set(PRIVATE)


@pytest.mark.parametrize("name", PRIVATE)
def test_redaction_takes_time_in_proportion(name):
    """All kinds at once, as `privacy: {}` and the guesses do it."""
    worst, *others = PRIVATE[name]
    step = of_one_text(partial(redact, config=EVERYTHING))
    assert_linear(step, worst)
    for unit in others:
        assert_linear(step, unit, WHOLE // 5)


@pytest.mark.parametrize("name", STEPS)
def test_scanners_take_time_in_proportion(name):
    """Repair, the rules and the words of the models."""
    for unit in SCANNED:
        assert_linear(STEPS[name], unit)


def test_mojibake_takes_time_in_proportion():
    """ftfy, line by line; a tenth of the size, since it is slow."""
    pytest.importorskip("ftfy", reason="fix_encoding needs ftfy")
    for unit in ("ÃƒÂ", "é\n", "â€", MARKS):
        assert_linear(of_one_text(partial(repair, fix_encoding=True)), unit, WHOLE // 10)


def test_languages_take_time_in_proportion():
    """Only a sample of each text is read; of many short ones all."""
    pytest.importorskip("py3langid", reason="languages need py3langid")
    from megalite.corpus.language import identify

    identify(Texts.of(["a"]))
    for unit in (MARKS, "a", "\n", "漢"):
        assert_linear(of_one_text(identify), unit)
        assert_linear(lambda text: identify(Texts.of(re.findall("(?s).{1,2000}", text))), unit)


def test_pages_take_time_in_proportion():
    """Elements inside each other cost a parser the square of their number; ends of other elements must not hide it."""
    pytest.importorskip("resiliparse", reason="HTML needs resiliparse")
    for unit in PAGES:
        assert_linear(extract, unit)


def test_addresses_take_time_in_proportion():
    """One address of a megabyte."""
    for unit in ADDRESSES:
        assert_linear(partial(normalise_url, config=UrlDedupConfig()), unit)


def test_damaged_archives_take_time_in_proportion(tmp_path: Path, capfd):
    """Bytes of which many begin a gzip member that reads to the end of the file and never ends."""
    pytest.importorskip("warcio", reason="web archives need warcio")
    from megalite.corpus.reading.warc import Skipped, read_archive

    header = b"\x1f\x8b\x08" + bytes(6) + b"\x03"
    to_come = b"".join(header + b"\0" + struct.pack("<HH", size, size ^ 0xFFFF) for size in range(59_985, -1, -15))
    block = b"\0" + struct.pack("<HH", 60_000, 60_000 ^ 0xFFFF) + b"x" * 60_000
    for make in (lambda size: b"\x1f\x8b\x08" * (size // 3), lambda size: to_come + block * (size // len(block))):
        path, times = tmp_path / "x.warc.gz", []
        for size in (PART, WHOLE):
            path.write_bytes(make(size))
            start = time.process_time()
            assert not list(read_archive(path, Skipped()))
            times.append(time.process_time() - start)
        assert times[1] <= MAX_GROWTH * times[0] + 0.5
        assert times[1] < 5.0
    capfd.readouterr()  # warcio prints what zlib says


def test_marks_in_any_order_come_out_composed():
    """Long runs are put in order before Python composes them, which changes no text."""
    import unicodedata

    rng = np.random.default_rng(0)
    pool = ["\u0301", "\u0316", "\u0344", "\u0f73", "\u0f71", "\u0345", "\u05b0", "\u3099", "a", "ệ", "\u1e14", "."]
    weights = np.array([4.0] * 8 + [0.1] * 4)
    texts = ["a" + "".join(rng.choice(pool, 200, p=weights / weights.sum())) + "b" for _ in range(200)]
    assert list(repair(Texts.of(texts))) == [unicodedata.normalize("NFC", text) for text in texts]
