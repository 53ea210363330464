"""Small data sets made on the spot, and the slow plain ways to say what should come out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from megalite.corpus.corpus import Corpus
from megalite.corpus.recipe import DocumentSource
from megalite.data.indexed import IndexedWriter
from megalite.data.pack import pack
from megalite.data.settings import PackConfig
from megalite.data.sources import TOKENS_NAME, WEIGHTS_FILE
from megalite.stations.station import StationResult, run_station
from megalite.tokenizer.settings import TokenizerKind
from megalite.tokenizer.tokenizer import token_dtype

WORDS = ("model", "reads", "a", "stream", "of", "tokens", "learns", "what", "follows", "every", "word", "before", "it")

KINDS = get_args(TokenizerKind)

VOCAB_SIZE = 1000
EOS = 2


def random_documents(num_documents: int, *, longest: int = 60, seed: int = 0) -> list[np.ndarray]:
    """Token documents of 1 to `longest` tokens, the last one EOS."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, num_documents)
    return [np.append(rng.integers(3, VOCAB_SIZE, length), EOS) for length in lengths]


def write_pair(prefix: Path, documents: Sequence[np.ndarray], vocab_size: int = VOCAB_SIZE) -> Path:
    """A bare Megatron pair."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
        for document in documents:
            writer.add(document, np.array([document.size]))
    return prefix


def write_tokens_folder(
    folder: Path,
    documents: Sequence[np.ndarray],
    *,
    vocab_size: int = VOCAB_SIZE,
    tokenizer: str = "a tokenizer",
    weights: Sequence[np.ndarray] | None = None,
) -> Path:
    """A folder as `megalite data tokenize` leaves it, without a tokenizer behind it; of conversations, with the loss
    weights of each document."""

    def build(partial: Path) -> dict[str, Any]:
        write_pair(partial / TOKENS_NAME, documents, vocab_size)
        if weights is not None:
            np.concatenate(weights).astype(np.float16).tofile(partial / WEIGHTS_FILE)
        num_tokens = sum(document.size for document in documents)
        return {"documents": len(documents), "tokens": num_tokens, "text_bytes": 4 * num_tokens, "rejected": {}}

    settings = {"tokenizer": {"fingerprint": tokenizer, "vocab_size": vocab_size}, "tokenizer_input": 0}
    run_station("tokenize", folder, inputs=[(folder.parent / "tokenizer", tokenizer)], settings=settings, build=build)
    return folder


def write_packed_folder(
    folder: Path,
    documents: Sequence[np.ndarray],
    *,
    seq_len: int,
    method: str = "best_fit",
    weights: Sequence[np.ndarray] | None = None,
) -> Path:
    """A packed folder, its tokens beside it."""
    tokens = write_tokens_folder(folder.with_name(folder.name + "-tokens"), documents, weights=weights)
    pack(tokens, folder, PackConfig(seq_len=seq_len, method=method))
    return folder


def run_demo_station(
    out: Path, text: str = "hello", *, station: str = "demo", settings: dict | None = None, hash_: str = "1"
) -> StationResult:
    """A station that writes a text into a file."""
    build = demo_build(text)
    return run_station(station, out, inputs=[(out.parent / "input", hash_)], settings=settings or {}, build=build)


def demo_build(text: str) -> Callable[[Path], dict[str, Any]]:
    """The work of that station."""

    def build(folder: Path) -> dict[str, Any]:
        (folder / "result.txt").write_text(text)
        return {"characters": len(text)}

    return build


def write_json_lines(path: Path, texts: Iterable[str]) -> Path:
    """One {"text": ...} a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def corpus_of(*paths: Path, **settings: Any) -> Corpus:
    """The documents of some files or folders."""
    return Corpus([DocumentSource(path=path, **settings) for path in paths])


def prose(num_documents: int, *, seed: int = 0) -> list[str]:
    """Readable filler: distinct documents of a few lines from a small vocabulary of words."""
    rng = np.random.default_rng(seed)
    words = np.array(WORDS)
    return [
        "\n".join(
            f"{number}: " + " ".join(rng.choice(words, rng.integers(4, 12)).tolist()) for _ in range(rng.integers(3, 9))
        )
        for number in range(num_documents)
    ]


def all_bytes(folder: Path) -> dict[str, bytes]:
    """Contents of every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
