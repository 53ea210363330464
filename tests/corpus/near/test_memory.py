"""Matching in bounded memory, under a limit that the system enforces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from megalite.corpus.near.bands import band_entries, sort_entries
from megalite.corpus.near.index import save_array, shard_file, write_index_file
from megalite.corpus.near.settings import NearDedupConfig

CHILD_SECONDS = 120

LIMIT_MB = 56
"""17 for a block of signatures, 10 for the 240,000 band keys of a sixteenth, and half as much again to be sure."""

MATCH_UNDER_LIMIT = """
import resource, sys
from pathlib import Path
import numpy as np
from megalite.corpus.near.edges import find_edges, pair_rule
from megalite.corpus.near.index import Index
from megalite.corpus.near.settings import NearDedupConfig

few, many, limit_mb = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
config = NearDedupConfig()
find_edges(Index([few], config), 0, 1, rule=pair_rule(config))  # compiles
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + limit_mb * 10**6,) * 2)
index = Index([many], config)
found = np.zeros(index.num_documents // 2, np.bool_)
for partition in range(16):
    pairs = find_edges(index, partition, 16, rule=pair_rule(config)).pairs
    assert (pairs[:, 0] % 2 == 0).all() and (pairs[:, 1] == pairs[:, 0] + 1).all()
    found[pairs[:, 0] // 2] = True
assert found.all()
print(index.num_documents)
"""
"""The limit is on private memory: mapped files, which the system may drop at any time, do not count."""


def write_pairs(folder: Path, num_documents: int, num_shards: int) -> Path:
    """An index in which documents 0 and 1 are equal, 2 and 3, and so on."""
    config = NearDedupConfig()
    rng = np.random.default_rng(0)
    size = num_documents // num_shards
    folder.mkdir()
    for shard in range(num_shards):
        signatures = rng.integers(0, 2**32, (size // 2, config.num_hashes), dtype=np.uint32).repeat(2, axis=0)
        keys, rows = sort_entries(*band_entries(signatures, config.banding, 0))
        for name, array in {"signatures": signatures, "band_keys": keys, "band_rows": rows}.items():
            save_array(shard_file(folder, shard, name), array)
    write_index_file(folder, config, [size] * num_shards)
    return folder


def test_matching_holds_a_part_of_the_signatures(tmp_path):
    """123 MB of signatures, each of which is compared in every band, in 56 MB; the outcome is right."""
    few = write_pairs(tmp_path / "few", 64, num_shards=1)
    many = write_pairs(tmp_path / "many", 120_000, num_shards=4)
    command = [sys.executable, "-c", MATCH_UNDER_LIMIT, str(few), str(many), str(LIMIT_MB)]
    root = Path(__file__).parents[3]
    outcome = subprocess.run(command, cwd=root, timeout=CHILD_SECONDS, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert int(outcome.stdout) == 120_000
