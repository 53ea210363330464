"""The verbs that read documents and leave documents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.data.options import (
    Documents,
    Include,
    KeepFields,
    Out,
    Set,
    StationFolders,
    TextField,
    Workers,
    make_settings,
    open_corpus,
    run_station,
)


def clean(
    inputs: Documents,
    out: Out,
    text_field: TextField = "text",
    include: Include = None,
    keep_fields: KeepFields = None,
    min_chars: Annotated[int | None, typer.Option(help="Shortest document.")] = None,
    max_chars: Annotated[int | None, typer.Option(help="Longest document.")] = None,
    on_error: Annotated[str | None, typer.Option(help="reject or fail: what to do with unreadable records.")] = None,
    settings: Set = None,
    workers: Workers = None,
) -> None:
    """Repair and redact documents, and put aside those that break a rule."""
    from megalite.corpus.recipe import CleanConfig
    from megalite.corpus.stations import clean as station

    config = make_settings(CleanConfig, settings, min_chars=min_chars, max_chars=max_chars, on_error=on_error)
    corpus = open_corpus(inputs, text_field, include, keep_fields)
    run_station(station.clean, corpus, out, config, workers)


def dedup(
    inputs: Documents,
    out: Out,
    text_field: TextField = "text",
    include: Include = None,
    keep_fields: KeepFields = None,
    ignore_case: Annotated[bool, typer.Option(help="Upper and lower case are equal.")] = False,
    settings: Set = None,
    workers: Workers = None,
) -> None:
    """Keep the first of all documents with the same text."""
    from megalite.corpus.recipe import DedupConfig
    from megalite.corpus.stations import dedup as station

    config = make_settings(DedupConfig, settings, ignore_case=ignore_case or None)
    corpus = open_corpus(inputs, text_field, include, keep_fields)
    run_station(station.dedup, corpus, out, config, workers)


def url_dedup(inputs: StationFolders, out: Out, settings: Set = None, workers: Workers = None) -> None:
    """Keep the first of all documents from the same address."""
    from megalite.corpus.spans.settings import UrlDedupConfig
    from megalite.corpus.stations import spans as station

    config = make_settings(UrlDedupConfig, settings)
    run_station(station.url_dedup, open_corpus(inputs), out, config, workers)


def near_dedup(
    inputs: StationFolders,
    out: Out,
    threshold: Annotated[float | None, typer.Option(help="Jaccard similarity of word 5-grams. (default: 0.7)")] = None,
    older: Annotated[list[Path] | None, typer.Option(help="`index` folder of earlier data; may be repeated.")] = None,
    keep_index: Annotated[bool, typer.Option(help="Leave `index` for data to come.")] = False,
    curve: Annotated[bool, typer.Option(help="Print which pairs these settings find, and do nothing.")] = False,
    settings: Set = None,
    workers: Workers = None,
) -> None:
    """Keep one of each cluster of near-duplicates (MinHash, verified)."""
    from megalite.corpus.near.settings import NearDedupConfig
    from megalite.corpus.stations import near as station

    config = make_settings(NearDedupConfig, settings, threshold=threshold)
    if curve:
        typer.echo(config.draw())
        return
    options = {"older": older or (), "keep_index": keep_index}
    run_station(station.near_dedup, open_corpus(inputs), out, config, workers, **options)


def line_dedup(inputs: StationFolders, out: Out, settings: Set = None, workers: Workers = None) -> None:
    """Remove lines that stand in many documents."""
    from megalite.corpus.spans.settings import LineDedupConfig
    from megalite.corpus.stations import spans as station

    config = make_settings(LineDedupConfig, settings)
    run_station(station.line_dedup, open_corpus(inputs), out, config, workers)


def substring_dedup(
    inputs: StationFolders,
    out: Out,
    min_bytes: Annotated[int | None, typer.Option(help="Shortest passage that counts. (default: 100)")] = None,
    settings: Set = None,
    workers: Workers = None,
) -> None:
    """Remove passages that stood earlier in the corpus."""
    from megalite.corpus.spans.settings import SubstringConfig
    from megalite.corpus.stations import spans as station

    config = make_settings(SubstringConfig, settings, min_bytes=min_bytes)
    run_station(station.substring_dedup, open_corpus(inputs), out, config, workers)


def decontaminate(
    inputs: StationFolders,
    out: Out,
    against: Annotated[list[Path] | None, typer.Option(help="File of an evaluation set; may be repeated.")] = None,
    settings: Set = None,
    workers: Workers = None,
) -> None:
    """Remove documents that share runs of words with evaluation sets."""
    from megalite.corpus.spans.settings import DecontaminateConfig
    from megalite.corpus.stations import spans as station

    config = make_settings(DecontaminateConfig, settings, paths=_strings(against))
    run_station(station.decontaminate, open_corpus(inputs), out, config, workers)


def perplexity(
    inputs: StationFolders,
    out: Out,
    train_on: Annotated[list[Path] | None, typer.Option(help="Texts of the kind that is wanted.")] = None,
    keep_fraction: Annotated[float | None, typer.Option(help="Share of the documents to keep.")] = None,
    settings: Set = None,
    workers: Workers = None,
) -> None:
    """Keep the documents that an n-gram model, trained on a sample, finds least surprising."""
    from megalite.corpus.scoring.settings import PerplexityConfig
    from megalite.corpus.stations import select as station

    given = {"train_on": _strings(train_on), "keep_fraction": keep_fraction}
    config = make_settings(PerplexityConfig, settings, **given)
    run_station(station.perplexity, open_corpus(inputs), out, config, workers)


def classifier(
    inputs: StationFolders,
    out: Out,
    good: Annotated[list[Path] | None, typer.Option(help="Documents as they should be.")] = None,
    bad: Annotated[list[Path] | None, typer.Option(help="Documents as they should not be.")] = None,
    keep_fraction: Annotated[float | None, typer.Option(help="Share of the documents to keep.")] = None,
    min_score: Annotated[float | None, typer.Option(help="Least probability of being good.")] = None,
    settings: Set = None,
    workers: Workers = None,
) -> None:
    """Keep the documents that look more like a good sample than like a bad one."""
    from megalite.corpus.scoring.settings import ClassifierConfig
    from megalite.corpus.stations import select as station

    given = {"good": _strings(good), "bad": _strings(bad), "keep_fraction": keep_fraction, "min_score": min_score}
    config = make_settings(ClassifierConfig, settings, **given)
    run_station(station.classifier, open_corpus(inputs), out, config, workers)


def harmful(
    inputs: StationFolders,
    out: Out,
    like: Annotated[list[Path] | None, typer.Option("--harmful", help="Documents that must not stay.")] = None,
    harmless: Annotated[list[Path] | None, typer.Option(help="Documents that may stay.")] = None,
    max_score: Annotated[
        float | None, typer.Option(help="Largest probability of being harmful. (default: 0.5)")
    ] = None,
    settings: Set = None,
    workers: Workers = None,
) -> None:
    """Put documents aside that look more like a harmful sample than like a harmless one."""
    from megalite.corpus.scoring.settings import HarmfulConfig
    from megalite.corpus.stations import select as station

    given = {"harmful": _strings(like), "harmless": _strings(harmless), "max_score": max_score}
    config = make_settings(HarmfulConfig, settings, **given)
    run_station(station.harmful, open_corpus(inputs), out, config, workers)


def semantic_dedup(
    inputs: StationFolders,
    embeddings: Annotated[Path, typer.Option(help="Folder that `megalite embed` has made of these documents.")],
    out: Out,
    threshold: Annotated[
        float | None, typer.Option(help="Cosine similarity from which on two mean the same. (default: 0.95)")
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(help="Of k-means. (default: the root of the number of documents)")
    ] = None,
    keep: Annotated[str | None, typer.Option(help="farthest, longest or first: who stays.")] = None,
    model: Annotated[Path | None, typer.Option(help="Refuse embeddings that are not of this one.")] = None,
    settings: Set = None,
    workers: Workers = None,
) -> None:
    """Keep one of documents that mean about the same, by their embeddings (SemDeDup)."""
    from megalite.corpus.semantic.settings import SemanticDedupConfig
    from megalite.corpus.stations import semantic as station

    config = make_settings(SemanticDedupConfig, settings, threshold=threshold, clusters=clusters, keep=keep)
    options = {"embeddings": embeddings, "model": model}
    run_station(station.semantic_dedup, open_corpus(inputs), out, config, workers, **options)


def _strings(paths: list[Path] | None) -> list[str] | None:
    return [str(path) for path in paths] if paths else None
