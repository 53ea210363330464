"""What people and crawls put into documents, and tokenizers that somebody else made: read, put aside, or refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import Rejected
from megalite.corpus.effects import with_rule_sets
from megalite.corpus.recipe import CleanConfig, DocumentSource
from megalite.corpus.rules.settings import CodeConfig
from megalite.corpus.stations.clean import clean_texts
from megalite.corpus.stations.train_tokenizer import train_tokenizer
from megalite.texts import Texts
from megalite.tokenizer.settings import TokenizerConfig
from megalite.tokenizer.tokenizer import Tokenizer
from tests.fuzz.kit import survive
from tests.fuzz.mutate import mutate, mutate_bytes, mutate_text
from tests.kit.data import KINDS, prose
from tests.kit.mutations import mutated
from tests.kit.paths import ROOT

PIECES = (
    *("\x00", "\ufeff", "\u202e", "\u0301" * 300, "\U0001f468\u200d" * 100, "\u2028", "\x85", "\r", "\ud7ff", "\uffff"),
    *("<", "</", "<!--", "<script>", "<p>" * 300, "&#0;", "&" * 500, "<![CDATA[", "<a b='", "&#x110000;", "\\ud800"),
    *("{", "}", '"', "\\", "[" * 5000, "{" * 5000, "9" * 5000, "1e999", ",", "null", '{"text": ', '{"text": "x"}\n'),
    *("sk-" * 300, "AKIA" * 99, "a@b." * 300, "1." * 300, "http://" * 99, "-----BEGIN ", "xoxb-" * 99),
    *("</s>", "<unk>", "00 " * 300, "\\x00" * 300, "<?xml version=", "<!doctype html", "SPDX-License-Identifier: ("),
    *("Dear Anna ", "Mr. ", "12 A St, ", "Hauptstra\u00dfe 5, 10115 "),
    *("\u2581" * 50, "the the " * 300, "a" * 9000, " " * 9000, "\n" * 3000, "\t", "| --- " * 300, "lorem ipsum"),
)

HTML = "<html><title>t</title><body>" + "<p>Some text of a page, long enough to be one.</p>" * 9 + "</body>"

WARC = "".join(
    f"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: http://example.org/{number}\r\nContent-Type: text/plain\r\n"
    "Content-Length: 24\r\n\r\nThe text of a small page\r\n\r\n"
    for number in range(5)
)

CONFIG = with_rule_sets(
    CleanConfig(privacy={"name": "<NAME>", "address": "<ADDRESS>"}, fix_encoding=True, license={"unknown": "keep"})
).model_copy(update={"code": CodeConfig()})


def raw_files() -> dict[str, bytes]:
    """A file of each kind that is read."""
    lines = "".join(
        json.dumps({"text": text, "id": number, "x": [1, None]}) + "\n" for number, text in enumerate(prose(20))
    )
    table = pa.table({"text": prose(50), "id": [str(number) for number in range(50)]})
    parquet, arrow = pa.BufferOutputStream(), pa.BufferOutputStream()
    pq.write_table(table, parquet, row_group_size=10)
    with pa.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    plain = {
        "a.jsonl": lines.encode(),
        "a.csv": ("text,id\n" + "".join(f'"{text}",{n}\n' for n, text in enumerate(prose(9)))).encode(),
        "a.html": HTML.encode(),
        "a.txt": "\n".join(prose(9)).encode(),
        "a.warc": WARC.encode(),
        "a.parquet": parquet.getvalue().to_pybytes(),
        "a.arrow": arrow.getvalue().to_pybytes(),
    }
    packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    return plain | {f"a.jsonl{suffix}": pack(lines.encode()) for suffix, pack in packed.items()}


def damaged(files: dict[str, bytes], rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """The files with other bytes, or where they are text, other characters."""
    for number in range(count):
        name = list(files)[number % len(files)]
        try:
            text = files[name].decode()
        except UnicodeDecodeError:
            text = ""
        is_text = text and rng.random() < 0.7
        yield name, mutate_text(text, rng, PIECES).encode() if is_text else mutate_bytes(files[name], rng)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a case lies, beside the empty folder in which it runs."""
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_files_of_documents(num_cases: int, rng: random.Random, place: Path):
    """Every kind of file, cleaned by every rule."""
    files = raw_files()

    def run(case: tuple[str, bytes]) -> None:
        name, content = case
        path = place / name
        path.write_bytes(content)
        try:
            records = list(Corpus([DocumentSource(path=path, max_record_mb=1, max_expansion=20)]).read())
            texts = [record.text for record in records if not isinstance(record, Rejected)]
            clean_texts(Texts.of(texts), CONFIG)
        finally:
            path.unlink()

    for name, content in files.items():
        run((name, content))  # compiled before there is a limit on memory
    survive(damaged(files, rng, num_cases), run, place / "empty")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    corpus = Corpus([DocumentSource(path=ROOT / "tests" / "fuzz", include=("*.py",))])
    for kind in KINDS:
        train_tokenizer(corpus, root / kind, TokenizerConfig(kind=kind, vocab_size=500))
    return root


def use(folder: Path, texts: list[str], *, fast: bool) -> None:
    """Load a tokenizer and use it by its library; by our encoder too, which takes a while to be made and compared."""
    tokenizer = Tokenizer.load(folder)
    if fast:
        tokenizer.encode_texts(Texts.of(texts), with_eos=True)
    assert isinstance(tokenizer.decode(tokenizer.encode(texts[0])[:50]), str)


def test_files_of_tokenizers(num_cases: int, rng: random.Random, tokenizers: Path, place: Path):
    """Own folders, and folders as others leave them, without the record of their hashes."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "megalite_tokenizer.json")
    files = [path for kind in KINDS for name in names if (path := tokenizers / kind / name).is_file()]
    texts = ["some text", *PIECES[:12], "the cat sat"]
    for kind in KINDS:
        use(tokenizers / kind, texts, fast=True)

    def change(data: bytes, rng: random.Random, *_: object) -> bytes:
        kind = rng.random()
        if not data.startswith(b"{") or kind < 0.3:
            return mutate_bytes(data, rng)
        if kind < 0.5:
            return mutate_text(data.decode(), rng, PIECES).encode(errors="replace")
        return json.dumps(mutate(json.loads(data), rng, rng.choice((1, 1, 3)))).encode()

    def run(case: tuple[Path, bool, int]) -> None:
        path, is_foreign, number = case
        record, aside = path.with_name("megalite_tokenizer.json"), place / "aside"
        rng = random.Random(number)
        with mutated(path, change, rng):
            if is_foreign:
                record.rename(aside)
            try:
                use(path.parent, texts, fast=number % 20 == 0)
            finally:
                if is_foreign:
                    aside.rename(record)

    cases = ((rng.choice(files), rng.random() < 0.7, rng.randrange(2**32)) for _ in range(num_cases))
    survive(cases, run, place / "empty")


def test_hostile_texts(num_cases: int, rng: random.Random, tokenizers: Path, place: Path):
    """Through every rule and every encoder; ids of a text are those of the library."""
    loaded = [Tokenizer.load(tokenizers / kind) for kind in KINDS]
    sample = prose(20)

    def run(texts: list[str]) -> None:
        clean_texts(Texts.of(texts), CONFIG)
        for tokenizer in loaded:
            ids, lengths = tokenizer.encode_texts(Texts.of(texts))
            assert ids.tolist() == [id for each in tokenizer.encode_batch(texts) for id in each]
            assert lengths.sum() == ids.size

    run(sample)
    several = ([mutate_text(rng.choice(sample), rng, PIECES) for _ in range(4)] for _ in range(num_cases))
    survive(several, run, place / "empty")
