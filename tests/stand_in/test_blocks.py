"""Blocks as they are compiled and recomputed on a GPU, counted on the stand-in device."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.kit.paths import ROOT
from tests.kit.runs import clean_environment
from tests.stand_in.build import build

CHILD_SECONDS = 300


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    library, why = build()
    if library is None:
        pytest.skip(why)
    command = [sys.executable, "-W", "ignore", "-m", "tests.stand_in.blocks", str(library)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["bf16", "current", "delayed", "rowwise"])
def test_all_blocks_share_one_graph(answer, name: str):
    """With attention and FP8 products inside, for any number of documents; results and gradients are those of eager
    blocks, bit by bit."""
    assert answer["compiled"][name] == {"graphs": 1, "breaks": 0, "worst": 0.0}


@pytest.mark.parametrize("name", ["bf16", "current"])
def test_selective_recomputation_multiplies_once(answer, name: str):
    """Neither products nor attention are done again; `full` shows that they could be seen."""
    products = answer["products"]
    assert products[f"{name} selective"] == products[f"{name} none"]
    assert sum(products[f"{name} full"].values()) > sum(products[f"{name} none"].values())
