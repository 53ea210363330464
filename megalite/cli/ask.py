"""What a trained model is asked: `megalite eval` for its scores, `megalite generate` for a line of its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    model: Annotated[
        Path, typer.Argument(help="A step-… folder, a run's folder for its newest checkpoint, or a Hugging Face one.")
    ],
    tasks: Annotated[
        list[Path],
        typer.Option("--tasks", help="A .jsonl of questions, or a .yaml task of lm-evaluation-harness; repeatable."),
    ],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer's folder. [default: the model's own]", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task. [default: all]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Score a model on multiple-choice questions (docs/evaluate.md).

    Files of questions are scored by megalite itself, tasks in YAML by lm-evaluation-harness on transformers, for which
    a checkpoint is exported into a temporary folder first. Nothing is downloaded.
    """
    from megalite.train.evaluation.offline import open_model, score_all

    results = {}
    for name, record in score_all(open_model(model, tokenizer), tasks, limit=limit):
        results[name] = record
        if not as_json:
            scores = ", ".join(f"{key} {value:.4f}" for key, value in record.items() if isinstance(value, float))
            typer.echo(f"{name}: {scores} ({record['num']:,} questions, {record['by']})")
    if as_json:
        typer.echo(json.dumps({"model": str(model), "tasks": results}))


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
