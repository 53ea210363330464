"""A verb that writes a file never writes it over what it reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.cli.main import main
from megalite.cli.paths import not_an_input, not_an_input_but
from megalite.errors import EXIT_BAD_INPUT, UserError
from tests.kit.data import random_documents, write_packed_folder

SEQ_LEN = 32


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with something of each kind to read, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("def f\n")
    Path("run.yaml").write_text("model: {vocab_size: 64}\n")
    Path("recipe.yaml").write_text("sources: [{path: raw}]\n")
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text("{}\n")
    Path("run/config.yaml").write_text("model: {vocab_size: 64}\n")
    Path("raw").mkdir()
    Path("raw/page.html").write_text("<p>text</p>")
    np.save("scores.npy", np.arange(3.0))
    write_packed_folder(Path("packed"), random_documents(3), seq_len=SEQ_LEN)
    Path("link.yaml").symlink_to("run.yaml")
    return tmp_path


RANK = ("data", "rank", "packed", "--seq-len", str(SEQ_LEN), "--scores", "scores.npy", "--out")


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "hf", "--prompts", "prompts.txt", "--out", "prompts.txt"),
        ("schedule", "pipeline", "run.yaml", "--out", "run.yaml"),
        ("data", "show", "run.yaml", "--out", "link.yaml"),
        ("data", "effects", "raw", "--out", "raw/page.html"),
        ("data", "effects", "raw/page.html", "--out", "raw/../raw/page.html"),
        ("data", "effects", "--recipe", "recipe.yaml", "--out", "recipe.yaml"),
        ("report", "run", "--out", "run/metrics.jsonl"),
        ("eval", "run", "--needle", "--plot", "run/config.yaml"),
        ("eval", "run", "--needle", "--haystack", "prompts.txt", "--plot", "prompts.txt"),
        (*RANK, "scores.npy"),
        (*RANK, "packed/manifest.json"),
        (*RANK, "packed-tokens/tokens.bin"),
    ],
    ids=" ".join,
)
def test_it_is_refused(command: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture):
    """Before any work, and all is there as it was."""
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as ended:
        main(list(command))
    assert ended.value.code == EXIT_BAD_INPUT
    assert f"{command[-1]}: is read here, and would be written over" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


def test_what_may_be_written(here: Path):
    """A new file, also in a folder that is read; nothing at all; and what is beside an input."""
    not_an_input(None, here / "raw")
    not_an_input(here / "raw" / "new.html", here / "raw")
    not_an_input(here / "run.yaml", here / "raw", here / "absent")
    not_an_input_but(".html", here / "raw" / "page.html", here / "raw", None)
    with pytest.raises(UserError):
        not_an_input(here / "raw" / "page.html", here / "raw")
