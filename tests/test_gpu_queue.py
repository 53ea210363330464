"""What waits for a GPU can be started as docs/gpu-queue.md has it: a machine that is rented by the hour waits for no
correction of a command."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megalite.cli.config import ASSUMED_VOCAB_SIZE
from megalite.config.load import load_config
from megalite.config.plan import default_world_size, make_plan
from megalite.config.schema import Config
from megalite.corpus.prepare import load_recipe
from megalite.data.pack import pack
from megalite.data.run_config import load_run
from megalite.data.settings import PackConfig
from megalite.engine.native.buckets import BUCKET_NUMBERS
from megalite.errors import UserError
from megalite.planner.memory import memory_by_stage
from megalite.train import preflight
from tests.config.test_files import GPU_BYTES
from tests.kit.commands import blocks, commands, parsed, script_begins
from tests.kit.data import random_documents, write_tokens_folder
from tests.kit.paths import ROOT

HEAD, *PARTS = re.split(r"^## (?=On )", (ROOT / "docs" / "gpu-queue.md").read_text("utf-8"), flags=re.MULTILINE)

NUMBERS_OF_GPUS = {"On one GPU": 1, "On two GPUs": 2}

ITEMS = {
    item.partition(".")[0]: (NUMBERS_OF_GPUS[part.partition("\n")[0]], item)
    for part in PARTS
    for item in part.split("\n### ")[1:]
}
"""By number: the GPUs that there are, and the text."""

OF_THE_SYSTEM = {"cp", "git", "ln", "nvidia-smi", "sleep", "source", "zgrep"}

DEMO = "configs/data/demo.yaml"

MADE_BY_THE_DEMO = {"runs/demo/hf": "convert to-hf runs/demo runs/demo/hf", "data/demo/dedup": f"data prepare {DEMO}"}
"""What is read besides data to train on, and the line of the Makefile that makes it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's as `make demo` leaves it, with some other documents in place of the demo's."""
    made = tmp_path_factory.mktemp("project")
    for name in ("configs", "tools"):
        (made / name).symlink_to(ROOT / name)
    recipe = load_recipe(ROOT / DEMO)
    assert recipe.tokenizer is not None
    assert isinstance(recipe.pack, PackConfig)
    for part in ("train", "valid"):
        documents = random_documents(200)
        tokens = made / recipe.out / "tokens" / part
        write_tokens_folder(tokens, documents, vocab_size=recipe.tokenizer.vocab_size)
        pack(tokens, made / recipe.out / "packed" / part, recipe.pack)
    return made


@pytest.fixture
def in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room on the disk for what a run leaves."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(preflight, "check_disk", lambda *_: None)


def run_starts(words: Sequence[str]) -> Config:
    """Look at a run as `megalite train` does before its ranks start, but for the device.

    Raises:
        UserError: it would not.
    """
    name, given = parsed(words)
    assert name == "megalite train"
    config = load_run(given["config"], given["overrides"])
    world_size = default_world_size(config)
    plan, _, _ = preflight.preflight(config, world_size, has_device=False)
    assert max(stage.total for stage in memory_by_stage(config, plan)) < GPU_BYTES
    return config


def megalite_starts(words: Sequence[str], runs: list[Path]) -> Iterator[Config]:
    """Look at a command of `megalite`, and give what it trains; its run joins those before it."""
    name, given = parsed(words)
    if name == "megalite train":
        config = run_starts(words)
        assert config.run.dir.name not in {run.name for run in runs}, f"{config.run.dir} has a run already"
        runs.append(config.run.dir)
        yield config
    elif name == "megalite profile":
        assert given["run"] in runs, f"{given['run']} is no run of the page"
    elif name == "megalite plan calibrate":
        assert load_run(given["config"], given["overrides"] or ()).model.hidden_size
        given["out"].parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "configs" / "machines" / "h100-sxm.yaml", given["out"])
    else:
        assert name == "megalite embed", f"this test does not know {name}"
        for read in (given["model"], *given["documents"]):
            assert MADE_BY_THE_DEMO[str(read)] in (ROOT / "Makefile").read_text("utf-8")


def starts(words: Sequence[str], runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """Look at a command, and give what it trains."""
    match list(words):
        case ["megalite", *rest] | ["python", "-m", "megalite", *rest]:
            yield from megalite_starts(rest, runs)
        case ["python", "-c", text]:
            compile(text, "-c", "exec")
        case ["python", path, *arguments]:
            begun = script_begins(path, arguments, monkeypatch)
            if begun:
                yield run_starts(begun[begun.index("train") :])
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        case ["zgrep", *_, pattern]:
            assert any(fnmatch(str(run / "profile" / "steps.json.gz"), pattern) for run in runs)
        case [name, *_]:
            assert name in OF_THE_SYSTEM, f"this test does not know {name}"


def test_the_head_makes_the_data(tmp_path: Path):
    """`make demo` prepares what the stand-in is of."""
    assert ITEMS
    (block,) = blocks(HEAD)
    assert commands(block, tmp_path)[0][:2] == ["make", "demo"]
    rule = re.search(r"^demo:(.*?)\n\n", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert rule
    assert f"data prepare {DEMO}" in rule[1]


@pytest.mark.usefixtures("in_the_folder")
@pytest.mark.parametrize("number", ITEMS)
def test_an_item_starts(number: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Each of its commands: its words are known, its run is valid, fits, finds its data and has a folder to itself."""
    num_gpus, text = ITEMS[number]
    runs, trained = list[Path](), list[Config]()
    for block in blocks(text):
        for words in commands(block, folder):
            trained += starts(words, runs, monkeypatch)
    assert number == "4" or blocks(text)
    on_gpus = [config for config in trained if config.train.device == "cuda"]
    assert all(run.name.startswith(f"q{number}-") or run.name == f"q{number}" for run in runs)
    assert max((default_world_size(config) for config in on_gpus), default=num_gpus) == num_gpus


def test_what_asks_for_buckets_has_several(tmp_path: Path):
    """Of each rank's numbers, in bf16: reductions and records of one bucket show nothing."""
    for number in ("13", "17", "29"):
        for block in blocks(ITEMS[number][1]):
            for words in commands(block, tmp_path):
                if words[:2] == ["megalite", "train"]:
                    config = load_config(ROOT / words[2], words[3:])
                    plan = make_plan(config, default_world_size(config), ASSUMED_VOCAB_SIZE)
                    assert plan.num_parameters / plan.tp > BUCKET_NUMBERS, words
                    assert config.precision.dtype == "bf16", words


@pytest.mark.usefixtures("in_the_folder")
@pytest.mark.parametrize(
    "wrong",
    [
        "configs/llama-1b3.yaml train.steps=20",  # with train.tokens
        "configs/llama-1b3.yaml train.steps=20 train.tokens=null",  # less than its warmup
        "configs/llama-125m.yaml",  # of data that nothing makes
        "configs/debug.yaml batch.seq_len=512",  # of data that is packed otherwise
        "configs/debug.yaml model.vocab_size=512",
    ],
)
def test_what_would_not_start_is_found(wrong: str):
    with pytest.raises(UserError):
        run_starts(["train", *wrong.split()])
