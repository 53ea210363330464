"""What a trained model is asked: `megalite eval` for its scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalite.cli.paths import named_file, not_an_input_but
from megalite.errors import UserError

LONGEST = 2**24
"""Tokens of a text that is asked about."""

DEPTHS, TRIALS, DOCUMENTS = "0,0.25,0.5,0.75,1", 4, 16
"""Where options do not say."""

NEEDS = {
    "--limit": ("--tasks",),
    **dict.fromkeys(("--haystack", "--depths", "--trials"), ("--needle",)),
    "--documents": ("--positions",),
    "--lengths": ("--needle", "--positions"),
}
"""Options that say how something is done, and what asks for it."""

Lengths = Annotated[
    str | None,
    typer.Option(help="Tokens of the texts, with commas. (default: doubling to max_positions)", show_default=False),
]
Depths = Annotated[
    str | None,
    typer.Option(help=f"Where needles lie, shares of the text ({DEPTHS} where not given).", show_default=False),
]
Trials = Annotated[
    int | None,
    typer.Option(min=1, help=f"Needles of each length and depth ({TRIALS} where not given).", show_default=False),
]
Haystack = Annotated[
    Path | None, typer.Option(help="Plain text. (default: Python's own reference)", show_default=False)
]
Documents = Annotated[
    int | None,
    typer.Option(min=1, help=f"Documents that --positions reads ({DOCUMENTS} where not given).", show_default=False),
]

if TYPE_CHECKING:
    from megalite.train.evaluation.needle import NeedleScore, Prompts
    from megalite.train.evaluation.offline import SavedModel


def evaluate(
    model: Annotated[
        Path, typer.Argument(help="A step-… folder, a run's folder for its newest checkpoint, or a Hugging Face one.")
    ],
    tasks: Annotated[
        list[Path],
        typer.Option("--tasks", help="A .jsonl of questions, or a .yaml task of lm-evaluation-harness; repeatable."),
    ] = [],  # noqa: B006  (typer copies it)
    needle: Annotated[bool, typer.Option("--needle", help="Hide codes in long texts, and ask for them.")] = False,
    positions: Annotated[
        Path | None, typer.Option(help="Tokenized documents; shows the loss by position in long ones.")
    ] = None,
    loss: Annotated[
        list[Path], typer.Option("--loss", help="A packed set; shows the mean loss of its labels; repeatable.")
    ] = [],  # noqa: B006
    lengths: Lengths = None,
    depths: Depths = None,
    trials: Trials = None,
    haystack: Haystack = None,
    plot: Annotated[Path | None, typer.Option(callback=named_file, help="SVG file to draw the needles in.")] = None,
    documents: Documents = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer's folder. (default: the model's own)", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task. (default: all)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Score a model on multiple-choice questions, on packed sets and on long texts (docs/evaluate.md,
    docs/long-context.md).

    Files of questions are scored by megalite itself, tasks in YAML by lm-evaluation-harness on transformers, for which
    a checkpoint is exported into a temporary folder first. Nothing is downloaded.
    """
    from megalite.page.write import write_page
    from megalite.train.evaluation.long_context import needle_prompts, picture
    from megalite.train.evaluation.needle import NeedleTest, read_haystack
    from megalite.train.evaluation.offline import open_model

    _refuse_nothing(bool(tasks or loss or needle or positions), plot is not None and not needle)
    given = {"--limit": limit, "--lengths": lengths, "--haystack": haystack, "--depths": depths, "--trials": trials}
    asks = {"--tasks": tasks, "--needle": needle, "--positions": positions}
    _refuse_idle({**given, "--documents": documents}, {name for name, value in asks.items() if value})
    not_an_input_but(".svg", plot, model, tokenizer, haystack, positions, *tasks, *loss)
    shares, documents = _shares("--depths", DEPTHS if depths is None else depths), documents or DOCUMENTS
    test = NeedleTest(asked := _whole_numbers("--lengths", lengths), shares, trials or TRIALS)
    saved = open_model(model, tokenizer)
    _refuse_sets(saved, loss, positions, max(asked, default=None), documents)
    hidden = needle_prompts(saved, test, read_haystack(haystack)) if needle else []
    results: dict[str, Any] = {"tasks": _tasks(saved, tasks, limit, quiet=as_json)} if tasks else {}
    if loss:
        results["loss"] = _losses(saved, loss, quiet=as_json)
    if needle:
        found = _needles(saved, hidden, quiet=as_json)
        results["needles"] = [each.record() for each in found]
        if plot is not None:
            write_page(plot, picture(found, model))
    if positions is not None:
        results["positions"] = _positions(saved, positions, max(asked, default=None), documents, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(_without_nan({"model": str(model), **results})))


def _refuse_nothing(is_asked: bool, draws_nothing: bool) -> None:
    if not is_asked:
        raise UserError("nothing is asked: give --tasks, --loss, --needle or --positions")
    if draws_nothing:
        raise UserError("--plot draws what --needle finds; give both")


def _refuse_idle(options: dict[str, Any], asks: set[str]) -> None:
    """Raises UserError for options that say how something is done that is not asked for."""
    idle = [name for name, value in options.items() if value is not None and not asks & {*NEEDS[name]}]
    if idle:
        raise UserError(f"{idle[0]}: no effect without {' or '.join(NEEDS[idle[0]])}; give that too, or leave it out")


def _refuse_sets(saved: SavedModel, sets: Sequence[Path], source: Path | None, length: int | None, most: int) -> None:
    """Raises UserError for data that the model cannot be judged on: before the first question is scored."""
    if sets:
        from megalite.train.evaluation.set_loss import open_set

        for path in sets:
            open_set(saved, path)
    if source is not None:
        from megalite.train.evaluation.long_context import open_documents

        open_documents(saved, source, length, most)


def _without_nan(record: Any) -> Any:
    """The same, null where a number is none: JSON has no word for it."""
    if isinstance(record, dict):
        return {key: _without_nan(value) for key, value in record.items()}
    if isinstance(record, list):
        return [_without_nan(value) for value in record]
    return None if isinstance(record, float) and not isfinite(record) else record


def _tasks(saved: SavedModel, tasks: Sequence[Path], limit: int | None, *, quiet: bool) -> dict[str, Any]:
    from megalite.train.evaluation.offline import score_all

    results = {}
    for name, record in score_all(saved, tasks, limit=limit):
        results[name] = record
        if not quiet:
            scores = ", ".join(f"{key} {value:.4f}" for key, value in record.items() if isinstance(value, float))
            typer.echo(f"{name}: {scores} ({record['num']:,} questions, {record['by']})")
    return results


def _losses(saved: SavedModel, sets: Sequence[Path], *, quiet: bool) -> dict[str, Any]:
    from megalite.train.evaluation.set_loss import loss_on

    results = {}
    for path in sets:
        found = loss_on(saved, path)
        results[str(path)] = found.record()
        if not quiet:
            typer.echo(
                f"{path}: loss {found.loss:.4f}, perplexity {found.perplexity:.2f} ({found.num_tokens:,} labels)"
            )
    return results


def _needles(saved: SavedModel, hidden: Sequence[Prompts], *, quiet: bool) -> list[NeedleScore]:
    """What was found, a line for each length as soon as it is known."""
    from megalite.train.evaluation.long_context import needles

    found: list[NeedleScore] = []
    for each in needles(saved, hidden):
        found.append(each)
        if each.depth == hidden[-1][1] and not quiet:
            own = [one for one in found if one.length == each.length]
            shares = "  ".join(f"{100 * one.depth:g}%: {one.share:.0%}" for one in own)
            loss = sum(one.loss for one in own) / len(own)
            typer.echo(f"needles in {each.length:,} tokens, by depth: {shares} (loss {loss:.2f})")
    return found


def _positions(saved: SavedModel, source: Path, length: int | None, most: int, *, quiet: bool) -> list[dict[str, Any]]:
    from megalite.train.evaluation.long_context import position_losses

    ranges = position_losses(saved, source, length, most)
    for each in () if quiet else ranges:
        typer.echo(f"positions {each.first:,} to {each.stop - 1:,}: loss {each.loss:.4f} ({each.num_tokens:,} tokens)")
    return [each.record() for each in ranges]


def _whole_numbers(option: str, given: str | None) -> tuple[int, ...]:
    try:
        numbers = () if given is None else tuple(int(part) for part in given.split(","))
    except ValueError:
        numbers = (0,)
    if any(not 1 <= number <= LONGEST for number in numbers):
        raise UserError(
            f"{option}: found {given!r}, expected whole numbers from 1 to {LONGEST} with commas, such as 1024,4096"
        )
    return tuple(sorted(set(numbers)))


def _shares(option: str, given: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in given.split(","))
    except ValueError:
        numbers = (-1.0,)
    if not all(0 <= number <= 1 for number in numbers):
        raise UserError(f"{option}: found {given!r}, expected numbers from 0 to 1 with commas, such as 0,0.5,1")
    return tuple(sorted(set(numbers)))
