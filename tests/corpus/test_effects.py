"""Effects of the rules on a sample: against rules applied one by one, histograms against comparisons, sampling, the
page and the command."""

from __future__ import annotations

import operator
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from megalite.cli.data import reports
from megalite.corpus.effects import (
    NUM_BINS,
    QUANTILES,
    Effects,
    compact,
    headline,
    make_histogram,
    measure_effects,
    with_rule_sets,
    write_page,
)
from megalite.corpus.privacy.settings import PrivacyConfig
from megalite.corpus.recipe import CleanConfig, LanguageConfig
from megalite.corpus.rules.apply import apply_rules
from megalite.corpus.rules.settings import C4Config, FineWebConfig, GopherQualityConfig, GopherRepetitionConfig
from megalite.corpus.stations.clean import clean
from megalite.errors import ConfigError, DataError, UserError
from megalite.texts import Texts
from tests.kit.data import corpus_of, prose, write_json_lines

COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def shares(text: str) -> tuple[int, float, float]:
    """Characters, share of letters and digits, share of repeated lines: counted by hand."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    repeated = (len(lines) - len(set(lines))) / max(len(lines), 1)
    return len(text), sum(char.isalnum() for char in text) / max(len(text), 1), repeated


def mixed_texts() -> list[str]:
    """Documents that break each basic rule alone, two at once, or none; one that only seems to repeat itself."""
    broken = ["short", "!" * 60, "?!", "\n".join(["the same line again"] * 9), "\n".join(["-- --"] * 30)]
    return [*prose(60, seed=3), *broken, "these two lines are alike\nthese two lines are alike"]


def test_basic_rules_against_counting_by_hand(tmp_path):
    """Rejected, rejected alone and quantiles; fewer than 5 lines never count as repeated."""
    texts = mixed_texts()
    config = CleanConfig(min_chars=50, max_chars=None, min_alphanumeric_share=0.4, max_repeated_line_share=0.3)
    found = measure_effects(corpus_of(write_json_lines(tmp_path / "a.jsonl", texts)), config)
    by_hand = np.array([shares(text) for text in texts])
    enough_lines = np.array([text.count("\n") >= 4 for text in texts])
    rejects = {
        "empty": np.zeros(len(texts), bool),
        "too short": by_hand[:, 0] < 50,
        "few letters and digits": by_hand[:, 1] < 0.4,
        "repeated lines": (by_hand[:, 2] > 0.3) & enough_lines,
    }
    assert [effect.reason for effect in found.rules] == list(rejects)
    num_rejecting = np.sum(list(rejects.values()), axis=0)
    assert num_rejecting.max() == 2
    for effect in found.rules:
        rejected = rejects[effect.reason]
        assert effect.rejected == rejected.sum()
        assert effect.rejected_alone == (rejected & (num_rejecting == 1)).sum()
    for effect, column in zip(found.rules[1:], by_hand.T, strict=True):
        assert effect.quantiles == pytest.approx(np.quantile(column, QUANTILES))
    assert (found.documents, found.rejected) == (len(texts), (num_rejecting > 0).sum())
    lengths = np.array([len(text.encode()) for text in texts])
    assert (found.text_bytes, found.rejected_bytes) == (lengths.sum(), lengths[num_rejecting > 0].sum())


def test_every_rule_rejects_what_it_would_reject_by_itself(tmp_path):
    """With all sets on, C4's edits included: each rule's documents as `apply_rules` finds them with that rule alone."""
    texts = [*prose(40, seed=4), *(text.replace("\n", ".\n") + "." for text in prose(40, seed=5)), "a {b} c d e. " * 9]
    sets = {
        "gopher_quality": GopherQualityConfig(min_words=30, min_mean_word_length=4.2),
        "gopher_repetition": GopherRepetitionConfig(),
        "fineweb": FineWebConfig(),
    }
    config = CleanConfig(min_chars=100, c4=C4Config(terminal_punctuation=False, min_sentences=3), **sets)
    found = measure_effects(corpus_of(write_json_lines(tmp_path / "a.jsonl", texts)), config)
    judgement = apply_rules(Texts.of(texts), config)
    seen = {effect.reason: effect for effect in found.rules}
    assert tuple(seen) == judgement.reason_names
    assert found.rejected == (~judgement.kept).sum()
    assert sum(effect.rejected > 0 for effect in found.rules) > 8
    assert seen["empty"].rejected == 0

    edited = Texts.of(list(judgement.texts))  # which the rules after C4's judge
    basic = ("min_chars", "max_chars", "min_alphanumeric_share", "max_repeated_line_share")
    off = dict.fromkeys(basic)
    lone = [CleanConfig(**{**off, name: getattr(config, name)}) for name in basic]
    for name, rules in sets.items():
        thresholds = [key for key in type(rules).model_fields if key.startswith(("min_", "max_"))]
        for key in thresholds:
            others = dict.fromkeys(set(thresholds) - {key})
            lone.append(CleanConfig(**off, **{name: rules.model_copy(update=others)}))
    for settings in lone:
        alone = apply_rules(edited, settings)
        empty, reason = alone.reason_names
        assert empty == "empty"
        assert seen[reason].rejected == (~alone.kept).sum(), reason


def test_all_rules_together_reject_what_the_station_rejects(tmp_path):
    """On a sample that is the whole corpus, repaired and redacted as the station does."""
    texts = [*mixed_texts(), *("write to  \n" + f"someone.{row}@company.org " * row for row in range(9))]
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", texts))
    rejected = []
    for privacy in (None, PrivacyConfig()):
        config = CleanConfig(privacy=privacy, max_chars=210, fineweb=FineWebConfig(min_terminal_line_share=None))
        found = measure_effects(corpus, config)
        counts = clean(corpus, tmp_path / "clean", config).manifest.counts
        assert (found.documents, found.rejected) == (counts["documents_in"], sum(counts["rejected"].values()))
        assert found.text_bytes - found.rejected_bytes == counts["text_bytes"] > 0
        rejected.append(found.rejected)
    assert rejected[0] != rejected[1]


@pytest.mark.parametrize("keep", COMPARE)
@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0, 50.0, 1e7])
def test_the_threshold_parts_the_histogram_exactly(keep, threshold):
    """Bins on one side hold the documents that stay, those on the other the rest, also for values on the threshold."""
    rng = np.random.default_rng(0)
    near = np.array([threshold, np.nextafter(threshold, np.inf), max(np.nextafter(threshold, -np.inf), 0.0)])
    for values in (
        rng.random(500),
        np.floor(rng.lognormal(6, 2, 500)),
        np.full(5, threshold),
        np.zeros(3),
        rng.choice(near, 200),
        np.concatenate([near, rng.random(1)]),
    ):
        histogram = make_histogram(values, keep, threshold)
        kept = COMPARE[keep](values, threshold).sum()
        below = histogram.counts[: histogram.num_below].sum()
        above = histogram.counts[histogram.num_below :].sum()
        assert (above if histogram.rejects_below else below) == kept
        assert (len(histogram.counts), histogram.counts.sum()) == (NUM_BINS, len(values))
        assert (np.diff(histogram.edges) >= 0).all()
        bars = "".join(histogram.bars)
        assert [bar == " " for bar in bars] == (histogram.counts == 0).tolist()
        assert bars[int(histogram.counts.argmax())] == "█"


def test_bins_inside_the_range_count_like_numpy():
    """Where nothing lies on a border or outside, a bin is what numpy says it is, on both scales."""
    for values in (np.random.default_rng(1).random(2000), np.random.default_rng(2).lognormal(5, 1, 2000)):
        histogram = make_histogram(values, ">=", float(np.median(values)))
        inner, _ = np.histogram(values, histogram.edges)
        assert (histogram.counts[1:-1] == inner[1:-1]).all()
        widths = np.diff(np.log1p(histogram.edges) if values.max() > 20 else histogram.edges)
        assert widths.max() < 1.3 * widths.min()


def numbered(folder: Path, num_files: int) -> Path:
    """Files of 100 documents of 80 bytes each, with the number of the file in them."""
    for number in range(num_files):
        texts = [f"{number:02d} {row:02d} ".ljust(80, "x") for row in range(100)]
        write_json_lines(folder / f"{number:02d}.jsonl", texts)
    return folder


def test_the_sample_is_spread_over_the_shards(tmp_path, monkeypatch):
    """Every chosen shard gives its share from its beginning, short ones leave theirs to others, and all is read if it
    fits."""
    from megalite.corpus.effects import _sample

    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 9_000)
    corpus = corpus_of(numbered(tmp_path / "many", 12))
    shards = corpus.shards()
    assert len(shards) == 12

    def read(max_bytes: float) -> list[str]:
        return [text for batch in _sample(shards, max_bytes) for text in batch.texts]

    assert len(read(1e9)) == len(set(read(1e9))) == 1200
    monkeypatch.setattr("megalite.corpus.effects.MIN_SHARD_BYTES", 800)
    texts = read(9_600)
    assert texts == read(9_600) == [f"{file:02d} {row:02d} ".ljust(80, "x") for file in range(12) for row in range(10)]
    assert {text[:2] for text in read(2_400)} == {"00", "04", "08"}
    write_json_lines(tmp_path / "many" / "00.jsonl", ["y" * 80])
    shards = corpus_of(tmp_path / "many").shards()
    assert abs(sum(map(len, read(9_600))) - 9_600) <= 80 * len(shards)


def test_measuring_twice_gives_the_same(tmp_path):
    """Nothing is left to chance."""
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", mixed_texts()))
    first, second = (measure_effects(corpus, CleanConfig(), max_mb=0.003) for _ in range(2))
    assert 0 < first.documents < len(mixed_texts())
    assert [effect.quantiles for effect in first.rules] == [effect.quantiles for effect in second.rules]


def test_rules_see_the_wanted_languages_only(tmp_path):
    """As in the station, where the language is looked at before the rules."""
    pytest.importorskip("py3langid", reason="py3langid is not installed: pip install 'megalite[data]'")
    german = "Der schnelle braune Fuchs springt über den faulen Hund und läuft dann in den dunklen Wald zurück. " * 9
    english = "The quick brown fox jumps over the lazy dog and then runs back into the dark forest again. " * 9
    path = write_json_lines(tmp_path / "a.jsonl", [german, english, german + "Noch einmal."])
    config = CleanConfig(language={"keep": ["en"]}, gopher_quality={})
    found = measure_effects(corpus_of(path), config)
    assert (found.documents, found.other_languages) == (1, 2)
    assert {effect.reason: effect.rejected for effect in found.rules}["gopher: few stop words"] == 0
    assert "2 documents in other languages" in headline(found)
    with pytest.raises(DataError, match="and 3 are in other languages"):
        measure_effects(corpus_of(path), config.model_copy(update={"language": LanguageConfig(keep=("fr",))}))


def test_unreadable_records_are_counted_and_left_out(tmp_path):
    """And a sample of nothing else is refused."""
    path = write_json_lines(tmp_path / "a.jsonl", prose(5))
    with open(path, "a") as file:
        file.write("broken\n[]\n")
    found = measure_effects(corpus_of(path), CleanConfig())
    assert (found.documents, found.unreadable) == (5, 2)
    with pytest.raises(DataError, match="no document to look at: 7 records in the sample could not be read"):
        measure_effects(corpus_of(path, text_field="txt"), CleanConfig())


def test_sets_of_rules_are_added_only_where_there_are_none():
    """So that there is something to see."""
    assert with_rule_sets(CleanConfig(min_chars=7)) == CleanConfig(
        min_chars=7,
        gopher_quality=GopherQualityConfig(),
        gopher_repetition=GopherRepetitionConfig(),
        fineweb=FineWebConfig(),
    )
    for config in (CleanConfig(c4=C4Config()), CleanConfig(fineweb=FineWebConfig(short_line_chars=5))):
        assert with_rule_sets(config) is config


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.1234, "0.123"),
        (57, "57"),
        (999.4, "999"),
        (999.9, "1k"),
        (1234, "1.23k"),
        (1e7, "10M"),
        (2e9, "2G"),
    ],
)
def test_numbers_are_short(value, text):
    """Three digits and a unit."""
    assert compact(value) == text


class Page(HTMLParser):
    """Counts the elements of a page and gathers its texts; open and closing tags must match."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def effects_of(folder: Path) -> Effects:
    """Of some mixed texts, all sets on."""
    corpus = corpus_of(write_json_lines(folder / "a.jsonl", mixed_texts()))
    return measure_effects(corpus, with_rule_sets(CleanConfig()))


def test_the_page_shows_every_rule_and_needs_nothing_else(tmp_path):
    """Well formed, a drawing for each rule whose bars hold all documents, no address of anything."""
    found = effects_of(tmp_path)
    path = tmp_path / "effects.html"
    write_page(path, found)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.seen.count("svg") == len(found.rules) == text.count('class="threshold"')
    assert page.seen.count("rect") == NUM_BINS * len(found.rules)
    assert all(effect.reason in page.texts for effect in found.rules)
    counts = [int(number.replace(",", "")) for number in re.findall(r"<title>\S+ to \S+: ([\d,]+)</title>", text)]
    assert (np.array(counts).reshape(-1, NUM_BINS).sum(axis=1) == found.documents).all()
    assert "http" not in text
    assert "<script" not in text
    with pytest.raises(DataError, match="cannot be written"):
        write_page(tmp_path / "nowhere" / "effects.html", found)


def run(*arguments: object):
    app = typer.Typer()
    app.command("inspect")(reports.inspect)
    app.command("effects")(reports.effects)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def test_the_command_prints_every_rule(tmp_path):
    """From files, from the folder of a station, or from a recipe with its own rules and sources."""
    path = write_json_lines(tmp_path / "a.jsonl", mixed_texts())
    page = tmp_path / "effects.html"
    result = run("effects", path, "--set", "gopher_quality={min_words: 33}", "--set", "min_chars=77", "--out", page)
    assert result.exit_code == 0, result.output
    assert f"sample: {len(mixed_texts())} documents" in result.output
    assert ">= 33" in result.output
    assert ">= 77" in result.output
    assert "fineweb" not in result.output
    assert page.exists()

    clean(corpus_of(path), tmp_path / "clean", CleanConfig())
    assert "fineweb: many short lines" in run("effects", tmp_path / "clean").output

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"out: {tmp_path}/out\nsources: [{{path: {path}}}]\nclean: {{min_chars: 77, fineweb: {{}}}}\n")
    result = run("effects", "--recipe", recipe, "--set", "max_chars=7777")
    assert result.exit_code == 0, result.output
    assert all(part in result.output for part in (">= 77", "<= 7.78k", "fineweb: many line ends"))
    assert "gopher" not in result.output


def test_slips_of_the_user_are_named(tmp_path):
    """Nothing to read, an unknown setting, a missing file."""
    path = write_json_lines(tmp_path / "a.jsonl", prose(3))
    result = run("effects")
    assert isinstance(result.exception, UserError)
    assert "--recipe" in str(result.exception)
    result = run("effects", path, "--set", "min_char=3")
    assert isinstance(result.exception, ConfigError)
    assert "min_chars" in str(result.exception)
    assert isinstance(run("effects", tmp_path / "nowhere").exception, DataError)
