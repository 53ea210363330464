"""EleutherAI's lm-evaluation-harness on an exported model, with task files from the disk and without network.

The harness runs in a process of its own: it imports half of Hugging Face's libraries, and must find them offline.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.errors import DataError, UnavailableError

PACKAGE = "lm_eval"

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What would make the harness's libraries look for other ranks."""

BATCH_SIZE = 8

STDERR_LINES = 12


def require() -> None:
    """Refuse to begin without the package.

    Raises:
        UnavailableError: it is not installed.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise UnavailableError(
            "lm-evaluation-harness is not installed; `pip install 'megalite[eval]'`, or give the questions as .jsonl"
        )


def score(folder: Path, files: Sequence[Path], limit: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Score a model in Hugging Face format.

    Args:
        folder: model and tokenizer.
        files: task files of the harness. A data file named in one is found beside it.
        limit: questions of each task.

    Yields:
        A task's name, and its scores with `num`, the number of questions, and `by`, who scored.

    Raises:
        DataError: the harness failed; with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="megalite-harness-") as work:
        out = Path(work) / "results.json"
        request = {
            "model": str(folder.absolute()),
            "tasks": [str(file.absolute()) for file in files],
            "limit": limit,
            "out": str(out),
        }
        alone = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
        environment = {**alone, **OFFLINE, "HF_DATASETS_CACHE": str(Path(work) / "datasets")}
        done = subprocess.run(
            [sys.executable, "-m", "megalite.train.evaluation.harness", json.dumps(request)],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode or not out.is_file():
            said = "\n".join(done.stderr.strip().splitlines()[-STDERR_LINES:])
            raise DataError(f"lm-evaluation-harness failed on {', '.join(map(str, files))}:\n{said}")
        results = json.loads(out.read_text(encoding="utf-8"))
    for name, record in results.items():
        yield name, {**record, "by": "lm-evaluation-harness"}


def main(request: dict[str, Any]) -> None:
    """Run the harness and leave its results in a file."""
    import lm_eval  # these take seconds, and are not everywhere
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from megalite.train.device import choose_device

    device = choose_device("auto", 0).type
    model = HFLM(pretrained=request["model"], device=device, dtype="float32", batch_size=BATCH_SIZE)
    results: dict[str, dict[str, Any]] = {}
    for path in map(Path, request["tasks"]):
        os.chdir(path.parent)  # a data file is named as seen from the task's
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=[_name_or_refuse(path)],
            task_manager=TaskManager(include_path=str(path.parent), include_defaults=False),
            limit=request["limit"],
            bootstrap_iters=0,
        )
        results |= _plain(found)
    Path(request["out"]).write_text(json.dumps(results), encoding="utf-8")


def task_name(path: Path) -> str | None:
    """What a task file calls its task; None where it does not say. It may have tags that only the harness reads, so
    YAML is not asked."""
    text = path.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^(?:task|group):\s*[\"']?([^\s\"'#]+)", text, re.MULTILINE)
    return None if found is None else found[1]


def _name_or_refuse(path: Path) -> str:
    name = task_name(path)
    if name is None:
        raise ValueError(f"{path}: no `task: NAME` in it")
    return name


def _plain(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Scores by task: `acc,none` is called acc."""
    results = {}
    for name, metrics in found["results"].items():
        numbers = {key.split(",")[0]: value for key, value in metrics.items() if isinstance(value, float)}
        results[name] = {**numbers, "num": found["n-samples"][name]["effective"]}
    return results


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
