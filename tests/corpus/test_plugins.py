"""Filter rules and sources that plug-ins bring: what comes out, where it runs, and what goes wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from megalite.corpus.effects import measure_effects
from megalite.corpus.prepare import FinishedStation, load_recipe, prepare
from megalite.corpus.reading.brought import LATER_READ, READ, brought_fingerprint
from megalite.corpus.recipe import CleanConfig
from megalite.corpus.rules.settings import FILTER_RULES
from megalite.corpus.source import DATASET_SETTINGS, UNREAD_BY_PLUGINS, DocumentSource
from megalite.errors import ConfigError, DataError
from megalite.stations.runners import LocalPool
from tests.kit.data import corpus_of, write_json_lines
from tests.kit.plugins import loaded, sample

HEAD = "from megalite import extend\n"

QUIET, LOUD = (
    "the quick brown fox jumps over the lazy dog and sleeps",
    "THE QUICK BROWN FOX JUMPS over the lazy dog again, and again",
)


@pytest.fixture(autouse=True)
def _forgotten():
    with loaded():
        yield


def share_of_capitals(text: str) -> float:
    """What the sample rule counts, spelled out again."""
    letters = "".join(filter(str.isalpha, text))
    return len([each for each in letters if each == each.upper()]) / len(letters)


def write_recipe(folder: Path, **sections) -> Path:
    recipe = {
        "plugins": [sample("filter_rules"), sample("data_sources")],
        "out": str(folder / "out"),
        "sources": [{"kind": "sums", "name": "sums", "options": {"documents": 60, "seed": 3}}],
        "valid_fraction": 0.1,
        "pack": {"seq_len": 64},
        "tokenizer": {"kind": "byte-bpe", "vocab_size": 260},
        **sections,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def kept(folder: Path) -> list[dict]:
    return [row for path in sorted(folder.glob("part-*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_a_whole_recipe(tmp_path):
    """Documents of a source that a plug-in makes, in its own shards, and a rule of a plug-in; in this process and in
    others, which load the plug-ins by themselves: the same documents, none of them wrong."""
    raw = write_json_lines(tmp_path / "raw.jsonl", [QUIET, LOUD] * 4)
    sources = [{"kind": "sums", "options": {"documents": 60}}, {"path": str(raw)}]
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
        clean = {"custom": {"capitals": {"max": 0.3}}, "min_alphanumeric_share": 0.0, "max_digit_share": None}
        recipe = load_recipe(write_recipe(tmp_path / name, sources=sources, clean=clean))
        prepare(recipe, runner=LocalPool(2) if name == "many" else None)
    documents = kept(tmp_path / "one" / "out" / "clean")
    assert documents == kept(tmp_path / "many" / "out" / "clean")
    sums = [row for row in documents if row["source"] == "sums"]
    assert sorted(row["id"] for row in sums) == sorted(f"sums-{number}" for number in range(60))
    assert all(eval(a) == int(b) for row in sums for a, b in (line.split("=") for line in row["text"].splitlines()))
    assert [row["text"] for row in documents if row["source"] != "sums"] == [QUIET] * 4
    manifest = json.loads((tmp_path / "one" / "out" / "clean" / "manifest.json").read_text())
    assert manifest["counts"]["rejected"] == {"capitals too high": 4}


def test_thresholds_and_effects(tmp_path):
    """Both bounds, an option, and the histogram of `megalite data effects`, against a count by hand."""
    with loaded(sample("filter_rules")):
        texts = [QUIET, LOUD, "A B", "AN ODD ONE that is not all that long, but LONG ENOUGH"] * 5
        config = CleanConfig(min_chars=1, custom={"capitals": {"min": 0.1, "max": 0.5, "options": {"min_letters": 1}}})
        effects = measure_effects(corpus_of(write_json_lines(tmp_path / "a.jsonl", texts)), config)
        by_reason = {rule.reason: rule for rule in effects.rules}
        shares = [share_of_capitals(text) for text in texts]
        assert by_reason["capitals too low"].rejected == sum(share < 0.1 for share in shares) > 0
        assert by_reason["capitals too high"].rejected == sum(share > 0.5 for share in shares) > 0
        assert by_reason["capitals too low"].quantiles[0] == min(shares)


def test_done_again_when_the_plugin_changes(tmp_path):
    """Another file of a rule, or of a source, is another recipe; the same one is not done twice."""

    def stations() -> dict[str, FinishedStation]:
        with loaded():
            return {each.name: each for each in prepare(load_recipe(recipe))}

    rule, source = tmp_path / "rule.py", tmp_path / "source.py"
    rule.write_text(HEAD + "extend.filter_rule('length')(len)\n@extend.filter_rule('mine')\ndef f(text): return 1.0\n")
    source.write_text(
        HEAD + "@extend.data_source('one')\ndef one(shard, num_shards):\n    yield 'words, many, ' * 40\n"
    )
    clean = {"custom": {"mine": {"max": 2.0}}}
    recipe = write_recipe(
        tmp_path, plugins=[str(rule), str(source)], sources=[{"kind": "one"}], clean=clean, valid_fraction=0.0
    )
    assert not stations()["clean"].result.reused
    assert stations()["clean"].result.reused
    rule.write_text(rule.read_text().replace("1.0", "1.5"))
    assert not stations()["clean"].result.reused
    source.write_text(source.read_text().replace("* 40", "* 50"))
    assert not stations()["clean"].result.reused


def test_other_settings_of_a_source_are_other_documents():
    """Whatever it reads of them: fields that hold the text and the name are told from others."""
    with loaded(sample("data_sources")):
        settings = {"text_field": "body", "id_field": "key", "keep_fields": ("url",), "name": "mine", "max_mb": 1.0}
        changes = ({}, {"options": {"seed": 1}}, *({name: value} for name, value in settings.items()))
        found = [brought_fingerprint(DocumentSource(kind="sums", **each)) for each in changes]
        assert len(set(found)) == len(found)


def test_every_setting_of_a_source_is_read_or_refused():
    """By a plug-in's source, but for those that describe it to people."""
    refused = {"path", *DATASET_SETTINGS, *UNREAD_BY_PLUGINS}
    assert {*DocumentSource.model_fields} == READ | {*LATER_READ} | refused | {"description", "license", "url"}


@pytest.mark.parametrize(
    "code",
    [
        "extend.filter_rule('mine')(len)",
        "extend.filter_rule('mine')(functools.lru_cache(lambda text: len(text)))",
        "extend.filter_rule('mine')(functools.partial(wrapped, 1))",
        "extend.filter_rule('mine')(type('Rule', (), {'__call__': lambda self, text: 1.0})())",
        "extend.filter_rule('mine')(wrapped(len))",
        "extend.filter_rule('mine')(wrapped(lambda text: 2.0))",
    ],
)
def test_code_of_any_kind_is_known_by_its_files(tmp_path, code):
    """Also what is built in, cached, bound or wrapped: by the plug-in's file, and by those of its wrappers."""
    (tmp_path / "wrapper.py").write_text(
        "import functools\ndef wrapped(first, second=None):\n    return functools.wraps(first)(lambda text: 1.0) "
        "if second is None else 2.0\n"
    )
    path = tmp_path / "mine.py"

    def found() -> bytes:
        with loaded(str(path)):
            return FILTER_RULES.code("mine", FILTER_RULES["mine"].call)

    path.write_text(f"import functools\n{HEAD}from wrapper import wrapped\n{code}\n")
    first = found()
    assert first.startswith(path.read_bytes())
    assert ((tmp_path / "wrapper.py").read_bytes() in first) == ("wrapped" in code)
    path.write_text(path.read_text() + "# another\n")
    assert found() != first


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        (
            {"clean": {"custom": {"capital": {"max": 1}}}},
            "clean.custom.capital: found",
        ),
        ({"clean": {"custom": {"capitals": {}}}}, "clean.custom.capitals: neither min nor max; give one, or both"),
        (
            {"clean": {"custom": {"capitals": {"min": 3, "max": 1}}}},
            "clean.custom.capitals.min: found 3 above max=1, which no document passes; exchange them",
        ),
        ({"clean": {"custom": {"capitals": {"max": "x"}}}}, 'clean.custom.capitals.max: found "x", expected a number'),
        (
            {"clean": {"custom": {"capitals": {"max": 1, "options": {"letters": 3}}}}},
            "clean.custom.capitals.options.letters: unknown key (did you mean 'min_letters'?)",
        ),
        ({"sources": [{"kind": "sum"}]}, "sources.0.kind: found \"sum\" (did you mean 'sums'?)"),
        ({"sources": [{"kind": "sums", "options": {"documents": 2.5}}]}, "sources.0.options.documents: found 2.5"),
        ({"sources": [{"kind": "sums", "path": "x"}]}, "path must be left out with kind: sums"),
        (
            {"sources": [{"kind": "sums", "include": ["*.py"]}]},
            "sources.0.include: found ('*.py',), which kind: sums does not read; leave it out",
        ),
        ({"sources": [{"kind": "sums", "max_record_mb": 1}]}, "sources.0.max_record_mb: found 1.0, which kind: sums"),
        ({"sources": [{"kind": "sums", "max_expansion": 9}]}, "sources.0.max_expansion: found 9.0, which kind: sums"),
        ({"sources": [{"kind": "python", "text_field": "x"}]}, "sources.0.text_field: found 'x', which kind: python"),
        (
            {"sources": [{"kind": "datasets", "dataset": "a", "max_expansion": 9}]},
            "sources.0.max_expansion: found 9.0, which kind: datasets does not read",
        ),
        ({"sources": [{"kind": "python", "options": {"x": 1}}]}, "sources.0.options: found x, but kind: python is no"),
    ],
)
def test_bad_input(tmp_path, sections, complaint):
    """It is found when the recipe is read, with its line."""
    with pytest.raises(ConfigError) as error:
        load_recipe(write_recipe(tmp_path, **sections))
    assert any(complaint in each and each.startswith(f"{tmp_path}/recipe.yaml:") for each in error.value.problems)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("extend.filter_rule('odd')(lambda text: 1 / 0)", "rule failed at a text that begins 'a good"),
        ("extend.filter_rule('odd')(lambda text: 'much')", "ValueError: could not convert string to float"),
        ("extend.filter_rule('odd')(lambda text: float('nan'))", "rule gives NaN for 'a good"),
        (
            "extend.data_source('odd')(lambda shard, num_shards: [3])",
            "source odd: found 3 at odd-00000:1, expected",
        ),
        ("extend.data_source('odd')(lambda shard, num_shards: 1 / 0)", "source odd: shard 0 failed: ZeroDivisionError"),
        ("extend.data_source('odd')(lambda shard, num_shards: [{'x': 'y'}])", "no document could be read"),
        (
            "extend.data_source('odd')(lambda shard, num_shards: {'text': 'a good one'})",
            "source odd: it returned {'text': 'a good one'}, expected documents one by one; use `yield`",
        ),
        ("extend.data_source('odd')(lambda shard, num_shards: 'a good one')", "it returned 'a good one', expected"),
        ("extend.data_source('odd')(lambda shard, num_shards: None)", "it returned None, expected documents"),
        ("extend.data_source('odd')(lambda shard, num_shards: [])", "plugin://odd: empty"),
    ],
)
def test_failing_plugins(tmp_path, code, complaint):
    """They are named, and nothing is left."""
    path = tmp_path / "odd.py"
    path.write_text(HEAD + code)
    raw = write_json_lines(tmp_path / "raw.jsonl", ["a good and long enough text " * 9])
    is_source = "data_source" in code
    recipe = write_recipe(
        tmp_path,
        plugins=[str(path)],
        sources=[{"kind": "odd"} if is_source else {"path": str(raw)}],
        clean={} if is_source else {"custom": {"odd": {"max": 1.0}}},
    )
    with pytest.raises(DataError) as error:
        prepare(load_recipe(recipe))
    assert complaint in str(error.value)
    assert not (tmp_path / "out" / "clean").exists()
