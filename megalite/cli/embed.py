"""`megalite embed`: embeddings of documents by a model of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.data.options import Documents, Include, Set, TextField, Workers, make_settings, open_corpus
from megalite.cli.data.options import run_station as run
from megalite.cli.paths import named


def embed(
    model: Annotated[
        Path, typer.Argument(help="Folder made by `megalite convert to-hf`, or another Hugging Face one.")
    ],
    documents: Documents,
    out: Annotated[Path, typer.Option("--out", "-o", callback=named, help="Folder to make.")],
    pooling: Annotated[str | None, typer.Option(help="mean, last or first token. (default: mean)")] = None,
    layer: Annotated[int | None, typer.Option(help="Whose hidden states; -1 is the last. (default: -1)")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of a document that are read. (default: 512)")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. (default: cpu)")] = None,
    text_field: TextField = "text",
    include: Include = None,
    settings: Set = None,
    workers: Workers = None,
) -> None:
    """Make embeddings of documents: embeddings.npy, documents.parquet beside it, and a manifest."""
    from megalite.corpus.semantic.settings import EmbedConfig
    from megalite.corpus.stations import embed as station

    given = {"pooling": pooling, "layer": layer, "max_tokens": max_tokens, "device": device}
    config = make_settings(EmbedConfig, settings, **given)
    run(station.embed, open_corpus(documents, text_field, include), out, config, workers, model=model)
