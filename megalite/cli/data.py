"""`megalite data`: from raw text to packed training data, one verb a station."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megalite.data.corpus import Corpus
    from megalite.data.manifest import StationResult
    from megalite.data.prepare import Finished

app = typer.Typer(help="Clean, deduplicate, tokenize, pack and look at training data.", no_args_is_help=True)

Documents = Annotated[
    list[Path],
    typer.Argument(help="Files or folders: jsonl, parquet, arrow, plain text (.gz, .zst), or a station's folder."),
]
Out = Annotated[Path, typer.Option("--out", help="Folder to make.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes. [default: all cores]", show_default=False)]
TextField = Annotated[str, typer.Option(help="Field or column that holds the text.")]
Include = Annotated[list[str] | None, typer.Option(help="File-name pattern to read from folders; may be repeated.")]
ValidFraction = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of documents held out for validation.")]


@app.command()
def clean(
    inputs: Documents,
    out: Out,
    text_field: TextField = "text",
    include: Include = None,
    min_chars: Annotated[int | None, typer.Option(help="Shortest document.")] = None,
    max_chars: Annotated[int | None, typer.Option(help="Longest document.")] = None,
    min_alphanumeric_share: Annotated[float | None, typer.Option(help="Least share of letters and digits.")] = None,
    max_repeated_line_share: Annotated[float | None, typer.Option(help="Largest share of repeated lines.")] = None,
    on_error: Annotated[str | None, typer.Option(help="reject or fail: what to do with unreadable records.")] = None,
    workers: Workers = None,
) -> None:
    """Repair documents, and put aside those that break a rule."""
    from megalite.data import clean as station
    from megalite.data.progress import progress_on
    from megalite.data.recipe import CleanConfig
    from megalite.data.workers import default_workers

    settings = _make(
        CleanConfig,
        min_chars=min_chars,
        max_chars=max_chars,
        min_alphanumeric_share=min_alphanumeric_share,
        max_repeated_line_share=max_repeated_line_share,
        on_error=on_error,
    )
    corpus = _open(inputs, text_field, include)
    with progress_on() as progress:
        result = station.clean(corpus, out, settings, num_workers=workers or default_workers(), progress=progress)
    _print_result(out, result)


@app.command()
def dedup(
    inputs: Documents,
    out: Out,
    text_field: TextField = "text",
    include: Include = None,
    ignore_case: Annotated[bool, typer.Option(help="Upper and lower case are equal.")] = False,
) -> None:
    """Keep the first of all documents with the same text."""
    from megalite.data import dedup as station
    from megalite.data.progress import progress_on
    from megalite.data.recipe import DedupConfig

    corpus = _open(inputs, text_field, include)
    with progress_on() as progress:
        result = station.dedup(corpus, out, DedupConfig(ignore_case=ignore_case), progress=progress)
    _print_result(out, result)


@app.command("train-tokenizer")
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
) -> None:
    """Train a SentencePiece or byte-level BPE tokenizer."""
    from megalite.data import train_tokenizer as station
    from megalite.data.progress import progress_on
    from megalite.data.recipe import TokenizerConfig
    from megalite.data.split import ALL, Split

    settings = _make(TokenizerConfig, kind=kind, vocab_size=vocab_size, train_mb=train_mb, split_digits=split_digits)
    split = Split("train", valid_fraction) if valid_fraction else ALL
    corpus = _open(inputs, text_field, include)
    with progress_on() as progress:
        result = station.train_tokenizer(corpus, out, settings, split=split, progress=progress)
    _print_result(out, result)


@app.command()
def tokenize(
    inputs: Documents,
    tokenizer: Annotated[Path, typer.Option(help="Folder of a tokenizer, ours or a Hugging Face one.")],
    out: Out,
    valid_fraction: ValidFraction = 0.0,
    part: Annotated[str, typer.Option(help="all, train or valid: the side of the hold-out to write.")] = "all",
    text_field: TextField = "text",
    include: Include = None,
    workers: Workers = None,
) -> None:
    """Encode documents into a .bin/.idx pair that Megatron-LM reads too."""
    from megalite.data import tokenize as station
    from megalite.data.progress import progress_on
    from megalite.data.split import parse_split
    from megalite.data.workers import default_workers

    split = parse_split(part, valid_fraction)
    corpus = _open(inputs, text_field, include)
    num_workers = workers or default_workers()
    with progress_on() as progress:
        result = station.tokenize(corpus, tokenizer, out, split=split, num_workers=num_workers, progress=progress)
    _print_result(out, result)


@app.command()
def pack(
    tokens: Annotated[Path, typer.Argument(help="Folder made by `tokenize`, or the prefix of a Megatron pair.")],
    out: Out,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    method: Annotated[str | None, typer.Option(help="best_fit or concat.")] = None,
) -> None:
    """Fit documents into sequences."""
    from megalite.data import pack as station
    from megalite.data.progress import progress_on
    from megalite.data.recipe import PackConfig

    settings = _make(PackConfig, seq_len=seq_len, method=method)
    with progress_on() as progress:
        result = station.pack(tokens, out, settings, progress=progress)
    _print_result(out, result)


@app.command()
def prepare(
    recipe: Annotated[Path, typer.Argument(help="A YAML file as in configs/data/.")],
    workers: Workers = None,
) -> None:
    """Run all stations of a recipe; finished ones are kept."""
    from megalite.data import prepare as stations
    from megalite.data.progress import progress_on
    from megalite.data.workers import default_workers

    settings = stations.load_recipe(recipe)
    with progress_on() as progress:
        done = stations.prepare(settings, num_workers=workers or default_workers(), progress=progress)
    _print_table(settings.out, done)


@app.command()
def show(
    config: Annotated[Path, typer.Argument(help="A training config.")],
    steps: Annotated[str, typer.Option(help="A:B for steps A to B - 1, counted from 1.")] = "1:4",
    out: Annotated[Path | None, typer.Option(help="Write arrays to this .npz file instead of text.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
) -> None:
    """Show the batches that training will see: some as text, or all of them as arrays in a file."""
    from megalite.config.load import load_config
    from megalite.data import show as showing

    wanted = showing.parse_steps(steps)
    settings = load_config(config, overrides or [])
    samples = showing.open_training_data(settings)
    batch_size = settings.batch.global_batch_size
    if out is None:
        for line in showing.describe(samples, wanted, batch_size):
            typer.echo(line)
        return
    showing.save_arrays(out, showing.collect_arrays(samples, wanted, batch_size))
    shape = f"[{len(wanted)}, {batch_size}, {samples.seq_len}]"
    typer.echo(f"{out}: steps {wanted.start} to {wanted.stop - 1}: {', '.join(showing.ARRAYS)} of shape {shape}")


def _open(inputs: list[Path], text_field: str, include: list[str] | None) -> Corpus:
    from megalite.data.corpus import Corpus
    from megalite.data.recipe import DocumentSource

    return Corpus([DocumentSource(path=path, text_field=text_field, include=tuple(include or ())) for path in inputs])


def _make(section: type, **given: object) -> object:
    """Settings from the options that were given; the others keep their defaults."""
    from pydantic import ValidationError

    from megalite.errors import ConfigError

    try:
        return section(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ConfigError(
            f"--{str(details['loc'][0]).replace('_', '-')}: found {details['input']!r}: {details['msg']}"
            for details in error.errors()
        ) from error


def _print_result(out: Path, result: StationResult) -> None:
    state = "already there" if result.reused else "done"
    counts = ", ".join(f"{name} {value}" for name, value in result.manifest.counts.items() if value != {})
    typer.echo(f"{out}: {state}: {counts}")


def _print_table(folder: Path, done: list[Finished]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("station", "documents", "text MB", "tokens", "sequences", "", title=f"{folder}", title_justify="left")
    for station in done:
        counts = station.result.manifest.counts
        documents, tokens, samples = (
            f"{counts[n]:,}" if n in counts else "" for n in ("documents", "tokens", "samples")
        )
        megabytes = f"{counts['text_bytes'] / 1e6:,.1f}" if "text_bytes" in counts else ""
        state = "kept" if station.result.reused else "made"
        table.add_row(station.name, documents, megabytes, tokens, samples, state)
    Console().print(table)
