"""Fills a card in, from the manifests of a recipe's stations and one pass over their files.

    trace(out) -> manifests -> counts, settings, fingerprints  \\
               -> files     -> lengths, documents by source     -> Card -> card.json, card.html
               recipe       -> description, licence, url       /
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megalite.corpus.card.card import (
    FORMAT,
    Amount,
    Card,
    Clusters,
    SourceCard,
    SplitCard,
    StageCard,
    StationCard,
    TokenizerCard,
)
from megalite.corpus.card.lineage import Lineage, trace
from megalite.corpus.card.measure import BySource, measure_kept, measure_rejected, measure_tokens, merge
from megalite.corpus.card.page import render
from megalite.corpus.recipe import DataRecipe
from megalite.corpus.split import Part
from megalite.stations.manifest import StationManifest, write_text
from megalite.tokenizer.tokenizer import HUGGING_FACE, read_info

JSON_FILE = "card.json"
HTML_FILE = "card.html"

DESCRIBING = ("description", "license", "url")
"""What people say about a source: nothing that can be counted."""

READ = "read"
"""Name of the first stage."""


def make_card(out: Path, recipe: DataRecipe | None = None) -> Card:
    """Fill in the card of a prepared set.

    Args:
        out: the recipe's folder.
        recipe: describes the sources. Without it, what an earlier card in the folder said of them stays.

    Raises:
        DataError: there is no finished recipe in the folder, or its files do not agree with their manifests.
    """
    lineage = trace(out)
    kept = [measure_kept(manifest) for manifest in lineage.documents]
    raw = merge([kept[0], measure_rejected(lineage.documents[0])])
    stages = _stages(lineage, raw, kept)
    described = _describe(recipe) if recipe is not None else _described_before(out)
    [overall] = merge([{"": tally} for tally in kept[-1].values()]).values()
    return Card(
        name=out.absolute().name,
        format=FORMAT,
        sources=_sources(stages, described),
        stages=stages,
        lengths=overall.lengths(),
        tokenizer=_tokenizer(lineage),
        splits=tuple(_split(part, lineage) for part in lineage.tokens),
        stations=tuple(_station(manifest, out) for manifest in lineage.stations),
    )


def write_card(out: Path, card: Card) -> None:
    """Leave card.json and card.html in a folder; a reader never sees half of one."""
    write_text(out / HTML_FILE, render(card))
    write_text(out / JSON_FILE, card.dumps())


def _stages(lineage: Lineage, raw: BySource, kept: list[BySource]) -> tuple[StageCard, ...]:
    """What was read, then what each station left."""
    first = lineage.documents[0].counts
    came = Amount(first["documents_in"], first.get("text_bytes_in"))
    by_source = {source: Amount(tally.documents) for source, tally in raw.items()}
    stages = [StageCard(READ, came, 0, {}, by_source, {}, None, {})]
    for manifest, found in zip(lineage.documents, kept, strict=True):
        counts = manifest.counts
        stages.append(
            StageCard(
                name=manifest.station,
                kept=Amount(counts["documents"], counts["text_bytes"]),
                removed=counts["documents_in"] - counts["documents"],
                reasons=_reasons(manifest),
                by_source={source: Amount(tally.documents, tally.total) for source, tally in found.items()},
                redacted=_largest_first(counts.get("redacted", {})),
                clusters=_clusters(counts),
                languages=_largest_first(counts.get("languages", {})),
            )
        )
    return tuple(stages)


def _reasons(manifest: StationManifest) -> dict[str, int]:
    """Why documents went. Exact duplicates are the only ones that a manifest counts without a reason."""
    counts = manifest.counts
    reasons = {**counts.get("rejected", {}), **counts.get("removed", {})}
    unexplained = counts["documents_in"] - counts["documents"] - sum(reasons.values())
    if unexplained:
        reasons["same text" if manifest.station == "dedup" else "other"] = unexplained
    return _largest_first(reasons)


def _clusters(counts: dict[str, Any]) -> Clusters | None:
    if not counts.get("clusters"):
        return None
    sizes = counts.get("cluster_sizes", {})
    by_size = dict(sorted(sizes.items(), key=lambda item: int(item[0].split("-")[0])))
    examples = tuple(tuple(example) for example in counts.get("examples", ()))
    return Clusters(counts["clusters"], counts["largest_cluster"], by_size, examples)


def _sources(stages: tuple[StageCard, ...], described: dict[str, dict[str, str | None]]) -> tuple[SourceCard, ...]:
    """All sources that were read or described; equal names are one source, as they are in the data."""
    came, left = stages[0].by_source, stages[-1].by_source
    cards = []
    for name in {**came, **described}:
        words = described.get(name, {})
        read = came.get(name, Amount(0)).documents
        kept = left.get(name, Amount(0, 0))
        cards.append(SourceCard(name, **{field: words.get(field) for field in DESCRIBING}, read=read, kept=kept))
    return tuple(sorted(cards, key=lambda card: (-(card.kept.text_bytes or 0), -card.read, card.name)))


def _describe(recipe: DataRecipe) -> dict[str, dict[str, str | None]]:
    """What the recipe says of its sources, by the names that they have in the data."""
    described: dict[str, dict[str, str | None]] = {}
    for source in recipe.sources:
        described.setdefault(source.label, {field: getattr(source, field, None) for field in DESCRIBING})
    return described


def _described_before(out: Path) -> dict[str, dict[str, str | None]]:
    """What the earlier card in the folder says, if there is one that can be read."""
    try:
        sources = json.loads((out / JSON_FILE).read_text(encoding="utf-8"))["sources"]
        return {source["name"]: {field: source[field] for field in DESCRIBING} for source in sources}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _tokenizer(lineage: Lineage) -> TokenizerCard:
    train = lineage.tokens["train"]
    info = read_info(lineage.tokenizer_folder)
    trained = lineage.tokenizer.counts if lineage.tokenizer is not None else None
    return TokenizerCard(
        kind=HUGGING_FACE if info is None else info.kind,
        vocab_size=train.settings["tokenizer"]["vocab_size"],
        fingerprint=train.settings["tokenizer"]["fingerprint"],
        trained_on=Amount(trained["documents"], trained["text_bytes"]) if trained else None,
        bytes_per_token=round(train.counts["text_bytes"] / train.counts["tokens"], 4),
    )


def _split(part: Part, lineage: Lineage) -> SplitCard:
    tokens, packed = lineage.tokens[part], lineage.packed[part]
    same = ("padding_percent", "documents_split", "documents_longer_than_seq_len")
    return SplitCard(
        part=part,
        **{name: tokens.counts[name] for name in ("documents", "text_bytes", "tokens")},
        lengths=measure_tokens(tokens),
        method=packed.settings["method"],
        seq_len=packed.settings["seq_len"],
        sequences=packed.counts["samples"],
        **{name: packed.counts[name] for name in same},
        report=packed.counts.get("report", {}),
        conversations=tokens.counts.get("conversations", 0),
        tokens_learnt=tokens.counts.get("tokens_learnt"),
    )


def _station(manifest: StationManifest, out: Path) -> StationCard:
    return StationCard(
        folder=_name(manifest.folder, out),
        station=manifest.station,
        version=manifest.version,
        format=manifest.format,
        fingerprint=manifest.fingerprint,
        settings=_without_folders(manifest.settings),
        inputs=tuple(
            (_name(manifest.input_path(index), out), each.fingerprint) for index, each in enumerate(manifest.inputs)
        ),
        num_files=len(manifest.outputs),
        num_bytes=sum(output.num_bytes for output in manifest.outputs),
    )


def _name(path: Path, out: Path) -> str:
    """A path inside the recipe's folder as seen from there; of others the last part, for they differ by machine."""
    path, out = path.absolute(), out.absolute()
    return path.relative_to(out).as_posix() if path.is_relative_to(out) else path.name


def _without_folders(value: Any) -> Any:
    """Settings with the last part of each absolute path in place of the path."""
    if isinstance(value, dict):
        return {name: _without_folders(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _largest_first(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
