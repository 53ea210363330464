"""Other people's programs as oracles: each is asked in a process of its own, with a folder of its own on its path.

`make oracles` puts the packages into `.venv/oracles`, without what they depend on, so that neither they nor the
versions they ask for touch the project's environment. Where the folder is not there, the tests that need it say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

FOLDER = Path(sys.prefix) / "oracles"

CHILD_SECONDS = 300


def need(package: str, folder: Path = FOLDER) -> None:
    """Skip the test where a package is not among the oracles."""
    if not (folder / package).is_dir():
        pytest.skip(f"no {package} in {folder}: make oracles")


def ask(module: str, question: dict[str, Any], folder: Path = FOLDER) -> Any:
    """Run a module of the tests as a program: JSON to its standard input, JSON from its last line of output."""
    command = [sys.executable, "-W", "ignore", "-m", module]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "CUDA_VISIBLE_DEVICES": ""}
    outcome = subprocess.run(
        command,
        input=json.dumps(question),
        env=environment,
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return json.loads(outcome.stdout.splitlines()[-1])
