"""Pages that show code show what there is, and the example of the library runs."""

from __future__ import annotations

import re
import runpy
import subprocess

import pytest
import yaml

from megalite.config.load import load_config
from megalite.config.plan import default_world_size
from megalite.config.validate import validate
from tests.kit.commands import parsed, shown_commands
from tests.kit.docs import pages
from tests.kit.paths import ROOT
from tests.kit.runs import metrics, write_run

TRAINING = ("megalite train", "megalite lr-find", "megalite verify-resume")


@pytest.mark.parametrize("name", ["api.md", "extending.md", "library.md"])
def test_pages_are_up_to_date(name):
    """`python -m tests.kit.docs` would change nothing."""
    path = ROOT / "docs" / name
    assert path.read_text() == pages()[path], "run: python -m tests.kit.docs"


def test_pages_name_files_that_are_there():
    """But for the log, which tells of what was."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    ends = {"/".join(path.split("/")[-n:]) for path in tracked.stdout.split() for n in range(1, 7)}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        named = set(re.findall(r"`([a-z_0-9/]+\.py)", page.read_text("utf-8")))
        assert page.name == "log.md" or named <= ends, (page.name, named - ends)


def test_pages_show_commands_that_start(monkeypatch):
    """Those that name a config of ours have words that `megalite` knows, and runs among them are valid; but for the
    log, and what waits for a GPU, which has a test of its own."""
    monkeypatch.chdir(ROOT)
    trained = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for words in shown_commands(page.read_text("utf-8")) if page.name not in ("log.md", "gpu-queue.md") else ():
            name, given = parsed(words)
            if name in TRAINING:
                config = load_config(given["config"], given["overrides"] or ())
                validate(config, default_world_size(config))
                trained += 1
    assert trained > 10


def test_the_example_of_the_library(tmp_path, capsys):
    """Its loop, in one process and in plain PyTorch, begins with the loss of the run on two ranks."""
    config = write_run(tmp_path, model={"vocab_size": 1000}, monitor={"tensorboard": False})
    assert yaml.safe_load(config.read_text())["parallel"]["tp"] == 2
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "library.py"))
    example["main"](str(config), str(tmp_path / "out"), "none")
    said = capsys.readouterr().out
    losses = [float(line.rpartition(" ")[2]) for line in said.splitlines() if line.startswith("in this process")]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(metrics(tmp_path / "out" / "run")[0]["loss"], abs=1e-4)
    assert f"LlamaForCausalLM in {tmp_path}/out/hf" in said
