"""How many cases, and from which seed."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def num_cases(request: pytest.FixtureRequest) -> int:
    """Cases of each kind."""
    return request.config.getoption("--fuzz")


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """Of the commit, so that every commit tries others and a failure can be had again; `--fuzz-seed` sets it."""
    given = request.config.getoption("--fuzz-seed")
    if given is not None:
        return given
    root = Path(__file__).parents[2]
    done = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return int(done.stdout[:8], 16) if done.returncode == 0 else 0


@pytest.fixture
def rng(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """Random choices of one test; the seed stands in the output of a failure."""
    print(f"--fuzz-seed={seed}")
    return random.Random(f"{seed} {request.node.name}")
