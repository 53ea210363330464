"""What each quality rule would do to a corpus: how one chooses thresholds before a rule is set loose.

    sample -> repair, redact -> every rule's statistic of every document -> rejected, rejected alone, histogram

        fewer words than 50          keep >= 50     rejected 21 %, alone 3 %
        ▁▁▂▂▃▅▆|█▇▆▅▃▂▁▁▁▁           left of the bar is rejected

A rule that rejects much alone is the one to look at; one that rejects nothing alone repeats what others say. Each rule
sees all documents, also those that another rejects, and with C4's rules on it sees the texts that these leave.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import DocumentBatch
from megalite.corpus.recipe import CleanConfig
from megalite.corpus.rules.rule import Rule
from megalite.corpus.rules.settings import FineWebConfig, GopherQualityConfig, GopherRepetitionConfig
from megalite.corpus.shards import Shard, ShardReading
from megalite.corpus.stations.clean import detect_languages, detect_licenses, repair_and_redact
from megalite.errors import DataError
from megalite.stations.manifest import write_text

QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)

EXPLANATION = (
    "Each rule sees every document; `alone` counts those that no other rule rejects. Histograms reach over the "
    "quantiles of 1 and 99 % and the threshold; what grows large is drawn by its logarithm."
)

NUM_BINS = 32

MIN_SHARD_BYTES = 500_000
"""Read at least this much of a shard that is read at all: the first batch of each has to be read whole."""

MOST_ON_A_LINEAR_SCALE = 20.0
"""Statistics that reach higher are shown by their logarithm: lengths and numbers of words run over decades."""

BLOCKS = " ▁▂▃▄▅▆▇█"

RULE_SETS = ("c4", "gopher_quality", "gopher_repetition", "fineweb", "bad_words", "code")


@dataclass(frozen=True)
class Histogram:
    """How the values of a statistic lie around a threshold, which is a border between two bins."""

    edges: np.ndarray
    """float64 [bins + 1]. What lies beyond the outermost is in the first and last bin."""
    counts: np.ndarray
    """int64 [bins]"""
    num_below: int
    """Bins on the lower side of the threshold."""
    rejects_below: bool
    """Which side the rule rejects."""

    @property
    def bars(self) -> tuple[str, str]:
        """Both sides of the threshold in block characters; a bin with anything in it is not blank."""
        most = max(int(self.counts.max()), 1)
        line = "".join(BLOCKS[math.ceil(count * (len(BLOCKS) - 1) / most)] for count in self.counts.tolist())
        return line[: self.num_below], line[self.num_below :]


@dataclass(frozen=True)
class Effect:
    """What one rule does to the sample."""

    reason: str
    keep: str
    """How the values of documents that stay compare with the threshold: >, >=, < or <=."""
    threshold: float
    rejected: int
    """Documents that this rule rejects."""
    rejected_alone: int
    """Documents that this rule rejects and no other."""
    quantiles: tuple[float, ...]
    """Of the statistic over all documents, at QUANTILES."""
    histogram: Histogram


@dataclass(frozen=True)
class Effects:
    """What all rules do to the sample."""

    documents: int
    text_bytes: int
    """After repair and redaction."""
    unreadable: int
    """Records left out because they could not be read."""
    other_languages: int
    """Documents left out because of their language, which is looked at before the rules."""
    other_licenses: int
    """Documents left out because of their licence, which comes before the language."""
    rejected: int
    """Documents that at least one rule rejects."""
    rejected_bytes: int
    rules: tuple[Effect, ...]
    """In the order in which they are asked."""


class LeftOut(NamedTuple):
    """Numbers of records, and of documents, that rules do not get to see."""

    unreadable: int
    other_languages: int
    other_licenses: int


def measure_effects(corpus: Corpus, config: CleanConfig, *, max_mb: float = 20.0) -> Effects:
    """Judge a sample of a corpus by every rule that is on.

    Args:
        corpus: what to look at; the sample is the same each time.
        config: the rules, how texts are repaired and redacted before, and the languages that the rules get to see.
        max_mb: about how many million bytes of text to read.

    Raises:
        DataError: there is no document to read.
    """
    from megalite.corpus.rules.apply import edit_and_measure, make_rules  # brings numba, which takes a second to import

    rules = make_rules(config)
    lengths, values, rejects = [], [], []
    unreadable = other_languages = other_licenses = 0
    for batch in _sample(corpus.shards(), max_mb * 1e6):
        unreadable += len(batch.rejected)
        refused, _, _ = detect_licenses(batch.texts, batch.documents.column("metadata"), config.license)
        other_licenses += int((refused != "").sum())
        given = batch.texts.take(refused == "") if config.license is not None else batch.texts
        texts, _ = repair_and_redact(given, config)
        if config.language is not None and config.language.keep:
            is_other, _ = detect_languages(texts, config.language)
            other_languages += int(is_other.sum())
            texts = texts.take(~is_other)
        lengths.append(texts.lengths)
        _, statistics = edit_and_measure(texts, config)
        values.append(np.stack([rule.values(statistics) for rule in rules]))
        rejects.append(np.stack([rule.rejects(statistics) for rule in rules]))
    if not sum(map(len, lengths)):
        raise DataError(
            f"no document to look at: {unreadable} records in the sample could not be read, {other_licenses} are under "
            f"other licences than license.accept names, and {other_languages} are in other languages than "
            "language.keep names; are the text field, the licences and the languages the right ones?"
        )
    left_out = LeftOut(unreadable, other_languages, other_licenses)
    return _add_up(rules, np.concatenate(lengths), np.hstack(values), np.hstack(rejects), left_out)


def with_rule_sets(config: CleanConfig) -> CleanConfig:
    """The same rules; when no set of rules is on, with those that have something to say about any text."""
    if any(getattr(config, name) is not None for name in RULE_SETS):
        return config
    sets = {
        "gopher_quality": GopherQualityConfig(),
        "gopher_repetition": GopherRepetitionConfig(),
        "fineweb": FineWebConfig(),
    }
    return config.model_copy(update=sets)


def _sample(shards: Sequence[Shard], max_bytes: float) -> Iterator[DocumentBatch]:
    """The beginnings of shards that lie evenly over the corpus; a short one leaves its share to those after it."""
    num_read = max(1, min(len(shards), int(max_bytes / MIN_SHARD_BYTES)))
    left = max_bytes
    for position in range(num_read):
        quota = left / (num_read - position)
        for batch in ShardReading(shards[position * len(shards) // num_read]):
            num_taken = int(np.searchsorted(np.cumsum(batch.texts.lengths), quota)) + 1  # and the one that reaches it
            taken = DocumentBatch(batch.documents.slice(0, num_taken), batch.rejected)
            yield taken
            quota -= taken.texts.num_bytes
            left -= taken.texts.num_bytes
            if quota <= 0:
                break


def _add_up(
    rules: Sequence[Rule],
    lengths: np.ndarray,
    values: np.ndarray,
    rejects: np.ndarray,
    left_out: LeftOut,
) -> Effects:
    """Counts and histograms.

    Args:
        rules: the rules.
        lengths: int64 [documents], bytes.
        values: float64 [rules, documents].
        rejects: bool [rules, documents].
        left_out: what the rules did not get to see.
    """
    num_rejecting = rejects.sum(axis=0)
    effects = tuple(
        Effect(
            reason=rule.reason,
            keep=rule.keep,
            threshold=rule.threshold,
            rejected=int(rejected.sum()),
            rejected_alone=int((rejected & (num_rejecting == 1)).sum()),
            quantiles=tuple(np.quantile(of_rule, QUANTILES).tolist()),
            histogram=make_histogram(of_rule, rule.keep, rule.threshold),
        )
        for rule, of_rule, rejected in zip(rules, values, rejects, strict=True)
    )
    gone = num_rejecting > 0
    return Effects(
        documents=lengths.size,
        text_bytes=int(lengths.sum()),
        **left_out._asdict(),
        rejected=int(gone.sum()),
        rejected_bytes=int(lengths[gone].sum()),
        rules=effects,
    )


def make_histogram(values: np.ndarray, keep: str, threshold: float) -> Histogram:
    """Bins of equal width, or of equal ratio for what grows large, on both sides of a threshold.

    They reach over the quantiles of 1 and 99 % and the threshold, so that a single huge document does not squeeze all
    others into one bin.

    Args:
        values: float64 [documents], none negative.
        keep: >, >=, < or <=: which side of the threshold stays, and where a value on it belongs.
        threshold: the threshold.
    """
    low, high = np.quantile(values, [QUANTILES[0], QUANTILES[-1]]).tolist()
    low, high = min(low, threshold), max(high, threshold)
    logarithmic = high > MOST_ON_A_LINEAR_SCALE
    ends = np.log1p([low, threshold, high]) if logarithmic else np.array([low, threshold, high])
    width = ends[2] - ends[0]
    num_below = round(NUM_BINS * float((ends[1] - ends[0]) / width)) if width else NUM_BINS // 2
    num_below = min(max(num_below, 1), NUM_BINS - 1)
    below = np.linspace(ends[0], ends[1], num_below + 1)
    edges = np.concatenate([below, np.linspace(ends[1], ends[2], NUM_BINS - num_below + 1)[1:]])
    if logarithmic:
        edges = np.expm1(edges)
    edges[num_below] = threshold  # to the last bit: rounding must put no document on the wrong side
    edges[:num_below] = np.minimum(edges[:num_below], threshold)
    edges[num_below:] = np.maximum(edges[num_below:], threshold)
    side: Literal["left", "right"] = (
        "right" if keep in (">=", "<") else "left"
    )  # with >= a value on the threshold stays, so it is above
    bins = np.clip(np.searchsorted(edges, values, side) - 1, 0, NUM_BINS - 1)
    return Histogram(edges, np.bincount(bins, minlength=NUM_BINS), num_below, keep in (">", ">="))


def compact(value: float) -> str:
    """A number in at most five characters or so: 0.123, 57, 1.2k, 3.4M."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.3g}"


BAR_WIDTH, BAR_HEIGHT = 8, 48
"""Pixels of a histogram's bars in the page."""

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Effects of the rules</title>
<style>
body {{ font: 14px sans-serif; margin: 2em; }}
td, th {{ padding: .3em .7em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }}
td:first-child, th:first-child {{ text-align: left; }}
.gone {{ fill: #c0392b; }} .kept {{ fill: #7f8c8d; }} .threshold {{ stroke: #000; stroke-width: 2; }}
</style>
<h1>Effects of the rules</h1>
<p>{headline}</p>
<p>{explanation}</p>
<table>
<tr>{heads}</tr>
{rows}
</table>
</html>
"""


def write_page(path: Path, effects: Effects) -> None:
    """The effects as a page that needs nothing else, with the histograms as drawings.

    Raises:
        DataError: the file cannot be written.
    """
    quantile_heads = [f"{share:.0%}" for share in QUANTILES]
    heads = ["rule", "keeps", "rejected", "alone", *quantile_heads, "histogram"]
    page = PAGE.format(
        explanation=html.escape(EXPLANATION),
        headline=html.escape(headline(effects)),
        heads="".join(f"<th>{head}</th>" for head in heads),
        rows="\n".join(_page_row(effect, effects.documents) for effect in effects.rules),
    )
    try:
        write_text(path, page)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error


def headline(effects: Effects) -> str:
    """The sample, and what all rules reject, in a line."""
    share = effects.rejected / effects.documents
    share_of_text = effects.rejected_bytes / max(effects.text_bytes, 1)
    unreadable = f", {effects.unreadable:,} records unreadable" if effects.unreadable else ""
    others = f", {effects.other_languages:,} documents in other languages" if effects.other_languages else ""
    if effects.other_licenses:
        others += f", {effects.other_licenses:,} documents under other licences"
    return (
        f"sample: {effects.documents:,} documents, {effects.text_bytes / 1e6:,.1f} MB{unreadable}{others}; "
        f"all rules together reject {share:.1%} of the documents, {share_of_text:.1%} of the text"
    )


def _page_row(effect: Effect, num_documents: int) -> str:
    cells = [
        html.escape(effect.reason),
        html.escape(f"{effect.keep} {compact(effect.threshold)}"),
        f"{effect.rejected / num_documents:.1%}",
        f"{effect.rejected_alone / num_documents:.1%}",
        *map(compact, effect.quantiles),
        _drawing(effect.histogram),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _drawing(histogram: Histogram) -> str:
    """The histogram as SVG; pointing at a bar shows its range and count."""
    most = max(int(histogram.counts.max()), 1)
    bars = []
    for i, count in enumerate(histogram.counts.tolist()):
        height = BAR_HEIGHT * count / most
        gone = (i < histogram.num_below) == histogram.rejects_below
        low, high = compact(histogram.edges[i]), compact(histogram.edges[i + 1])
        bars.append(
            f'<rect class="{"gone" if gone else "kept"}" x="{i * BAR_WIDTH}" y="{BAR_HEIGHT - height:.1f}" '
            f'width="{BAR_WIDTH - 1}" height="{height:.1f}"><title>{low} to {high}: {count:,}</title></rect>'
        )
    x = histogram.num_below * BAR_WIDTH - 0.5
    line = f'<line class="threshold" x1="{x}" y1="0" x2="{x}" y2="{BAR_HEIGHT}"/>'
    size = f'width="{NUM_BINS * BAR_WIDTH}" height="{BAR_HEIGHT}"'
    return f"<svg {size}>{''.join(bars)}{line}</svg>"
