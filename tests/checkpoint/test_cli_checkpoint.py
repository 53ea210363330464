"""`megalite checkpoint`: what users read, what scripts read, and the exit codes both rely on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megalite.checkpoint.reader import CheckpointReader
from megalite.cli.main import main
from tests.checkpoint.stored import SMALL, assert_holds, store, whole


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder with three differential checkpoints and two validations."""
    folder, base = tmp_path / "run", None
    tensors = {"weight/blocks.0.mlp.up.weight": torch.randn(40, 30), "weight/embedding.weight": torch.randn(60, 30)}
    tensors["weight/blocks.1.mlp.up.weight"] = torch.randn(40, 30)
    tensors["exp_avg/embedding.weight"] = torch.zeros(60, 30)
    for step in range(1, 4):
        layout = {"pp": 1, "dp": 2, "cp": 1, "tp": 2, "zero_stage": 1}
        base, _ = store(folder / "checkpoints", step, tensors, base=base, storage=SMALL, layout=layout)
        tensors = {name: t + 1 if "mlp" in name else t for name, t in tensors.items()}
    events = [{"event": "validation", "step": 1, "loss": 2.5}, {"event": "save", "step": 1}]
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(text + '{"event": "validation", "st')
    return folder


def megalite(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", *map(str, arguments)])
    output = capsys.readouterr()
    return int(caught.value.code or 0), output.out, output.err


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07d}"


def test_ls(run, capsys):
    """Every checkpoint with its step, writer, loss and health; sizes on disk count a shared file once."""
    (run / "checkpoints" / ".partial-step-0000004-a00001").mkdir()
    code, text, _ = megalite(capsys, "ls", run)
    assert code == 0
    assert all(f"step-000000{step}" in text for step in (1, 2, 3))
    assert "dp 2 x tp 2, zero 1" in text
    assert "2.5000" in text
    assert "unfinished save" in text
    code, text, _ = megalite(capsys, "ls", run, "--json", "--full")
    rows = json.loads(text)["checkpoints"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["validation_loss"] for row in rows] == [2.5, None, None]
    assert [row["health"] for row in rows] == ["sound"] * 3
    assert [row["storage"] for row in rows] == ["full", "full", "differential"]
    assert rows[0]["size_bytes"] == 4 * (2 * 1200 + 2 * 1800)
    inodes = {p.stat().st_ino: p.stat().st_size for p in (run / "checkpoints").rglob("*") if p.is_file()}
    assert sum(row["disk_bytes"] for row in rows) == sum(inodes.values())
    assert rows[2]["shared_bytes"] > 4 * 2 * 1800


@pytest.mark.parametrize("width", [50, 80, 120])
def test_ls_and_show_fit_the_terminal(run, capsys, monkeypatch, width):
    """Every name, date and figure in one piece at any width; at 50 columns they were `st…` and `va…`."""
    monkeypatch.setattr("megalite.cli.data.options.report_console", lambda: Console(width=width))
    _, text, _ = megalite(capsys, "ls", run)
    told = json.loads(megalite(capsys, "ls", run, "--json")[1])["checkpoints"]
    for row in told:
        assert f"step-{row['step']:07d}" in text
        assert f"{row['saved_at'][:10]} {row['saved_at'][11:16]}" in text
    assert text.count("dp 2 x tp 2, zero 1") == 3
    for word in ("saved (UTC)", "valid. loss", "on disk", "2.5000", "differential", "complete"):
        assert word in text
    shown = megalite(capsys, "show", run)[1]
    for each in (text, shown):
        assert "…" not in each
        assert max(len(line) for line in each.splitlines() if "on disk in all" not in line) <= width


def test_ls_of_one_and_of_none(run, capsys, tmp_path):
    """A checkpoint's own folder lists it; a folder without any is bad input."""
    code, text, _ = megalite(capsys, "ls", checkpoint(run, 2), "--json")
    assert [row["step"] for row in json.loads(text)["checkpoints"]] == [2]
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        code, _, error = megalite(capsys, "ls", folder)
        assert code == 2
        assert str(folder) in error
        assert "Traceback" not in error


def test_show(run, capsys):
    """The newest of a run: blocks that look alike in one row, shared files told as such, the whole manifest as JSON."""
    code, text, _ = megalite(capsys, "show", run)
    assert code == 0
    assert "step-0000003" in text
    assert "blocks.*.mlp.up.weight  0-1" in text
    assert "60 x 30" in text
    assert "shared, carried on 1 time" in text
    code, text, _ = megalite(capsys, "show", checkpoint(run, 1), "--json")
    manifest = json.loads(text)["manifest"]
    assert manifest["progress"]["step"] == 1
    assert manifest["tensors"].keys() >= {"weight/embedding.weight", "exp_avg/embedding.weight"}


def test_show_of_a_damaged_one(run, capsys):
    """A manifest that cannot be read is named, exit 1; one that is not there is bad input."""
    path = checkpoint(run, 3) / "manifest.json"
    path.write_text(path.read_text().replace("}", "]", 1))
    code, text, _ = megalite(capsys, "show", checkpoint(run, 3))
    assert code == 1
    assert f"{path}: damaged" in text
    path.unlink()
    code, _, error = megalite(capsys, "show", checkpoint(run, 3))
    assert code == 2
    assert str(checkpoint(run, 3)) in error


def test_verify(run, capsys):
    """Exit 0 when all is sound; one flipped bit in a shared file damages both that have it, by name, exit 1."""
    code, text, _ = megalite(capsys, "verify", run)
    assert (code, text.count("sound")) == (0, 3)
    shared = next(checkpoint(run, 3).glob("from-*"))
    data = bytearray(shared.read_bytes())
    data[len(data) // 2] ^= 1
    shared.write_bytes(data)
    code, text, _ = megalite(capsys, "verify", run)
    assert code == 1
    assert text.count(": damaged") == 2
    assert f"{shared}: its checksum differs" in text
    code, text, _ = megalite(capsys, "verify", checkpoint(run, 1), "--json")
    assert (code, json.loads(text)["checkpoints"][0]["problems"]) == (0, [])
    code, text, _ = megalite(capsys, "verify", run, "--json")
    assert (code, [bool(row["problems"]) for row in json.loads(text)["checkpoints"]]) == (1, [False, True, True])


def test_a_lost_manifest_is_damage(run, capsys):
    """A step's folder without a manifest was whole once: it is listed, verified and shown as damaged, not left out."""
    os.unlink(checkpoint(run, 3) / "manifest.json")
    code, text, _ = megalite(capsys, "verify", run)
    assert code == 1
    assert "manifest.json" in text
    code, text, _ = megalite(capsys, "ls", run)
    assert code == 0
    assert "damaged" in text
    code, text, _ = megalite(capsys, "ls", run, "--json")
    assert json.loads(text)["checkpoints"][2]["health"] == "damaged"


def test_merge_and_diff(run, capsys, tmp_path):
    """A merged checkpoint is the same state, exit 0; another step is not, exit 1, with the tensors that differ."""
    out = tmp_path / "merged"
    code, text, _ = megalite(capsys, "merge", run, out)
    assert code == 0
    assert "4 tensors" in text
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000002")
    code, text, _ = megalite(capsys, "diff", run, out)
    assert code == 0
    assert "4 of 4 tensors are equal bit for bit" in text
    code, text, _ = megalite(capsys, "diff", checkpoint(run, 1), out)
    assert code == 1
    assert "2 of 4 tensors are equal" in text
    assert "weight/blocks.0.mlp.up.weight" in text
    assert "progress: step" in text
    code, text, _ = megalite(capsys, "diff", checkpoint(run, 1), out, "--json")
    found = json.loads(text)
    assert (code, found["same_state"]) == (1, False)
    assert found["progress"]["step"] == [1, 3]
    assert sum(tensor["equal"] for tensor in found["tensors"]) == 2


def test_merge_options(run, capsys, tmp_path):
    """Weights only in bf16, as JSON; bf16 moments and a taken folder are bad input."""
    code, text, _ = megalite(capsys, "merge", run, tmp_path / "out", "--weights-only", "--bf16", "--json")
    assert code == 0
    assert json.loads(text)["num_bytes"] == 2 * (2 * 1200 + 1800)
    assert megalite(capsys, "merge", run, tmp_path / "other", "--bf16")[0] == 2
    assert megalite(capsys, "merge", run, tmp_path / "out")[0] == 2
    assert megalite(capsys, "merge", run, tmp_path / "out", "--overwrite", "--max-file-size", "9KB")[0] == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_merging_over_a_checkpoint_of_a_run(run, capsys):
    """A run's checkpoint can be replaced by its merged self, which then links to nothing."""
    folder = checkpoint(run, 3)
    reader = CheckpointReader(folder)
    want = {name: whole(reader, name).clone() for name in reader.manifest.tensors}
    assert megalite(capsys, "merge", folder, folder, "--overwrite")[0] == 0
    assert_holds(folder, want)
    assert not list(folder.glob("from-*"))
