"""Converting takes the memory of a shard and a tensor, not that of the model, in both directions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalite import host
from megalite.architecture.costs import count_parameters
from tests.checkpoint.hf_kit import tiny_model, write_checkpoint

ROOT = Path(__file__).parents[2]

LARGE = {
    "hidden_size": 512,
    "num_layers": 20,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_hidden_size": 1408,
    "vocab_size": 1024,
    "max_positions": 128,
}
"""240 MB in fp32; its largest tensor has 3."""

SHARD_BYTES = 35 * 10**6
TENSOR_BYTES = 4 * LARGE["hidden_size"] * LARGE["ffn_hidden_size"]
TIMEOUT_SECONDS = 300

GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""What is freed goes back to the kernel at once, so that what counts is what is held and not what malloc keeps."""


GROUPS = {
    "job": ("max", 900, 0),
    "job/step": (1000, 700, 200),
    "job/step/task": (5000, 100, 50),
}
"""Limit, use and page cache of nested control groups."""


@pytest.mark.parametrize(
    ("line", "root", "names"),
    [("0::/job/step/task", "", host.VERSION_2), ("4:memory:/job/step/task", "memory", host.VERSION_1)],
)
def test_memory_of_a_job(line: str, root: str, names: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is available is the least of what the machine and each control group around the process have left."""
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "groups")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  2 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"{line}\n3:cpuset:/\n")
    assert host.available_bytes() == 2048
    assert host.total_bytes() == 9 * 1024
    limit_name, used_name, (cache_name, _) = names
    for path, (limit, used, cache) in GROUPS.items():
        folder = tmp_path / "groups" / root / path
        folder.mkdir(parents=True)
        (folder / limit_name).write_text(f"{limit}\n")
        (folder / used_name).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{cache_name} {cache}\n")
    assert host.available_bytes() == 1000 - 700 + 200
    assert host.total_bytes() == 1000


def test_no_more_than_a_shard_and_a_tensor(tmp_path: Path):
    """A model six times as large as the limit goes to Hugging Face and back, verification included.

    Memory of its own, what the kernel cannot take back, never grows by more than a shard and a tensor; neither does
    that of the process that reads the result back grow with the model.
    """
    model = tiny_model(**LARGE)
    write_checkpoint(tmp_path / "run", model)
    own = SHARD_BYTES + TENSOR_BYTES
    command = [sys.executable, "-m", "tests.checkpoint.hf_limited", tmp_path, SHARD_BYTES, own]
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, **GIVEN_BACK},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["size"] >= 4 * count_parameters(model) > 6 * own
    for direction in ("to-hf", "from-hf"):
        assert 0 < found[direction]["own"] <= own
        assert found[direction]["child"] <= found["tiny child"] + own
