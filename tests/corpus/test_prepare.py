"""A whole recipe: from raw files to samples, interrupted anywhere, repeated, changed, and misspelt."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.config.load import load_config
from megalite.config.schema import SourceConfig
from megalite.corpus.compile_ahead import LAST_OF_ALL, compile_kernels
from megalite.corpus.prepare import load_recipe, prepare
from megalite.corpus.recipe import DataRecipe
from megalite.data.samples import open_samples, open_validation_samples
from megalite.errors import ConfigError, DataError, UserError
from megalite.kernel_cache import is_compiled
from megalite.stations.runners import InProcess, LocalPool
from megalite.tokenizer.tokenizer import Tokenizer
from tests.kit.data import all_bytes, prose, write_json_lines

STATIONS = ["clean", "dedup", "tokenizer", "tokens/train", "packed/train", "tokens/valid", "packed/valid"]

REPOSITORY = Path(__file__).parents[2]


def recipe_for(folder: Path, **changes) -> DataRecipe:
    """A small recipe over two files, with duplicates and rejects in them."""
    if not (folder / "raw").exists():
        write_json_lines(folder / "raw" / "a.jsonl", [*prose(150), "short"])
        write_json_lines(folder / "raw" / "b.jsonl", [*prose(30), *prose(150, seed=1)])
    settings = {
        "out": folder / "out",
        "sources": [{"path": folder / "raw"}],
        "valid_fraction": 0.1,
        "tokenizer": {"vocab_size": 420},
        "pack": {"seq_len": 32},
    }
    return DataRecipe(**{**settings, **changes})


def reused(recipe: DataRecipe) -> list[str]:
    return [station.name for station in prepare(recipe) if station.result.reused]


def test_raw_text_to_samples(tmp_path):
    """All stations run, counts add up, and an epoch decodes to exactly the kept training documents."""
    recipe = recipe_for(tmp_path, pack={"seq_len": 32, "method": "concat"})
    done = {station.name: station.result.manifest.counts for station in prepare(recipe)}
    assert list(done) == STATIONS
    assert done["clean"]["documents_in"] == 331
    assert done["clean"]["rejected"] == {"too short": 1}
    assert done["dedup"]["documents_in"] - done["dedup"]["documents"] == 30
    assert done["tokens/train"]["documents"] + done["tokens/valid"]["documents"] == done["dedup"]["documents"] == 300

    opened = open_samples([SourceConfig(path=tmp_path / "out/packed/train")], seq_len=32, seed=1, document_masks=True)
    valid = open_validation_samples([SourceConfig(path=tmp_path / "out/packed/valid")], seq_len=32, document_masks=True)
    tokenizer = Tokenizer.load(opened.tokenizer_path)
    assert opened.vocab_size == valid.vocab_size == tokenizer.vocab_size == 420
    texts = {*decoded_documents(opened, tokenizer), *decoded_documents(valid, tokenizer)}
    assert texts == {*prose(150), *prose(150, seed=1)}


def test_kernels_compiled_ahead_are_those_that_stations_use(tmp_path):
    """After a recipe has run, compiling ahead for it adds no kernel for other types: it compiles nothing in vain."""
    recipe = recipe_for(tmp_path, pack={"seq_len": 32, "method": "best_fit"})
    prepare(recipe)
    kernels = {id(each): each for name in ("apply", "statistics", "scan") for each in _kernels(f"corpus.rules.{name}")}
    kernels |= {id(each): each for name in ("word_cache", "bpe") for each in _kernels(f"tokenizer.encoders.{name}")}
    kernels |= {id(each): each for each in _kernels("data.best_fit")}
    before = {number: set(each.overloads) for number, each in kernels.items()}
    compile_kernels(recipe)
    assert {number: set(each.overloads) for number, each in kernels.items()} == before
    for path, name in LAST_OF_ALL.items():
        assert is_compiled(path, name), (path, name)


def _kernels(module: str) -> list[Dispatcher]:
    found = vars(importlib.import_module(f"megalite.{module}")).values()
    return [each for each in found if isinstance(each, Dispatcher)]


def decoded_documents(samples, tokenizer: Tokenizer) -> list[str]:
    """Documents put together again from the samples of an epoch, in the order of their samples on disk."""
    places = sorted((samples.identity(index).position, index) for index in range(samples.num_samples_per_epoch))
    tokens: dict[int, list[int]] = {}
    for _, index in places:
        sample = samples.sample(index)
        for token, document in zip(sample.tokens.tolist(), sample.document_ids.tolist(), strict=True):
            tokens.setdefault(document, []).append(token)
    tokens.pop(-1, None)
    assert all(ids[-1] == tokenizer.eos_id for ids in tokens.values())
    return [tokenizer.decode(ids) for ids in tokens.values()]


def test_a_second_run_does_nothing(tmp_path):
    """Every station is kept and no byte changes."""
    recipe = recipe_for(tmp_path)
    assert reused(recipe) == []
    before = all_bytes(tmp_path / "out")
    assert reused(recipe) == STATIONS
    assert all_bytes(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"pack": {"seq_len": 64}}, ["clean", "dedup", "tokenizer", "tokens/train", "tokens/valid"]),
        ({"tokenizer": {"vocab_size": 430}}, ["clean", "dedup"]),
        ({"valid_fraction": 0.2}, ["clean", "dedup"]),
    ],
)
def test_a_changed_setting_redoes_what_follows_it(tmp_path, change, kept):
    """And nothing before it."""
    prepare(recipe_for(tmp_path))
    assert reused(recipe_for(tmp_path, **change)) == kept


def test_changed_raw_files_redo_what_they_change(tmp_path):
    """A file more redoes everything; one that only looks changed is read again, and nothing behind cleaning is."""
    recipe = recipe_for(tmp_path)
    prepare(recipe)
    write_json_lines(tmp_path / "raw" / "c.jsonl", prose(5, seed=2))
    assert reused(recipe) == []
    (tmp_path / "raw" / "a.jsonl").touch()
    assert reused(recipe) == STATIONS[1:]


def station_bytes(folder: Path) -> dict[str, bytes]:
    """Contents of all files but the data card, whose title is the folder's name."""
    return {name: content for name, content in all_bytes(folder).items() if not name.startswith("card.")}


def test_workers_change_no_byte(tmp_path):
    """The whole folder is the same from one process and from two."""
    for num_workers in (1, 2):
        with LocalPool(num_workers) as runner:
            prepare(recipe_for(tmp_path, out=tmp_path / f"out{num_workers}"), runner=runner)
    assert station_bytes(tmp_path / "out1") == station_bytes(tmp_path / "out2")


def test_kill_9_anywhere_and_a_restart_give_the_same_bytes(tmp_path):
    """The process is killed three times, each time somewhat later, then left to finish."""
    recipe = recipe_for(tmp_path)
    prepare(recipe.model_copy(update={"out": tmp_path / "undisturbed"}))
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    script = (
        "import sys; from pathlib import Path; from megalite.corpus.prepare import prepare;"
        "from megalite.corpus.recipe import DataRecipe;"
        "print('go', flush=True); prepare(DataRecipe.model_validate_json(Path(sys.argv[1]).read_text()))"
    )
    for seconds in (0.02, 0.1, 0.3):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "recipe.json")],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        assert process.stdout.readline() == b"go\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    prepare(recipe)
    assert station_bytes(tmp_path / "out") == station_bytes(tmp_path / "undisturbed")


def test_an_existing_tokenizer_is_used(tmp_path, tokenizer_folder):
    """`tokenizer.path` leaves the training out."""
    done = prepare(recipe_for(tmp_path, tokenizer={"path": tokenizer_folder}, valid_fraction=0.0))
    assert [station.name for station in done] == ["clean", "dedup", "tokens/train", "packed/train"]
    samples = open_samples([SourceConfig(path=tmp_path / "out/packed/train")], seq_len=32, seed=1, document_masks=True)
    assert samples.tokenizer_path.resolve() == tokenizer_folder.resolve()


def test_a_damaged_station_in_between_is_found(tmp_path):
    """One byte of the cleaned text changes on disk: the next run says so instead of building on it."""
    recipe = recipe_for(tmp_path)
    prepare(recipe)
    path = tmp_path / "out/clean/part-00000.parquet"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"part-00000\.parquet: its contents have changed"):
        prepare(recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clean": {"min_chars": 10_000}}, "clean: no document came out of this station; its rejected/ folder"),
        ({"valid_fraction": 1e-9}, "tokens/valid: no document came out .* valid_fraction=1e-09 leaves nothing"),
    ],
)
def test_a_station_that_leaves_nothing_stops_the_recipe(tmp_path, changes, message):
    """With what to change."""
    with pytest.raises(DataError, match=message):
        prepare(recipe_for(tmp_path, **changes))


def test_files_of_later_stations_are_missed_at_once(tmp_path):
    """Before the first station has begun."""
    recipe = recipe_for(
        tmp_path,
        tokenizer={"path": tmp_path / "no-tokenizer"},
        decontaminate={"paths": [tmp_path / "no-exam.jsonl"]},
        near_dedup={"older": [tmp_path / "no-index"]},
        perplexity={"train_on": [tmp_path / "no-sample"], "keep_fraction": 0.5},
        classifier={"good": [tmp_path / "no-good"], "bad": [tmp_path / "no-bad"], "min_score": 0.5},
    )
    with pytest.raises(DataError) as error:
        prepare(recipe)
    lines = str(error.value).splitlines()
    assert len(lines) == 6
    assert all(line.endswith(": no such file or folder") for line in lines)
    assert not (tmp_path / "out").exists()


def test_all_mistakes_of_a_recipe_at_once(tmp_path):
    """Each with file and line."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "out: data\nsources:\n  - kind: files\n  - kind: python\n    path: here\nclaen: {}\n"
        "tokenizer:\n  vocab_size: -5\n  kind: sentencepice-bpe\npack:\n  seq_length: 5\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    problems = "\n".join(caught.value.problems)
    for part in (
        f"{path}:3: sources.0: ",
        "path is missing; name a file or folder",
        f"{path}:4: sources.1: ",
        f"{path}:6: claen: unknown key (did you mean 'clean'?)",
        f"{path}:8: tokenizer.vocab_size: found -5",
        f"{path}:9: tokenizer.kind: found \"sentencepice-bpe\" (did you mean 'sentencepiece-bpe'?)",
        f"{path}:11: pack.seq_length: unknown key (did you mean 'seq_len'?)",
    ):
        assert part in problems


def test_a_training_config_is_no_recipe_and_the_other_way_round():
    """Said as such, for every one that there is, and not as a list of unknown keys."""
    for path in sorted((REPOSITORY / "configs").glob("*.yaml")):
        with pytest.raises(ConfigError, match=r"this is a training config .* give it to `megalite train`"):
            load_recipe(path)
    for path in sorted((REPOSITORY / "configs" / "data").glob("*.yaml")):
        with pytest.raises(ConfigError, match=r"this is a recipe for data .*`megalite data prepare` reads it"):
            load_config(path)


def test_a_station_that_keeps_nothing_says_so(tmp_path):
    """By itself, too: exit code 2, the second time as well; its rejects are there to be looked at."""
    write_json_lines(tmp_path / "raw.jsonl", ["short"] * 5)
    for _ in range(2):
        command = ["data", "clean", str(tmp_path / "raw.jsonl"), "--out", str(tmp_path / "out"), "--min-chars", "1000"]
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, DataError)
        assert "out: no document came out of this station" in str(done.exception)
        assert "out: nothing is left: " in done.stdout
        assert list((tmp_path / "out" / "rejected").iterdir())


def test_a_recipe_needs_a_source(tmp_path):
    """And says which key is missing."""
    path = tmp_path / "recipe.yaml"
    path.write_text("out: data\n")
    with pytest.raises(ConfigError, match="sources: missing; expected a list of at least 1 value"):
        load_recipe(path)


def test_the_recipes_of_the_project_are_valid():
    """Every file in configs/data."""
    paths = sorted((REPOSITORY / "configs" / "data").glob("*.yaml"))
    assert paths
    for path in paths:
        assert load_recipe(path).sources


def test_two_at_a_time_on_one_folder(tmp_path):
    """The second is refused before it begins, whatever runs the tasks; a reader's look at what is done is not."""
    recipe = recipe_for(tmp_path)
    refused = []

    class Meanwhile(InProcess):
        def run(self, folder, phase, numbers):
            before = all_bytes(tmp_path / "out")
            with pytest.raises(
                UserError, match=r"out: process \d+ on .* is at work here; let it end, or stop it first"
            ):
                prepare(recipe_for(tmp_path, pack={"seq_len": 64}))
            assert all_bytes(tmp_path / "out").keys() == before.keys()
            refused.append(phase)
            return super().run(folder, phase, numbers)

    prepare(recipe, runner=Meanwhile())
    assert len(refused) >= 4
    assert reused(recipe) == STATIONS
    assert not list((tmp_path / "out").rglob("*.lock"))
