"""The verbs that make tokens of documents, and sequences of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.data.options import (
    Documents,
    Include,
    Out,
    Set,
    TextField,
    ValidFraction,
    Workers,
    make_settings,
    open_corpus,
    print_result,
    report_console,
    working,
)
from megalite.cli.paths import named_file, not_an_input


def train_tokenizer(
    inputs: Documents,
    out: Out,
    kind: Annotated[str | None, typer.Option(help="sentencepiece-bpe, sentencepiece-unigram or byte-bpe.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Number of tokens, special ones included.")] = None,
    train_mb: Annotated[float | None, typer.Option(help="Text to learn from, in million bytes.")] = None,
    split_digits: Annotated[bool | None, typer.Option(help="Every digit is a token.", show_default=False)] = None,
    valid_fraction: ValidFraction = 0.0,
    text_field: TextField = "text",
    include: Include = None,
    settings: Set = None,
) -> None:
    """Train a SentencePiece or byte-level BPE tokenizer."""
    from megalite.corpus.split import ALL, CorpusSplit
    from megalite.corpus.stations import train_tokenizer as station
    from megalite.progress import progress_on
    from megalite.tokenizer.settings import TokenizerConfig

    given = {"kind": kind, "vocab_size": vocab_size, "train_mb": train_mb, "split_digits": split_digits}
    config = make_settings(TokenizerConfig, settings, **given)
    split = CorpusSplit("train", valid_fraction) if valid_fraction else ALL
    corpus = open_corpus(inputs, text_field, include)
    with progress_on() as progress:
        result = station.train_tokenizer(corpus, out, config, split=split, progress=progress)
    print_result(out, result)


def compare_tokenizers(
    inputs: Documents,
    tokenizer: Annotated[list[Path], typer.Option(help="Folder of a tokenizer; may be repeated.")],
    text_field: TextField = "text",
    include: Include = None,
    mb: Annotated[float, typer.Option(min=0.01, help="Text of each source to look at, in million bytes.")] = 5.0,
) -> None:
    """Compare tokenizers on documents: bytes a token, unknowns, round trip, speed, by source."""
    from megalite.tokenizer.report import bar_plot, compare_tokenizers, report_table, texts_by_source
    from megalite.tokenizer.tokenizer import Tokenizer

    documents = open_corpus(inputs, text_field, include).documents()
    sources = texts_by_source(((document.source, document.text) for document in documents), mb)
    scores = compare_tokenizers({str(folder): Tokenizer.load(folder) for folder in tokenizer}, sources)
    report_console().print(report_table(scores))
    typer.echo(bar_plot(scores))


def tokenize(
    inputs: Documents,
    tokenizer: Annotated[Path, typer.Option(help="Folder of a tokenizer, ours or a Hugging Face one.")],
    out: Out,
    valid_fraction: ValidFraction = 0.0,
    part: Annotated[str, typer.Option(help="all, train or valid: the side of the hold-out to write.")] = "all",
    describe: Annotated[bool, typer.Option("--describe", help="Keep ids, sources and metadata beside.")] = False,
    settings: Set = None,
    text_field: TextField = "text",
    include: Include = None,
    workers: Workers = None,
) -> None:
    """Encode documents into a .bin/.idx pair that Megatron-LM reads too; `-s chat.max_tokens=2048` conversations, with
    loss weights beside it, and `-s fim.rate=0.5` texts with holes."""
    from megalite.corpus.split import parse_split
    from megalite.corpus.stations import tokenize as station
    from megalite.corpus.stations.forms import FormsConfig

    split, forms = parse_split(part, valid_fraction), make_settings(FormsConfig, settings).forms()
    corpus = open_corpus(inputs, text_field, include)
    with working(workers) as (progress, runner):
        result = station.tokenize(
            corpus, tokenizer, out, split=split, describe=describe, forms=forms, runner=runner, progress=progress
        )
    print_result(out, result)


def pack(
    tokens: Annotated[Path, typer.Argument(help="Folder made by `tokenize`, or the prefix of a Megatron pair.")],
    out: Out,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    method: Annotated[str | None, typer.Option(help="best_fit or concat.")] = None,
    settings: Set = None,
) -> None:
    """Fit documents into sequences."""
    from megalite.data import pack as station
    from megalite.data.settings import PackConfig
    from megalite.progress import progress_on

    config = make_settings(PackConfig, settings, seq_len=seq_len, method=method)
    with progress_on() as progress:
        result = station.pack(tokens, out, config, progress=progress)
    print_result(out, result)


def rank(
    source: Annotated[Path, typer.Argument(help="A folder to train on, or the prefix of a Megatron pair.")],
    scores: Annotated[
        str, typer.Option(help="A field of the documents' metadata, or a .npy file with a number for each document.")
    ],
    seq_len: Annotated[int, typer.Option(min=1, help="batch.seq_len of the training.")],
    out: Annotated[Path, typer.Option("--out", callback=named_file, help="File to make, for data.mix.ranks.")],
) -> None:
    """Order a source's samples by the scores of their documents, lowest first."""
    from megalite.config.schema import SourceConfig
    from megalite.corpus.stations.tokenize import read_scores
    from megalite.data.ranking import load_scores, write_ranks
    from megalite.data.sources import open_source, tokens_folder

    is_file = scores.endswith(".npy")
    read = [*_files_of(source), *_files_of(tokens_folder(source)), *([Path(scores)] if is_file else [])]
    not_an_input(out, *read)
    opened = open_source(SourceConfig(path=source), name=source.name, seq_len=seq_len)
    if is_file:
        numbers = load_scores(Path(scores), opened.tokens.num_documents)
    else:
        numbers = read_scores(tokens_folder(source), scores)
    write_ranks(opened.layout, numbers, out)
    typer.echo(f"{out}: {opened.layout.num_samples} samples in rising order")


def _files_of(source: Path) -> list[Path]:
    """What a folder of tokens, or a Megatron pair, consists of."""
    from megalite.data.indexed import bin_path, idx_path
    from megalite.data.sources import pair_prefix
    from megalite.stations.manifest import FILE_NAME, find_manifest

    found = find_manifest(source) if source.is_dir() else None
    if found is None:
        return [bin_path(pair_prefix(source)), idx_path(pair_prefix(source))]
    return [source / name for name in (FILE_NAME, *(each.path for each in found.outputs))]
