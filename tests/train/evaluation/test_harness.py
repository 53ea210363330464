"""lm-evaluation-harness on an exported checkpoint agrees with our own scorer, question by question."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from megalite.cli.main import main
from megalite.errors import DataError, UnavailableError
from megalite.train.evaluation import harness
from megalite.train.evaluation.offline import open_model, score_all
from tests.checkpoint.hf_kit import tiny_model, write_checkpoint
from tests.kit.paths import LM_EVAL
from tests.train.evaluation.conftest import SEQ_LEN, write_questions

SCORES = 1e-6
"""Shares of the same answers."""

NUM_QUESTIONS = 60


@pytest.fixture
def lm_eval(monkeypatch) -> None:
    """The harness of `make lm-eval`, for this process and for those it starts."""
    if not (LM_EVAL / "lm_eval").is_dir():
        pytest.skip("lm-evaluation-harness is not installed: `make lm-eval` fetches it")
    monkeypatch.syspath_prepend(str(LM_EVAL))
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(LM_EVAL), *([path] if path else [])]))


@pytest.fixture
def world(tmp_path, prepared) -> Path:
    """A checkpoint of random weights, and the same questions in both formats."""
    write_checkpoint(tmp_path / "run", tiny_model(vocab_size=300, max_positions=SEQ_LEN, num_kv_heads=2))
    questions = write_questions(tmp_path / "qa.jsonl", NUM_QUESTIONS, seed=1, empty_contexts=False)
    task = {
        "task": "qa_harness",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": questions.name}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm")],
    }
    (tmp_path / "qa_harness.yaml").write_text(yaml.safe_dump(task))
    return tmp_path


@pytest.mark.usefixtures("lm_eval")
def test_agrees_with_the_harness(world, prepared, capsys, monkeypatch):
    """`megalite eval CHECKPOINT --tasks OURS --tasks THEIRS`: equal accuracies, plain and normalised; the harness got
    an export that was proven equal. A rank's variables, as a job's shell may have them, are no matter to it."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    arguments = ["eval", world / "run", "--tokenizer", prepared / "out/tokenizer", "--json"]
    arguments += ["--tasks", world / "qa.jsonl", "--tasks", world / "qa_harness.yaml"]
    with pytest.raises(SystemExit) as caught:
        main([*map(str, arguments)])
    assert not caught.value.code
    found = json.loads(capsys.readouterr().out)["tasks"]
    ours, theirs = found["qa"], found["qa_harness"]
    assert ours["num"] == theirs["num"] == NUM_QUESTIONS
    for name in ("acc", "acc_norm"):
        assert ours[name] == pytest.approx(theirs[name], abs=SCORES)
    assert (ours["by"], theirs["by"]) == ("megalite", "lm-evaluation-harness")
    assert ours["acc"] != ours["acc_norm"]


@pytest.mark.usefixtures("lm_eval")
def test_what_the_harness_says_reaches_the_user(world, prepared):
    """A folder that it cannot use ends in an error with its words."""
    with pytest.raises(DataError, match=r"lm-evaluation-harness failed on .*qa_harness\.yaml:\n(.|\n)*Error"):
        list(harness.score(prepared / "out/tokenizer", [world / "qa_harness.yaml"]))


def test_without_the_harness(world, prepared, monkeypatch):
    """Said before anything is computed."""
    monkeypatch.setattr(harness, "PACKAGE", "no_such_package")
    with pytest.raises(UnavailableError, match=r"pip install 'megalite\[eval\]'"):
        list(score_all(open_model(world / "run", prepared / "out/tokenizer"), [world / "qa_harness.yaml"]))
