"""A recipe from raw documents to packed training data, station by station.

    sources -> clean -> dedup -> tokenizer -> tokens/train, tokens/valid -> packed/train, packed/valid

Every station leaves its folder below the recipe's `out`. One that is finished, with the same settings and the same
input, is not run again: an interrupted recipe goes on where it was, and a changed setting redoes only what follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from megalite.config.yaml_source import Source, read_source
from megalite.data.clean import clean
from megalite.data.corpus import Corpus
from megalite.data.dedup import dedup
from megalite.data.manifest import StationResult
from megalite.data.pack import pack
from megalite.data.progress import Progress, Silent
from megalite.data.recipe import (
    CleanConfig,
    DedupConfig,
    DocumentSource,
    PackConfig,
    Recipe,
    TokenizerConfig,
)
from megalite.data.split import ALL, Part, Split
from megalite.data.tokenize import tokenize
from megalite.data.train_tokenizer import train_tokenizer
from megalite.errors import ConfigError, DataError, did_you_mean


@dataclass(frozen=True)
class Finished:
    """One station of a recipe that is done."""

    name: str
    folder: Path
    result: StationResult


def prepare(recipe: Recipe, *, num_workers: int = 1, progress: Progress | None = None) -> list[Finished]:
    """Run all stations of a recipe that are not finished yet.

    Args:
        recipe: what to do.
        num_workers: processes for cleaning and encoding; the result does not depend on it.
        progress: told of every station.

    Returns:
        All stations, in their order.

    Raises:
        DataError: an input is missing or damaged, or a station has nothing to work on.
    """
    progress = progress or Silent()
    out = recipe.out
    done: list[Finished] = []

    def finish(name: str, result: StationResult) -> Path:
        done.append(Finished(name, out / name, result))
        return out / name

    raw = Corpus(recipe.sources)
    result = clean(raw, out / "clean", recipe.clean, num_workers=num_workers, progress=progress)
    cleaned = finish("clean", result)
    _refuse_empty(done[-1], "its rejected/ folder says why each one was refused")

    result = dedup(_station(cleaned), out / "dedup", recipe.dedup, progress=progress)
    documents = _station(finish("dedup", result))

    tokenizer = recipe.tokenizer.path
    if tokenizer is None:
        training = _split(recipe, "train")
        result = train_tokenizer(documents, out / "tokenizer", recipe.tokenizer, split=training, progress=progress)
        tokenizer = finish("tokenizer", result)

    parts: list[Part] = ["train", "valid"] if recipe.valid_fraction > 0 else ["train"]
    for part in parts:
        name, split = f"tokens/{part}", _split(recipe, part)
        result = tokenize(documents, tokenizer, out / name, split=split, num_workers=num_workers, progress=progress)
        tokens = finish(name, result)
        _refuse_empty(done[-1], f"valid_fraction={recipe.valid_fraction} leaves nothing for {part}: change it")
        name = f"packed/{part}"
        finish(name, pack(tokens, out / name, recipe.pack, progress=progress))
    return done


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from a YAML file.

    Raises:
        ConfigError: everything that is wrong with it, each complaint with `file:line`.
    """
    source = read_source(path)
    problems = list(source.problems)
    try:
        recipe = Recipe.model_validate(source.data)
    except ValidationError as error:
        problems += [_sentence(source, details) for details in error.errors()]
    if problems:
        raise ConfigError(problems)
    return recipe


def _sentence(source: Source, details: dict) -> str:
    """One complaint of pydantic's, with its place."""
    keys = tuple(str(key) for key in details["loc"])
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "extra_forbidden":
        sections = (Recipe, DocumentSource, CleanConfig, DedupConfig, TokenizerConfig, PackConfig)
        known = {name for section in sections for name in section.model_fields}
        message = f"unknown key{did_you_mean(keys[-1], known)}"
    elif details["type"] != "missing":
        message = f"found {details['input']!r}: {message}"
    return f"{source.place(keys)}: {'.'.join(keys)}: {message}"


def _station(folder: Path) -> Corpus:
    return Corpus([DocumentSource(path=folder)])


def _split(recipe: Recipe, part: Part) -> Split:
    return Split(part, recipe.valid_fraction, recipe.seed) if recipe.valid_fraction > 0 else ALL


def _refuse_empty(station: Finished, advice: str) -> None:
    if not station.result.manifest.counts["documents"]:
        raise DataError(f"{station.folder}: no document came out of this station; {advice}")
