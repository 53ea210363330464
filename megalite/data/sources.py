"""Opening one source of training data: a packed folder, a tokenized folder or a bare Megatron pair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from megalite.config.schema import SourceConfig
from megalite.data.indexed import IndexedTokens, bin_path, idx_path, weights_path
from megalite.data.layout import COLUMNS, ConcatLayout, Layout, PackedLayout
from megalite.errors import DataError
from megalite.stations.manifest import StationManifest, check_input, check_sampled_bytes, find_manifest, refuse_damage

TOKENS_NAME = "tokens"
"""Name of the pair inside a tokenized folder."""

TOKEN_FILES = (f"{TOKENS_NAME}.bin", f"{TOKENS_NAME}.idx")

WEIGHTS_FILE = weights_path(Path(TOKENS_NAME)).name
"""Beside them where labels have weights."""

SCAN_TOKENS = 1 << 20
"""Tokens looked at, spread over the stream, to find ids beyond the vocabulary before training does."""

SCAN_SPANS = 64

END_BYTES = 1 << 20
"""How much of each end of a bare pair's index goes into its fingerprint."""


@dataclass(frozen=True)
class TokenizerRecord:
    """What a tokenized folder says about the tokenizer it was made with."""

    folder: Path
    fingerprint: str
    vocab_size: int


@dataclass(frozen=True)
class TokenStream:
    """Tokenized documents, open for reading."""

    path: Path
    tokens: IndexedTokens
    tokenizer: TokenizerRecord | None
    """None for a bare Megatron pair, which does not say."""
    fingerprint: str
    is_paired: bool = False
    """Its documents are chosen and rejected answers in turn."""


@dataclass(frozen=True)
class TokenSource:
    """One source of samples."""

    name: str
    tokens: IndexedTokens
    layout: Layout
    tokenizer: TokenizerRecord | None
    fingerprint: str
    """Changes with the tokens, with their weights and with their cut into samples."""
    loss_weight: float = 1.0
    """Times the weight of each label."""
    is_paired: bool = False
    """Its documents are chosen and rejected answers in turn, both of a pair in one sample."""

    @property
    def is_weighted(self) -> bool:
        """Whether its labels do not all weigh 1."""
        return self.tokens.is_weighted or self.loss_weight != 1.0

    def check_labels(self, document_masks: bool) -> None:
        """Refuse a source from which nothing can be learnt, since no token in it has a next one.

        Args:
            document_masks: what comes next in another document does not count.

        Raises:
            DataError: there is no label.
        """
        if self.tokens.has_label() or (not document_masks and self.tokens.num_tokens > self.layout.num_samples):
            return
        if self.tokens.is_weighted:
            raise DataError(
                f"{self.tokens.prefix}: no label: every loss weight is 0; tokenize conversations with answers, or "
                "leave this source out"
            )
        raise DataError(
            f"{self.tokens.prefix}: no label: none of its {self.tokens.num_documents} documents has two tokens, so "
            "there is no next token to predict; tokenize documents with text, or leave this source out"
        )


def check_pairs(sources: Iterable[TokenSource], *, are_wanted: bool) -> None:
    """Refuse tokens where pairs of answers are wanted, and pairs where they are not.

    Raises:
        DataError: a source is of the other kind, or weighs its labels.
    """
    for source in sources:
        where = source.tokens.prefix
        if source.is_paired and not are_wanted:
            raise DataError(
                f"{where}: pairs of answers, of which the second would be learnt as well; set train.preference, or "
                "name other data"
            )
        if are_wanted and not source.is_paired:
            raise DataError(
                f"{where}: no pairs of answers, which train.preference learns from; prepare records with chosen and "
                "rejected, or set train.preference=null"
            )
        if are_wanted and source.loss_weight != 1.0:
            raise DataError(f"{where}: loss_weight={source.loss_weight:g} weighs tokens, not pairs; use 1")


def open_source(config: SourceConfig, *, name: str, seq_len: int) -> TokenSource:
    """Open a source and check that it is whole.

    Raises:
        DataError: it is missing, empty, damaged or cut for another seq_len.
    """
    path = config.path
    packed = find_manifest(path) if path.is_dir() else None
    if packed is not None and packed.station == "pack":
        return _weighing(_open_packed(path, name, seq_len), config.loss_weight)
    stream = open_tokens(path)
    if stream.tokens.is_weighted:
        raise DataError(
            f"{path}: conversations that are not packed: cut every {seq_len} tokens, answers would break off; run "
            f"`megalite data pack --seq-len {seq_len}`, which says how many it cuts"
        )
    if stream.tokens.num_tokens == 0:
        raise DataError(f"{path}: empty: it holds {stream.tokens.num_documents} documents and no token")
    fingerprint = _combine(stream.fingerprint, f"concat/{seq_len}")
    layout = ConcatLayout(stream.tokens, seq_len)
    return _weighing(TokenSource(name, stream.tokens, layout, stream.tokenizer, fingerprint), config.loss_weight)


def _weighing(source: TokenSource, loss_weight: float) -> TokenSource:
    """The source with its labels weighed as the config says."""
    if loss_weight == 1.0:
        return source
    return replace(source, loss_weight=loss_weight, fingerprint=_combine(source.fingerprint, f"x {loss_weight!r}"))


def open_tokens(path: Path, *, contents: bool = False) -> TokenStream:
    """Open a tokenized folder or a Megatron pair.

    Args:
        path: the folder, or the prefix of the pair, or one of its files.
        contents: compare the folder's files with the hashes in its manifest, not only their sizes.

    Raises:
        DataError: it is missing or damaged.
    """
    if path.is_dir() and find_manifest(path) is not None:
        manifest = check_input(path, "tokenize", contents=contents)
        if not contents:
            check_sampled_bytes(manifest, files_of_tokens(manifest))
        tokens = IndexedTokens(path / TOKENS_NAME, weighted=has_weights(manifest))
        _compare_counts(manifest, tokens=tokens.num_tokens, documents=tokens.num_documents)
        return TokenStream(path, tokens, tokenizer_of(manifest), manifest.fingerprint, are_pairs(manifest))
    prefix = pair_prefix(path)
    if is_pair(path):
        return TokenStream(prefix, IndexedTokens(prefix), None, _fingerprint_pair(prefix))
    raise DataError(what_is_wrong_with(path))


def are_pairs(manifest: StationManifest) -> bool:
    """Whether the documents of a tokenized folder, or of a packed one, are chosen and rejected answers in turn."""
    return bool(manifest.counts.get("pairs"))


def has_weights(manifest: StationManifest) -> bool:
    """Whether the labels of a tokenized folder have weights."""
    return any(output.path == WEIGHTS_FILE for output in manifest.outputs)


def files_of_tokens(manifest: StationManifest) -> tuple[str, ...]:
    """The files of a tokenized folder that training reads."""
    return (*TOKEN_FILES, WEIGHTS_FILE) if has_weights(manifest) else TOKEN_FILES


def tokens_folder(path: Path) -> Path:
    """The tokenized folder behind a source: itself, or what was packed."""
    packed = find_manifest(path) if path.is_dir() else None
    return packed.input_path() if packed is not None and packed.station == "pack" else path


def is_pair(path: Path) -> bool:
    """Whether a path names a Megatron pair, or what is left of one."""
    prefix = pair_prefix(path)
    return idx_path(prefix).is_file() or bin_path(prefix).is_file()


def pair_prefix(path: Path) -> Path:
    """The prefix of a Megatron pair that is named by it, or by one of its files."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def largest_token(tokens: IndexedTokens) -> int:
    """The largest id among SCAN_TOKENS tokens spread evenly over the stream (all of them when there are fewer).

    Raises:
        DataError: one of them is below 0.
    """
    span = min(SCAN_TOKENS // SCAN_SPANS, tokens.num_tokens)
    starts = np.linspace(0, tokens.num_tokens - span, SCAN_SPANS).astype(np.int64).tolist()
    if tokens.num_tokens <= SCAN_TOKENS:
        starts, span = [0], tokens.num_tokens
    found = [tokens.read(start, start + span) for start in starts]
    if (smallest := min(int(part.min()) for part in found)) < 0:
        raise DataError(f"{bin_path(tokens.prefix)}: damaged: token {smallest} found; copy or make the pair again")
    return max(int(part.max()) for part in found)


def _open_packed(path: Path, name: str, seq_len: int) -> TokenSource:
    packed = check_input(path, "pack", contents=False)
    check_sampled_bytes(packed, tuple(COLUMNS))
    if packed.settings["seq_len"] != seq_len:
        raise DataError(
            f"{path}: packed with seq_len={packed.settings['seq_len']}, batch.seq_len={seq_len} is asked for; set "
            f"batch.seq_len to {packed.settings['seq_len']} or run `megalite data pack --seq-len {seq_len}`"
        )
    stream = open_tokens(packed.input_path())
    if stream.fingerprint != packed.inputs[0].fingerprint:
        raise DataError(f"{path}: {stream.path} has changed since it was packed; run `megalite data pack` again")
    layout: Layout = ConcatLayout(stream.tokens, seq_len)
    if packed.settings["method"] == "best_fit":
        layout = PackedLayout(path)
        if problem := layout.damage(stream.tokens, packed, everything=False):
            raise DataError(f"{path}: damaged: {problem}; run `megalite data pack` again")
    _compare_counts(packed, samples=layout.num_samples, tokens=stream.tokens.num_tokens)
    fingerprint = _combine(stream.fingerprint, packed.fingerprint)
    return TokenSource(
        name, stream.tokens, layout, stream.tokenizer, fingerprint, is_paired=stream.is_paired and are_pairs(packed)
    )


def _compare_counts(manifest: StationManifest, **found: int) -> None:
    """Refuse files that hold something else than their manifest counts."""
    expected = {name: manifest.counts[name] for name in found}
    if found != expected:
        refuse_damage(manifest, [f"{found[name]} {name} found, {expected[name]} expected" for name in found])


def tokenizer_of(manifest: StationManifest) -> TokenizerRecord:
    """What the manifest of a tokenized folder says about its tokenizer."""
    folder = manifest.input_path(manifest.settings["tokenizer_input"])
    return TokenizerRecord(folder, **manifest.settings["tokenizer"])


def _combine(*fingerprints: str) -> str:
    return xxhash.xxh3_128_hexdigest("/".join(fingerprints).encode())


def _fingerprint_pair(prefix: Path) -> str:
    """A hash over both sizes and both ends of the index: documents that differ have other lengths or offsets."""
    index = idx_path(prefix)
    size = index.stat().st_size
    digest = xxhash.xxh3_128(f"{size}/{bin_path(prefix).stat().st_size}".encode())
    with open(index, "rb") as file:
        digest.update(file.read(END_BYTES))
        file.seek(max(0, size - END_BYTES))
        digest.update(file.read(END_BYTES))
    return digest.hexdigest()


def what_is_wrong_with(path: Path) -> str:
    """Why a path leads to no data to train on."""
    if Path(f"{path}.partial").is_dir():
        return f"{path}: unfinished: its station was interrupted; run it again"
    if not path.exists():
        return f"{path}: no such folder, and no pair {path.name}.bin and {path.name}.idx; run `megalite data prepare`"
    return (
        f"{path}: not data to train on: neither a folder made by `megalite data pack` or `megalite data tokenize` nor "
        "the prefix of a .bin/.idx pair"
    )
