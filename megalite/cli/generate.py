"""What a trained model says: `megalite generate`."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalite.cli.paths import named_file, not_an_input
from megalite.errors import UserError

if TYPE_CHECKING:
    from megalite.checkpoint.hf.generate import Continuation
    from megalite.checkpoint.hf.prompts import Prompt

MAX_SAMPLES = 10_000


def generate(
    folder: Annotated[Path, typer.Argument(help="Folder made by `megalite convert to-hf`.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="Beginning of the text; empty starts a new document.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts, one a line, or .jsonl of objects with `prompt`.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw from so many tokens. (default: all)", show_default=False)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest with this probability.", show_default=False)
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw from those with this share of the likeliest's.", show_default=False)
    ] = None,
    stop: Annotated[list[str], typer.Option(help="Text that ends it, and is left out; repeatable.")] = [],  # noqa: B006
    samples: Annotated[int, typer.Option(min=1, max=MAX_SAMPLES, help="Texts behind each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=named_file, help=".jsonl or .txt to write.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object a text, one a line.")] = False,
) -> None:
    """Continue texts with a model in Hugging Face format; tokens are printed as they come."""
    from megalite.checkpoint.hf.generate import GenerationSettings, TextModel
    from megalite.checkpoint.hf.prompts import Prompt, read_prompts
    from megalite.checkpoint.hf.sampling import Sampling

    settings = GenerationSettings(max_new_tokens, Sampling(temperature, top_k, top_p, min_p), seed, tuple(stop))
    if prompts is not None and prompt:
        raise UserError("--prompt and --prompts: both say what to begin with; give one of them")
    if samples > 1 and temperature == 0:
        raise UserError(f"--samples {samples}: with temperature 0 all are the same; give 1, or another temperature")
    if out is not None and out.suffix not in (".jsonl", ".txt"):
        raise UserError(f"{out}: texts are written as .jsonl or .txt; give a name with one of these endings")
    if out is not None and as_json:
        raise UserError("--out and --json: both say where texts go; give one of them, --out NAME.jsonl for a file")
    if prompts is not None:
        not_an_input(out, prompts)
    asked = [Prompt(prompt)] if prompts is None else read_prompts(prompts)
    model = TextModel(folder)
    model.require_room([each.text for each in asked], max_new_tokens)
    is_json = as_json or (out is not None and out.suffix == ".jsonl")
    with ExitStack() as stack:
        file: Any = sys.stdout if out is None else stack.enter_context(open(out, "w", encoding="utf-8"))
        for number, each in enumerate(asked):
            for sample in range(samples):
                text = model.continue_text(each.text, settings, number=number, sample=sample)
                if is_json:
                    _write_record(file, each, text, sample if samples > 1 else None)
                    continue
                if len(asked) * samples > 1:
                    which = f", sample {sample + 1}" if samples > 1 else ""
                    file.write(f"--- prompt {number + 1}{which}\n")
                _stream(file, text)


def _stream(file: Any, text: Continuation) -> None:
    """Write a text as it grows."""
    file.write(text.prompt)
    for piece in text:
        file.write(piece)
        file.flush()
    file.write("\n")
    file.flush()


def _write_record(file: Any, prompt: Prompt, text: Continuation, sample: int | None) -> None:
    for _ in text:
        pass
    named = {} if prompt.id is None else {"id": prompt.id}
    numbered = {} if sample is None else {"sample": sample}
    file.write(json.dumps({**named, **numbered, **text.record()}, ensure_ascii=False) + "\n")
    file.flush()
