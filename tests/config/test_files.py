"""The ready configs, and `megalite config` on them."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalite.cli.config import app
from megalite.config.load import load_config
from megalite.config.plan import default_world_size, make_plan
from megalite.config.presets import PRESETS
from megalite.config.validate import validate
from megalite.errors import EXIT_BAD_INPUT, ConfigError
from megalite.planner.memory import memory_by_stage

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.yaml"))

MAX_CHECK_SECONDS = 2.0
"""What `config check` may take on a laptop; importing torch alone takes as long."""

GPU_BYTES = 75 * 2**30
"""Of an 80 GB GPU, what the CUDA context and NCCL leave."""


def world_size_of(path: Path) -> int:
    """The world size in a config's first line, `# world size: 512`."""
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    match = re.fullmatch(r"# world size: (\d+)", first_line)
    assert match, f"{path.name} must begin with `# world size: N`"
    return int(match[1])


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "100"})
    assert result.exit_code == 0
    return result.output


def megalite(*arguments: str, python_options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Run the real command from the project's folder."""
    command = [sys.executable, *python_options, "-m", "megalite", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
class TestReadyConfigs:
    def test_valid(self, path: Path):
        """Each file runs on the world size that it names."""
        validate(load_config(path), world_size_of(path))

    def test_fits_a_gpu(self, path: Path):
        config = load_config(path)
        stages = memory_by_stage(config, make_plan(config, world_size_of(path), 128256))
        assert max(stage.total for stage in stages) < GPU_BYTES


class TestCheck:
    def test_report(self):
        """Parameters of a rank to the unit, memory of each stage, and the schedule of the pipeline."""
        arguments = ("--world-size", "512", "--vocab-size", "128256")
        output = " ".join(run("check", str(ROOT / "configs/llama-70b.yaml"), *arguments).split())
        for expected in (
            "llama-70b.yaml on 512 ranks: valid",
            "512 = pp 4 x dp 16 x cp 1 x tp 8",
            "70,553,706,496",
            "64 query, 8 key and value, 128 wide",
            "128,256, padded to 128,512",
            "8,388,608 tokens, 64 micro-batches a rank",
            "3 60-79 2,271,027,200",
            "GiB of tensors on each rank",
            "1f1b, 1 chunk of layers on each stage; stages wait",
        ):
            assert expected in output
        assert "note:" not in output

    def test_deepspeeds_json(self):
        """Shown where DeepSpeed is the engine, and nowhere else."""
        arguments = ("check", str(ROOT / "configs/debug.yaml"), "batch.global_batch_size=12")
        assert "DeepSpeed's JSON" not in run(*arguments)
        output = " ".join(run(*arguments, "parallel.engine=deepspeed").split())
        assert '"gradient_accumulation_steps": 3' in output

    def test_chunks_of_each_stage(self):
        """A V: the first stage has the first blocks and the last."""
        layout = (
            "model.num_layers=4",
            "parallel.pp=2",
            "parallel.schedule=zb-v",
            "parallel.blocks_per_chunk=[2,1,1,0]",
        )
        output = " ".join(run("check", str(ROOT / "configs/debug.yaml"), *layout).split())
        assert "zb-v, 2 chunks of layers on each stage; stages wait" in output
        assert "0 0-1 none" in output
        assert "1 2-2 3-3" in output

    def test_note_on_an_open_vocabulary(self):
        """Without a tokenizer a size is assumed, and said."""
        output = run("check", str(ROOT / "configs/debug.yaml"))
        assert "model.vocab_size is left to the tokenizer; 32000 assumed here" in " ".join(output.split())
        assert "MiB of tensors on each rank" in output

    def test_json(self):
        """One object that a program can read."""
        found = json.loads(run("check", str(ROOT / "configs/debug.yaml"), "--json", "--vocab-size", "500"))
        keys = {
            "plan",
            "memory",
            "engine",
            "deepspeed",
            "notes",
            "optimizer_bytes_per_parameter",
            "export",
            "sent",
            "lengths",
        }
        assert set(found) == keys
        assert found["optimizer_bytes_per_parameter"] == 8  # AdamW's two moments
        assert found["plan"]["model"]["vocab_size"] == 500
        assert found["memory"][0]["num_parameters"] == found["plan"]["num_parameters"] + 2 * 12 * 64  # 512 rows
        assert (found["engine"], found["deepspeed"]) == ("native", None)
        assert found["notes"] == []
        assert found["export"] == {"architecture": "LlamaForCausalLM", "why_not": "", "condition": ""}
        assert found["sent"] == [
            {"stage": 0, "tp": 0, "cp": 0, "pp": 0, "ep": 0, "dp": 0}
        ]  # one rank has nobody to send to

    def test_overrides_and_default_world_size(self):
        found = json.loads(run("check", str(ROOT / "configs/debug.yaml"), "parallel.tp=2", "train.steps=7", "--json"))
        assert (found["plan"]["world_size"], found["plan"]["total_steps"]) == (2, 7)

    def test_errors(self):
        """Conflicts are raised for `main` to print; nothing is shown of an invalid plan."""
        with pytest.raises(ConfigError, match=r"parallel\.zero_stage: found 3 with pp=4"):
            run("check", str(ROOT / "configs/llama-70b.yaml"), "parallel.zero_stage=3", "--world-size", "512")

    def test_takes_no_torch_and_no_time(self):
        """The command checks 70B on 512 ranks within two seconds, interpreter included, and never imports torch."""
        check = ("config", "check", "configs/llama-70b.yaml", "--world-size", "512")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = megalite(*check)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert result.returncode == 0, result.stderr
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert seconds < MAX_CHECK_SECONDS  # of a core: other tests may hold them all
        imports = megalite(*check, python_options=("-X", "importtime")).stderr
        imported = {line.rpartition("|")[2].strip() for line in imports.splitlines() if line.startswith("import time:")}
        assert "pydantic" in imported
        assert not {"torch", "numpy", "deepspeed", "transformers"} & imported

    def test_exit_code(self, tmp_path: Path):
        """Bad input ends with code 2, the message on stderr, and no traceback."""
        path = tmp_path / "bad.yaml"
        path.write_text("modle: {}\nparallel: {tp: 0}\n")
        result = megalite("config", "check", str(path))
        assert result.returncode == EXIT_BAD_INPUT
        assert result.stdout == ""
        assert result.stderr.splitlines() == [
            "megalite: 2 problems found:",
            f"  - {path}:2: parallel.tp: found 0, expected a whole number above 0 and at most 100000 - "
            "Tensor-parallel ranks: each matrix is cut into this many",
            f"  - {path}:1: modle: unknown key (did you mean 'model'?)",
        ]


def test_presets_lists_all():
    output = run("presets")
    assert all(name in output for name in PRESETS)


def test_show_is_the_resolved_config(tmp_path: Path):
    """What is shown is a config of its own, equal to the one it came from."""
    source = ROOT / "configs/gpt2.yaml"
    text = run("show", str(source), "train.tokens=1e9")
    shown = tmp_path / "shown.yaml"
    shown.write_text(text, encoding="utf-8")
    assert load_config(shown) == load_config(source, ["train.tokens=1e9"])
    assert "positions: learned" in text


def test_default_world_size_is_one_model():
    """What `megalite train` would start by itself for the largest config."""
    assert default_world_size(load_config(ROOT / "configs/llama-70b.yaml")) == 32
