"""`megalite generate`: a line of text from an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    folder: Annotated[Path, typer.Argument(help="Folder made by `megalite convert to-hf`.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="Beginning of the text; empty starts a new document.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
) -> None:
    """Continue a text with a model in Hugging Face format."""
    from megalite.checkpoint.hf import generate as generation

    text = generation.generate(folder, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    typer.echo(text)
