"""A recipe from raw documents to packed training data, station by station.

    sources -> clean -> url-dedup, dedup, near-dedup, line-dedup, substring-dedup, decontaminate
            -> harmful, perplexity, classifier, semantic-dedup -> tokenizer, chat-tokenizer
            -> tokens/train, tokens/valid -> packed/train, packed/valid

Every station leaves its folder below the recipe's `out`. One that is finished, with the same settings and the same
input, is not run again: an interrupted recipe goes on where it was, and a changed setting redoes only what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megalite.config.load import build
from megalite.config.schema import Config
from megalite.config.yaml_source import read_source
from megalite.corpus.card.make import JSON_FILE, make_card, write_card
from megalite.corpus.corpus import Corpus
from megalite.corpus.near.settings import NearDedupConfig
from megalite.corpus.recipe import DataRecipe
from megalite.corpus.semantic.nearest import require_faiss
from megalite.corpus.semantic.settings import SemanticDedupConfig
from megalite.corpus.source import DocumentSource
from megalite.corpus.split import ALL, CorpusSplit, Part
from megalite.corpus.stations.chat_tokenizer import chat_tokenizer
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.dedup import dedup
from megalite.corpus.stations.embed import check_model, embed
from megalite.corpus.stations.forms import Forms
from megalite.corpus.stations.near import near_dedup
from megalite.corpus.stations.select import classifier, harmful, perplexity
from megalite.corpus.stations.semantic import semantic_dedup, with_clusters
from megalite.corpus.stations.spans import decontaminate, line_dedup, substring_dedup, url_dedup
from megalite.corpus.stations.tokenize import tokenize
from megalite.corpus.stations.train_tokenizer import train_tokenizer
from megalite.data.pack import pack
from megalite.errors import ConfigError, DataError
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.lease import Lease
from megalite.stations.station import StationResult
from megalite.stations.tasks import Runner
from megalite.tokenizer.chat_template import read_template
from megalite.tokenizer.fill_in import sentinel_ids
from megalite.tokenizer.tokenizer import Tokenizer

LOCK_FILE = ".lock"

EMBEDDINGS = "embeddings"
"""Folder of what `semantic_dedup` goes by."""

TRAINING_SECTIONS = frozenset(Config.model_fields) - frozenset(DataRecipe.model_fields)
"""By these a training config is told from a recipe with a mistake in it."""


@dataclass(frozen=True)
class FinishedStation:
    """One station of a recipe that is done."""

    name: str
    folder: Path
    result: StationResult


def prepare(
    recipe: DataRecipe, *, runner: Runner | None = None, progress: ProgressReporter | None = None
) -> list[FinishedStation]:
    """Run all stations of a recipe that are not finished yet.

    Args:
        recipe: what to do.
        runner: where the stations' tasks run; the result does not depend on it. None is this process.
        progress: told of every station.

    Returns:
        All stations, in their order.

    Raises:
        DataError: an input is missing or damaged, or a station has nothing to work on.
        UserError: another process prepares in this folder.
    """
    _refuse_missing_files(recipe)
    with Lease(recipe.out / LOCK_FILE, recipe.out):
        return _prepare(recipe, runner, progress or NoProgress())


def _prepare(recipe: DataRecipe, runner: Runner | None, progress: ProgressReporter) -> list[FinishedStation]:
    """The stations in their order."""
    out = recipe.out
    done: list[FinishedStation] = []

    def finish(name: str, result: StationResult) -> Path:
        done.append(FinishedStation(name, out / name, result))
        return out / name

    raw = Corpus(recipe.sources)
    result = clean(raw, out / "clean", recipe.clean, runner=runner, progress=progress)
    cleaned = finish("clean", result)
    _refuse_empty(done[-1], "its rejected/ folder says why each one was refused")

    documents = _station(cleaned)
    for name, station in _filters(recipe):
        documents = _station(finish(name, station(documents, out / name, runner=runner, progress=progress)))
        _refuse_empty(done[-1], "its removed/ folder says why each one went")
    if recipe.semantic_dedup is not None:
        documents = _station(_semantic(recipe, done[-1], finish, runner=runner, progress=progress))

    tokenizer = recipe.tokenizer.path
    if tokenizer is None:
        training = _split(recipe, "train")
        result = train_tokenizer(documents, out / "tokenizer", recipe.tokenizer, split=training, progress=progress)
        tokenizer = finish("tokenizer", result)

    if recipe.chat is not None and recipe.chat.template is not None:
        result = chat_tokenizer(tokenizer, recipe.chat.template, out / "chat-tokenizer")
        tokenizer = finish("chat-tokenizer", result)

    parts: list[Part] = ["train", "valid"] if recipe.valid_fraction > 0 else ["train"]
    for part in parts:
        name, split = f"tokens/{part}", _split(recipe, part)
        describe = recipe.describe_tokens
        forms = forms_of(recipe, part)
        options: dict[str, Any] = {"describe": describe, "forms": forms, "runner": runner, "progress": progress}
        result = tokenize(documents, tokenizer, out / name, split=split, **options)
        tokens = finish(name, result)
        _refuse_empty(done[-1], f"valid_fraction={recipe.valid_fraction} leaves nothing for {part}: change it")
        name = f"packed/{part}"
        chosen = recipe.pack if part == "train" else recipe.pack.model_copy(update={"repeats": ()})
        finish(name, pack(tokens, out / name, chosen, progress=progress))
    if not all(station.result.reused for station in done) or not (out / JSON_FILE).is_file():
        write_card(out, make_card(out, recipe))
    return done


def _semantic(
    recipe: DataRecipe, before: FinishedStation, finish: Callable[[str, StationResult], Path], **where: Any
) -> Path:
    """Embeddings, then the documents without those that mean about the same; the folder of these."""
    config, out, name = recipe.semantic_dedup, recipe.out, "semantic-dedup"
    assert config is not None
    settings = SemanticDedupConfig(**config.model_dump(exclude={"model", "embed"}))
    with_clusters(settings, before.result.manifest.counts["documents"])  # or refuse before the embeddings are made
    documents = _station(before.folder)
    made = finish(EMBEDDINGS, embed(documents, out / EMBEDDINGS, config.embed, model=config.model, **where))
    return finish(name, semantic_dedup(documents, out / name, settings, embeddings=made, **where))


def forms_of(recipe: DataRecipe, part: Part) -> Forms:
    """The forms that documents of a part take as tokens."""
    chat, fim = recipe.chat, recipe.fim
    if chat is not None:  # whose template is the tokenizer's by now
        chat = chat.model_copy(update={"template": None, "max_tokens": chat.max_tokens or recipe.pack.seq_len})
    if fim is not None and part == "valid" and not fim.valid:
        fim = None
    return Forms(chat, fim, seq_len=recipe.pack.seq_len, seed=recipe.seed)


def _filters(recipe: DataRecipe) -> Iterator[tuple[str, Callable[..., StationResult]]]:
    """The stations that take documents away, in their order: cheap and sure ones first."""
    if recipe.url_dedup is not None:
        yield "url-dedup", partial(url_dedup, config=recipe.url_dedup)
    yield "dedup", partial(dedup, config=recipe.dedup)
    if recipe.near_dedup is not None:
        older, keep_index = recipe.near_dedup.older, recipe.near_dedup.keep_index
        config = NearDedupConfig(**recipe.near_dedup.model_dump(exclude={"older", "keep_index"}))
        yield "near-dedup", partial(near_dedup, config=config, older=older, keep_index=keep_index)
    if recipe.line_dedup is not None:
        yield "line-dedup", partial(line_dedup, config=recipe.line_dedup)
    if recipe.substring_dedup is not None:
        yield "substring-dedup", partial(substring_dedup, config=recipe.substring_dedup)
    if recipe.decontaminate is not None:
        yield "decontaminate", partial(decontaminate, config=recipe.decontaminate)
    if recipe.harmful is not None:
        yield "harmful", partial(harmful, config=recipe.harmful)
    if recipe.perplexity is not None:
        yield "perplexity", partial(perplexity, config=recipe.perplexity)
    if recipe.classifier is not None:
        yield "classifier", partial(classifier, config=recipe.classifier)


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> DataRecipe:
    """Read a recipe from a YAML file.

    Args:
        path: the file.
        overrides: `key=value` or `section.key=value`, applied in order.

    Raises:
        ConfigError: everything that is wrong with it, each complaint with `file:line`.
    """
    source = read_source(Path(path), "a recipe for data is a mapping of sections, such as `sources:`")
    if "sources" not in source.data and (found := sorted(TRAINING_SECTIONS & source.data.keys())):
        raise ConfigError(
            [
                f"{path}: this is a training config (with {', '.join(found)}), no recipe for data: give it to "
                "`megalite train`; a recipe has sources, as configs/data/demo.yaml"
            ]
        )
    for assignment in overrides:
        source.override(assignment)
    return build(DataRecipe, source)


def _refuse_missing_files(recipe: DataRecipe) -> None:
    """What later stations need besides the documents should be missed before the first one runs for hours."""
    wanted: dict[str, Sequence[Path | None]] = {"tokenizer.path": [recipe.tokenizer.path]}
    if recipe.near_dedup is not None:
        wanted["near_dedup.older"] = recipe.near_dedup.older
    if recipe.decontaminate is not None:
        wanted["decontaminate.paths"] = recipe.decontaminate.paths
    if recipe.harmful is not None:
        wanted["harmful.model"] = [recipe.harmful.model]
        wanted["harmful.harmful"] = recipe.harmful.harmful
        wanted["harmful.harmless"] = recipe.harmful.harmless
    if recipe.perplexity is not None:
        wanted["perplexity.model"] = [recipe.perplexity.model]
        wanted["perplexity.train_on"] = recipe.perplexity.train_on
    if recipe.classifier is not None:
        wanted["classifier.model"] = [recipe.classifier.model]
        wanted["classifier.good"] = recipe.classifier.good
        wanted["classifier.bad"] = recipe.classifier.bad
    if recipe.semantic_dedup is not None:
        wanted["semantic_dedup.model"] = [recipe.semantic_dedup.model]
    if recipe.chat is not None:
        wanted["chat.template"] = [recipe.chat.template]
    missing = [
        f"{key}: {path}: no such file or folder"
        for key, paths in wanted.items()
        for path in paths
        if path is not None and not path.exists()
    ]
    if missing:
        raise DataError("\n".join(missing))
    if recipe.tokenizer.path is not None and recipe.fim is not None:
        sentinel_ids(Tokenizer.load(recipe.tokenizer.path), recipe.fim)
    if recipe.tokenizer.path is not None and recipe.chat is not None:
        read_template(recipe.tokenizer.path, recipe.chat.template)
    if recipe.semantic_dedup is not None:
        require_faiss()
        check_model(recipe.semantic_dedup.model, recipe.semantic_dedup.embed, recipe.out / EMBEDDINGS)


def _station(folder: Path) -> Corpus:
    return Corpus([DocumentSource(path=folder)])


def _split(recipe: DataRecipe, part: Part) -> CorpusSplit:
    return CorpusSplit(part, recipe.valid_fraction, recipe.seed) if recipe.valid_fraction > 0 else ALL


def _refuse_empty(station: FinishedStation, advice: str) -> None:
    if not station.result.manifest.counts["documents"]:
        raise DataError(f"{station.folder}: no document came out of this station; {advice}")
