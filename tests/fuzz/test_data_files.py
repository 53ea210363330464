"""Data of stations and of Megatron-LM in which anything is changed: read as it was meant, or refused in words.

Each case damages one file of a set that is whole, does with the set what the commands do, and puts the file back. Half
of the damaged manifests get a checksum that fits, so that what lies behind it is tried, too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from megalite.corpus.card.lineage import trace
from megalite.corpus.corpus import Corpus
from megalite.corpus.inspection import Wanted, inspect
from megalite.corpus.prepare import prepare
from megalite.corpus.recipe import DataRecipe, DocumentSource
from megalite.data.verify import complaints, list_path
from megalite.errors import UserError
from megalite.records import NO_CHECKSUM, seal
from megalite.tokenizer.tokenizer import Tokenizer
from tests.data.test_verify import make_set, open_set, read_everything, verified
from tests.fuzz.kit import survive
from tests.fuzz.mutate import mutate, mutate_bytes, mutate_text
from tests.kit.data import prose, write_json_lines
from tests.kit.mutations import mutated

JSON_PIECES = ("{", "}", "[", "]", ",", ":", '"', "\\u", "\\ud800", "null", "1e999", "NaN", "-", "[" * 600, "9" * 5000)


class Case(NamedTuple):
    """One change of one file."""

    file: str
    how: str
    seed: int


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of folder; all kernels are compiled by reading it once, before there is a limit on memory."""
    folder = make_set(tmp_path_factory.mktemp("data") / "set")
    read_everything(open_set(folder))
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a recipe leaves."""
    folder = tmp_path_factory.mktemp("recipe")
    raw = write_json_lines(folder / "raw.jsonl", [*prose(40), "short"])
    tokenizer, pack = {"kind": "byte-bpe", "vocab_size": 300}, {"seq_len": 32}
    prepare(DataRecipe(out=folder / "out", sources=[{"path": raw}], valid_fraction=0.0, tokenizer=tokenizer, pack=pack))
    for seed in range(5):
        look_at_recipe(folder / "out", random.Random(seed))
    return folder / "out"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """Where cases run, and nothing must be written."""
    return tmp_path


def as_json(data: bytes, rng: random.Random) -> bytes:
    """Another value somewhere; a manifest with the checksum of what it was."""
    return json.dumps(mutate(json.loads(data), rng, rng.choice((1, 1, 2)))).encode()


def as_sealed_json(data: bytes, rng: random.Random) -> bytes:
    """Another value somewhere, and a checksum that fits."""
    changed = json.loads(as_json(data, rng))
    if not isinstance(changed, dict):
        return json.dumps(changed).encode()
    return seal(json.dumps({**changed, "checksum": NO_CHECKSUM}, indent=2, sort_keys=True)).encode()


def as_text(data: bytes, rng: random.Random) -> bytes:
    """Other characters somewhere."""
    return mutate_text(data.decode(), rng, JSON_PIECES).encode(errors="replace")


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bytes": mutate_bytes,
    "text": as_text,
    "values": as_json,
    "sealed values": as_sealed_json,
}


def cases(folder: Path, pattern: str, how: tuple[str, ...], rng: random.Random, count: int) -> Iterator[Case]:
    """Changes of the files of one kind."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob(pattern))
    assert files
    for number in range(count):
        yield Case(files[number % len(files)], rng.choice(how), rng.randrange(2**32))


def on_damaged(folder: Path, use: Callable[[Path, random.Random], object]) -> Callable[[Case], None]:
    """A function that does something with a folder in which one file is changed, and finds no other file after it."""
    files = set(folder.rglob("*"))

    def run(case: Case) -> None:
        rng = random.Random(case.seed)
        with mutated(folder / case.file, lambda data, *_: CHANGES[case.how](data, rng), rng):
            try:
                use(folder, rng)
            finally:
                assert set(folder.rglob("*")) == files

    return run


def look_at_set(folder: Path, _: random.Random) -> None:
    """What training, `data show` and `data verify` do. Whatever opens can be read."""
    with suppress(UserError):
        read_everything(open_set(folder))
    verified(folder)


def look_at_recipe(out: Path, rng: random.Random) -> None:
    """Two of what `data inspect`, `card`, `verify`, the next station and a training run do with folders of stations."""
    looks = [
        lambda: inspect(out, Wanted(num=1)),
        lambda: trace(out),
        lambda: list(complaints(list_path(out).checks, threads=1)),
        lambda: list(Corpus([DocumentSource(path=out / "dedup")]).read()),
        lambda: Tokenizer.load(out / "tokenizer").encode("some text"),
    ]
    for look in rng.sample(looks, 2):
        with suppress(UserError):
            look()


def test_manifests(whole: Path, num_cases: int, rng: random.Random, empty: Path):
    """Of tokens, cuts and orders."""
    how = ("bytes", "text", "values", "sealed values", "sealed values", "sealed values")
    survive(cases(whole, "*.json", how, rng, num_cases), on_damaged(whole, look_at_set), empty)


def test_manifests_of_documents(prepared: Path, num_cases: int, rng: random.Random, empty: Path):
    """Of every station of a recipe."""
    how = ("bytes", "text", "values", "sealed values", "sealed values", "sealed values")
    survive(cases(prepared, "manifest.json", how, rng, num_cases), on_damaged(prepared, look_at_recipe), empty)


@pytest.mark.parametrize("pattern", ["*.bin", "*.idx", "*.npy"])
def test_tokens_and_cuts(pattern: str, whole: Path, num_cases: int, rng: random.Random, empty: Path):
    """Token files, their indices, and the columns of packed folders and orders."""
    survive(cases(whole, pattern, ("bytes",), rng, num_cases), on_damaged(whole, look_at_set), empty)


def test_files_of_documents(prepared: Path, num_cases: int, rng: random.Random, empty: Path):
    """The Parquet files that stations hand on."""
    survive(cases(prepared, "*.parquet", ("bytes",), rng, num_cases), on_damaged(prepared, look_at_recipe), empty)
