"""What the cases of the data benchmark read: a corpus with planted duplicates, tokenizers, tokens, packed tokens.

corpus.jsonl, corpus_dup.jsonl, truth.jsonl    by `corpus.py`
documents/                                     corpus_dup.jsonl in shards, as a station leaves it
tokenizers/KIND/
tokens/, packed-SEQ_LEN/                       the corpus's tokens, laid end to end several times
tiny/                                          the same of a few documents, to warm up on
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import ShardWriter, make_documents, shard_name
from megalite.corpus.recipe import DocumentSource
from megalite.corpus.stations.tokenize import tokenize
from megalite.corpus.stations.train_tokenizer import train_tokenizer
from megalite.data.indexed import IndexedWriter
from megalite.data.pack import pack
from megalite.data.settings import PackConfig
from megalite.data.sources import TOKENS_NAME, open_tokens
from megalite.stations.manifest import find_manifest
from megalite.stations.station import run_station
from megalite.texts import Texts
from megalite.tokenizer.settings import TokenizerConfig

HERE = Path(__file__).parent

TIMEOUT_SECONDS = 900.0

SHARD_BYTES = 4e6
"""As a station cuts a corpus of this size."""

TINY_BYTES = 4e5
TINY_SHARDS = 8

TRAIN_MB = 15.0
"""Text that the tokenizers are trained on."""

NUM_TOKENS = 120_000_000
"""For packing and loading. A corpus with fewer tokens is laid end to end until there are as many."""

SEQ_LENS = (2048, 8192)

KINDS = {
    "byte-bpe": TokenizerConfig(kind="byte-bpe", train_mb=TRAIN_MB),
    "byte-bpe-gpt2": TokenizerConfig(kind="byte-bpe", train_mb=TRAIN_MB, split_digits=False),
    "sentencepiece-bpe": TokenizerConfig(kind="sentencepiece-bpe", train_mb=TRAIN_MB),
    "sentencepiece-unigram": TokenizerConfig(kind="sentencepiece-unigram", train_mb=TRAIN_MB),
}
"""The first splits digits, as `train-tokenizer` does by default; the second is GPT-2's, which gigatoken knows."""


@dataclass(frozen=True)
class Inputs:
    """What a case reads: a folder made by `write_documents`, and what was made of it."""

    folder: Path
    num_shards: int | None = None
    """Read only so many shards: for tools that would take minutes."""

    @property
    def documents(self) -> Path:
        """Folder of the documents, as a station leaves it."""
        return self.folder / "documents"

    @property
    def shards(self) -> list[Path]:
        """Its Parquet files."""
        return sorted(self.documents.glob("part-*.parquet"))[: self.num_shards]

    @property
    def megabytes(self) -> float:
        """Million bytes of text in them."""
        return sum(find_manifest(self.documents).counts["shard_bytes"][: self.num_shards]) / 1e6

    @property
    def tokenizers(self) -> Path:
        """Folder of the tokenizers."""
        return self.folder / "tokenizers"

    def tokenizer(self, kind: str) -> Path:
        """Folder of the tokenizer of a kind; one and the same for tiny/, so that it is loaded in the warm-up."""
        return (self.tokenizers / kind).resolve()

    @property
    def tokens(self) -> Path:
        """Folder of token files."""
        return self.folder / "tokens"

    def packed(self, seq_len: int) -> Path:
        """Folder of the packed tokens."""
        return self.folder / f"packed-{seq_len}"

    def column(self, name: str) -> list[str]:
        """A column of all documents, in order."""
        return [value for path in self.shards for value in pq.read_table(path, columns=[name])[name].to_pylist()]

    def texts(self) -> Texts:
        """The texts of all documents, in memory."""
        tables = [pq.read_table(path, columns=["text"]) for path in self.shards]
        return Texts.from_arrow(pa.concat_tables(tables)["text"])

    def truth(self) -> list[dict[str, Any]]:
        """What was planted."""
        with open(self.folder / "truth.jsonl", encoding="utf-8") as file:
            return list(map(json.loads, file))


def prepare(folder: Path, groups: set[str], *, mb: float, seed: int, vocab_size: int) -> None:
    """Make what some cases read; what is there already stays.

    Args:
        folder: for a corpus of this size and seed.
        groups: of the cases: tokenize-KIND, pack-... and load-... need more than the documents.
        mb: size of the corpus.
        seed: decides it.
        vocab_size: of the tokenizers.
    """
    if not (folder / "stats.json").is_file():  # the last file that it writes
        command = [sys.executable, str(HERE / "corpus.py"), "--out", str(folder), "--mb", str(mb), "--seed", str(seed)]
        subprocess.run([*command, "--dups"], check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_SECONDS)
    write_documents(_rows(folder / "corpus_dup.jsonl"), folder, SHARD_BYTES)
    write_documents(_first(_rows(folder / "corpus_dup.jsonl"), TINY_BYTES), folder / "tiny", TINY_BYTES / TINY_SHARDS)
    inputs, tiny = Inputs(folder), Inputs(folder / "tiny")
    inputs.tokenizers.mkdir(exist_ok=True)
    if not tiny.tokenizers.exists():
        tiny.tokenizers.symlink_to(inputs.tokenizers.absolute())
    corpus = Corpus([DocumentSource(path=inputs.documents)])
    needs_tokens = any(group.startswith(("pack-", "load-")) for group in groups)
    for kind, config in KINDS.items():
        if f"tokenize-{kind}" in groups or (needs_tokens and kind == "byte-bpe"):
            train_tokenizer(corpus, inputs.tokenizer(kind), config.model_copy(update={"vocab_size": vocab_size}))
    if needs_tokens:
        for each, num_tokens in ((inputs, NUM_TOKENS), (tiny, 0)):
            _make_tokens(each, num_tokens)
            for seq_len in SEQ_LENS:
                pack(each.tokens, each.packed(seq_len), PackConfig(seq_len=seq_len))


def _make_tokens(inputs: Inputs, num_tokens: int) -> None:
    """Tokenize the corpus, and lay it end to end until there are so many tokens."""
    kind = "byte-bpe"
    once = inputs.folder / "tokens-once"
    result = tokenize(Corpus([DocumentSource(path=inputs.documents)]), inputs.tokenizer(kind), once)

    def build(partial: Path) -> dict[str, int]:
        tokens = open_tokens(once).tokens
        stream, lengths = (
            tokens.read(0, tokens.num_tokens),
            np.diff(tokens.document_starts(0, tokens.num_documents + 1)),
        )
        times = -(-max(1, num_tokens) // tokens.num_tokens)
        with IndexedWriter(partial / TOKENS_NAME, tokens.dtype) as writer:
            for _ in range(times):
                writer.add(stream, lengths)
        text_bytes = times * result.manifest.counts["text_bytes"]
        return {"documents": writer.num_documents, "tokens": writer.num_tokens, "text_bytes": text_bytes}

    settings = {**result.manifest.settings, "num_tokens": num_tokens}
    sources = [(once, result.manifest.fingerprint), (inputs.tokenizer(kind), settings["tokenizer"]["fingerprint"])]
    run_station("tokenize", inputs.tokens, inputs=sources, settings=settings, build=build)


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    with open(path, encoding="utf-8") as file:
        for row in map(json.loads, file):
            yield row["id"], row["text"]


def _first(rows: Iterator[tuple[str, str]], num_bytes: float) -> Iterator[tuple[str, str]]:
    """Documents up to about so many bytes, the very long ones left out."""
    for id, text in rows:
        if len(text) > num_bytes / TINY_SHARDS / 2:
            continue
        num_bytes -= len(text.encode())
        yield id, text
        if num_bytes <= 0:
            return


def write_documents(rows: Iterable[tuple[str, str]], folder: Path, shard_bytes: float) -> None:
    """Lay documents out as a station leaves them; where they lie already, nothing is done.

    Args:
        rows: id and text of each.
        folder: gets documents/.
        shard_bytes: text in a Parquet file.
    """

    def build(partial: Path) -> dict[str, Any]:
        num_documents, sizes = 0, []
        for number, shard in enumerate(_cut(rows, shard_bytes)):
            texts = Texts.of(text for _, text in shard)
            with ShardWriter(partial / shard_name(number)) as writer:
                writer.write(make_documents([id for id, _ in shard], "corpus", texts.to_arrow()))
            sizes.append(texts.num_bytes)
            num_documents += len(shard)
        counts = {"documents_in": num_documents, "documents": num_documents}
        return {**counts, "text_bytes": sum(sizes), "shard_bytes": sizes}

    run_station("clean", folder / "documents", inputs=[], settings={"shard_bytes": shard_bytes}, build=build)


def _cut(rows: Iterable[tuple[str, str]], shard_bytes: float) -> Iterator[list[tuple[str, str]]]:
    shard, held = [], 0
    for row in rows:
        shard.append(row)
        held += len(row[1].encode())
        if held >= shard_bytes:
            yield shard
            shard, held = [], 0
    if shard:
        yield shard
