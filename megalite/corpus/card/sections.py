"""The sections of a card's page. One with nothing to say is left out, as None."""

from __future__ import annotations

import json
from typing import Any

from megalite.corpus.card.card import Amount, Card, StageCard
from megalite.corpus.card.drawing import bars, funnel, histogram
from megalite.page.markup import Child, Markup, details, flatten, join, link, soft, table, tag
from megalite.page.numbers import count, share, size

TITLES = {
    "read": "as it came",
    "clean": "repair, redaction, rules",
    "url-dedup": "one document an address",
    "dedup": "exact duplicates",
    "near-dedup": "near-duplicates (MinHash)",
    "line-dedup": "lines that repeat",
    "substring-dedup": "passages that repeat",
    "decontaminate": "overlap with evaluation sets",
    "select": "documents that score well",
    "semantic-dedup": "documents that mean the same (embeddings)",
}
"""What a station of documents is about."""

MAX_SOURCES = 10
"""Sources shown by name, the largest; the others are added up."""

MAX_REASONS = 40


def sources(card: Card) -> Markup:
    """Where the documents come from."""
    whole = card.left.kept.text_bytes or 0
    rows: list[list[Child]] = []
    for source in card.sources[:MAX_SOURCES]:
        about = join(
            tag("b", soft(source.name)),
            tag("div", soft(source.description)) if source.description else None,
            tag("div", link(source.url)) if source.url else None,
        )
        licence = source.license or tag("span", "not stated", class_="faint")
        kept = source.kept
        numbers = (count(source.read), count(kept.documents), size(kept.text_bytes), share(kept.text_bytes or 0, whole))
        rows.append([about, licence, *numbers])
    others = card.sources[MAX_SOURCES:]
    if others:
        read, documents, text = (
            sum(numbers)
            for numbers in zip(*((o.read, o.kept.documents, o.kept.text_bytes or 0) for o in others), strict=True)
        )
        name = tag("span", f"{len(others):,} others", class_="faint")
        rows.append([name, "", count(read), count(documents), size(text), share(text, whole)])
    head = ["source", "licence", "documents read", "kept", "text kept", "share"]
    return _section("Where it comes from", table(head, rows, numbers_from=2))


def stations(card: Card) -> Markup:
    """The funnel."""
    said = "What was left after each station, in the order in which they ran."
    return _section("Through the stations", tag("p", said), _key("documents", "text"), funnel(card.stages, TITLES))


def reasons(card: Card) -> Markup | None:
    """Why documents went, station by station."""
    parts = []
    most = max((number for stage in card.stages for number in stage.reasons.values()), default=0)
    for before, stage in _steps(card):
        if not stage.reasons:
            continue
        gone = f"{count(stage.removed)} of {count(before.kept.documents)} documents"
        shown = dict(list(stage.reasons.items())[:MAX_REASONS])
        rest = sum(stage.reasons.values()) - sum(shown.values())
        if rest:
            shown["all other reasons"] = rest
        drawing = bars(shown, before.kept.documents, f"Documents that {stage.name} removed, by reason", most=most)
        parts += [tag("h3", f"{stage.name}: {gone}"), drawing]
    said = "A document counts once, by the first rule that it broke. All bars have one scale."
    return _section("Why documents went", tag("p", said), *parts) if parts else None


def redacted(card: Card) -> Markup | None:
    """What was replaced in the texts."""
    found = {kind: number for stage in card.stages for kind, number in stage.redacted.items()}
    if not found:
        return None
    said = "Personal data and secrets replaced by placeholders, also in documents that were rejected afterwards."
    return _section("Redacted", tag("p", said), bars(found, 0, "Replacements by kind"))


def duplicates(card: Card) -> Markup | None:
    """Clusters of equal and nearly equal documents."""
    found = [(stage, stage.clusters) for stage in card.stages if stage.clusters]
    if not found:
        return None
    rows: list[list[Child]] = [
        [stage.name, count(each.clusters), count(each.largest), count(stage.removed)] for stage, each in found
    ]
    parts = [table(["station", "clusters", "largest, documents", "documents removed"], rows)]
    for stage, each in found:
        if each.sizes:
            labels = {f"{members} documents": number for members, number in each.sizes.items()}
            parts += [tag("h3", f"{stage.name}: clusters by size"), bars(labels, each.clusters, "Clusters by size")]
        if each.examples:
            items = (tag("li", _code(", ".join(example))) for example in each.examples)
            parts.append(details("Some clusters, by the ids of their documents", tag("ul", *items)))
    return _section("Duplicates", *parts)


def languages(card: Card) -> Markup | None:
    """Documents by language."""
    found = next((stage.languages for stage in card.stages if stage.languages), None)
    if found is None:
        return None
    return _section("Languages", bars(found, sum(found.values()), "Documents by language"))


def licenses(card: Card) -> Markup | None:
    """Documents by licence, also of those that were put aside."""
    found = next((stage.licenses for stage in card.stages if stage.licenses), None)
    if found is None:
        return None
    return _section("Licences of documents", bars(found, sum(found.values()), "Documents by licence"))


def lengths(card: Card) -> Markup:
    """How long the documents are."""
    parts: list[Markup] = []
    for title, unit, each in (
        ("In bytes, all documents that are left", "bytes", card.lengths),
        *((f"In tokens, {split.part}", "tokens", split.lengths) for split in card.splits),
    ):
        mean = f"{each.mean:,.0f} {unit} on average, from {count(each.shortest)} to {count(each.longest)}."
        parts += [tag("h3", title), tag("p", mean, class_="faint"), histogram(each, unit)]
    said = "Classes double; each stands over its least length. Few long documents may hold most of the text."
    return _section("Lengths of documents", tag("p", said), _key("share of documents", "share of text"), *parts)


def tokens(card: Card) -> Markup:
    """Tokenizer, splits and packing."""
    tokenizer, trained_on = card.tokenizer, card.tokenizer.trained_on
    origin = "It was there before this set."
    if trained_on is not None:
        origin = f"Trained on {count(trained_on.documents)} of these documents, {size(trained_on.text_bytes)}."
    said = (
        f"Tokenizer: {tokenizer.kind} with {tokenizer.vocab_size:,} tokens, {tokenizer.bytes_per_token:.2f} bytes of "
        f"text a token. {origin}"
    )
    columns = {
        "documents": [count(each.documents) for each in card.splits],
        "text": [size(each.text_bytes) for each in card.splits],
        "tokens": [count(each.tokens) for each in card.splits],
        **_learnt_rows(card),
        "sequences": [count(each.sequences) for each in card.splits],
        "tokens in a sequence": [count(each.seq_len) for each in card.splits],
        "packing": [each.method for each in card.splits],
        "padding": [f"{each.padding_percent:.4f} %" for each in card.splits],
        "documents cut": [f"{count(e.documents_split)}, {share(e.documents_split, e.documents)}" for e in card.splits],
        "longer than a sequence": [count(each.documents_longer_than_seq_len) for each in card.splits],
    }
    optional = {
        "cuts": "cuts",
        "documents in a sequence, on average": "documents_per_sequence",
        "most documents in a sequence": "most_documents_in_a_sequence",
    }
    for title, name in optional.items():
        if all(name in each.report for each in card.splits):
            columns[title] = [f"{each.report[name]:,}" for each in card.splits]
    rows: list[list[Child]] = [[title, *cells] for title, cells in columns.items()]
    found = table(["", *(each.part for each in card.splits)], rows, stacked=False)
    return _section("Tokens and sequences", tag("p", said), found)


def _learnt_rows(card: Card) -> dict[str, list[str]]:
    """What is learnt of conversations, where there are any."""
    if all(each.tokens_learnt is None for each in card.splits):
        return {}
    learnt = [f"{count(own)}, {share(own, e.tokens)}" for e in card.splits for own in (e.tokens_learnt or 0,)]
    return {"conversations": [count(each.conversations) for each in card.splits], "tokens learnt": learnt}


def sources_by_station(card: Card) -> Markup | None:
    """How each of the largest sources fared."""
    if len(card.sources) < 2:
        return None
    rows: list[list[Child]] = []
    for source in card.sources[:MAX_SOURCES]:
        amounts = (stage.by_source.get(source.name, Amount(0)) for stage in card.stages)
        cells = (join(count(each.documents), tag("div", size(each.text_bytes), class_="faint")) for each in amounts)
        rows.append([source.name, *cells])
    head = ["source", *(stage.name for stage in card.stages)]
    return _section("Sources, station by station", table(head, rows))


def settings(card: Card) -> Markup:
    """Every setting of every station, folded."""
    folded = []
    for station in card.stations:
        flat = dict(sorted(flatten(station.settings).items()))
        rows: list[list[Child]] = [[_code(name), _code(_said(value))] for name, value in flat.items()]
        folded.append(details(station.folder, table(["setting", "value"], rows, numbers_from=2, stacked=False)))
    return _section("Settings", *folded)


def provenance(card: Card) -> Markup:
    """Versions and fingerprints."""
    said = (
        "A fingerprint is a hash of a station's settings and of every byte that it left: the same work done again has "
        "the same one. That of a raw source is a hash of the names, sizes and times of its files."
    )
    rows: list[list[Child]] = []
    for station in card.stations:
        inputs = (tag("div", soft(name), " ", _code(mark)) for name, mark in station.inputs)
        made = f"{station.version}, format {station.format}"
        files = f"{count(station.num_files)} files, {size(station.num_bytes)}"
        rows.append([tag("b", soft(station.folder)), made, _code(station.fingerprint), join(*inputs), files])
    head = ["folder", "megalite", "fingerprint", "made of", "holds"]
    return _section("To make it again", tag("p", said), table(head, rows, numbers_from=4))


def _section(title: str, *children: Child) -> Markup:
    return tag("section", tag("h2", title), *children)


def _code(text: str) -> Markup:
    return tag("code", soft(text))


def _key(first: str, second: str) -> Markup:
    return tag("div", tag("i", class_="a"), first, tag("i", class_="b"), second, class_="key")


def _steps(card: Card) -> list[tuple[StageCard, StageCard]]:
    """Each station's stage behind the one before."""
    return list(zip(card.stages, card.stages[1:], strict=False))


def _said(value: Any) -> str:
    """A value as YAML would have it."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_said, value)) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool | dict) else str(value)
