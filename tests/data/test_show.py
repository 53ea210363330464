"""`megalite data show`, and the other verbs from the command line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megalite.cli.data import app, reports
from megalite.config.batch_sizes import BatchSizes
from megalite.config.schema import Config
from megalite.data.cursor import DataCursor, Gap
from megalite.data.loader import Loader
from megalite.data.show import collect_arrays, describe, open_training_data, parse_steps
from megalite.errors import DataError
from tests.kit.data import prose, random_documents, write_json_lines, write_packed_folder, write_pair

SEQ_LEN = 16


@pytest.fixture
def config_file(tmp_path) -> Path:
    """A training config over a packed source."""
    packed = write_packed_folder(tmp_path / "packed", random_documents(60), seq_len=SEQ_LEN)
    path = tmp_path / "config.yaml"
    path.write_text(
        f"data:\n  train:\n    - path: {packed}\nbatch:\n  seq_len: {SEQ_LEN}\n  global_batch_size: 4\n"
        "model:\n  vocab_size: 1000\n"
    )
    return path


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(("text", "steps"), [("1:5", [1, 2, 3, 4]), ("7:8", [7])])
def test_steps_are_half_open_and_counted_from_one(text, steps):
    """Python's range over step numbers as in metrics.jsonl."""
    assert list(parse_steps(text)) == steps


@pytest.mark.parametrize("text", ["0:3", "5:5", "5:2", "4", "a:b", "-1:3", "1:2:3", ""])
def test_other_steps_are_refused(text):
    """With how to write them."""
    with pytest.raises(DataError, match="write A:B for the steps A to B - 1"):
        parse_steps(text)


def test_the_file_holds_what_every_rank_sees(config_file, tmp_path):
    """The arrays equal the loaders' batches at any dp and micro-batch, put back by their keys."""
    out = tmp_path / "batches.npz"
    result = run("show", config_file, "--steps", "3:6", "--out", out)
    assert result.exit_code == 0, result.output
    assert "steps 3 to 5" in result.output
    arrays = np.load(out)
    assert {name: arrays[name].shape for name in arrays} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "document_ids"), (3, 4, SEQ_LEN)
    )
    samples = open_training_data(Config(data={"train": [{"path": tmp_path / "packed"}]}, batch={"seq_len": SEQ_LEN}))
    for dp_size, micro_batch_size in ((1, 4), (2, 1), (4, 1)):
        for rank in range(dp_size):
            loader = Loader(
                samples,
                micro_batch_size=micro_batch_size,
                batch_sizes=BatchSizes.fixed(4),
                dp_size=dp_size,
                dp_rank=rank,
                prefetch=2,
            )
            for step, batches in loader.steps(3, 5):
                for batch in batches:
                    rows, places = np.divmod(batch.keys.numpy() - (step - 1) * 4 * SEQ_LEN, SEQ_LEN)
                    for name in ("tokens", "labels", "loss_mask"):
                        assert (arrays[name][step - 3, rows, places] == getattr(batch, name).numpy()).all()


def test_overrides_reach_the_data(config_file, tmp_path):
    """Another seed shows other batches."""
    tokens = []
    for seed in (1, 2):
        out = tmp_path / f"{seed}.npz"
        assert run("show", config_file, "--steps", "1:3", "--out", out, f"run.seed={seed}").exit_code == 0
        tokens.append(np.load(out)["tokens"])
    assert (tokens[0] != tokens[1]).any()


def test_text_without_a_tokenizer_shows_ids(config_file):
    """The tokens of this set were made without one, and its folder is not there."""
    config = Config(data={"train": [{"path": config_file.parent / "packed"}]}, batch={"seq_len": SEQ_LEN})
    samples = open_training_data(config)
    with pytest.raises(DataError, match="no such folder; a tokenizer is a folder"):
        list(describe(samples, range(1, 2), BatchSizes.fixed(4)))
    arrays = collect_arrays(samples, range(1, 2), BatchSizes.fixed(4))
    assert arrays["document_ids"].dtype == np.int64


def test_samples_behind_what_was_left_out_are_of_their_stage(tmp_path, monkeypatch):
    """Six samples are left out behind step 1; step 3 begins a stage, with sample 14 of the data: each number is that of
    the step which read it, and what was left out is of the stage before."""
    tokens = tmp_path / "tokens"
    write_pair(tokens, random_documents(90))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"data:\n  train:\n    - path: {tokens}\nbatch:\n  seq_len: 16\n  global_batch_size: 4\n"
        "  stages: [{from_step: 3, seq_len: 32}]\nmodel:\n  vocab_size: 1000\ntrain:\n  steps: 6\n"
    )
    run_with_gap = reports.StandingRun(None, None, DataCursor(gaps=(Gap(4, 6),)))
    monkeypatch.setattr(reports, "find_run", lambda settings: run_with_gap)
    for step, number in ((1, 0), (2, 10), (3, 14), (5, 22)):
        by_step = run("show", config, "--steps", f"{step}:{step + 1}").output
        assert by_step.startswith(f"step {step}, global sample {number}: ")
        assert run("show", config, "--samples", f"{number}:{number + 1}").output == by_step.split(", ", 1)[1]
    for number in range(4, 10):
        left_out = run("show", config, "--samples", f"{number}:{number + 1}").output
        assert re.match(rf"global sample {number}: source tokens, .* of 16 labels count", left_out)


def test_unwritable_output_is_a_message(config_file, tmp_path):
    """A folder that is not there."""
    result = run("show", config_file, "--out", tmp_path / "no" / "where.npz")
    assert isinstance(result.exception, DataError)
    assert "cannot be written: No such file or directory" in str(result.exception)


def test_each_verb_by_itself(tmp_path):
    """clean, dedup, train-tokenizer, tokenize and pack one after the other, then show as text."""
    raw = write_json_lines(tmp_path / "raw.jsonl", [*prose(200), *prose(10), "short"])
    folders = [tmp_path / name for name in ("clean", "dedup", "tokenizer", "tokens", "packed")]
    cleaned, distinct, tokenizer, tokens, packed = folders
    lines = [
        run("clean", raw, "--out", cleaned, "--min-chars", 20, "--workers", 1),
        run("dedup", cleaned, "--out", distinct),
        run("train-tokenizer", distinct, "--out", tokenizer, "--kind", "byte-bpe", "--vocab-size", 300),
        run("tokenize", distinct, "--tokenizer", tokenizer, "--out", tokens, "--workers", 1),
        run("pack", tokens, "--out", packed, "--seq-len", 32, "--method", "concat"),
    ]
    for result in lines:
        assert result.exit_code == 0, result.output
    assert "documents_in 211, documents 210" in lines[0].output
    assert "documents 200" in lines[1].output
    again = run("pack", tokens, "--out", packed, "--seq-len", 32, "--method", "concat")
    assert "already there" in again.output

    config = tmp_path / "config.yaml"
    config.write_text(f"data:\n  train:\n    - path: {packed}\nbatch:\n  seq_len: 32\n")
    shown = run("show", config, "--steps", "1:2")
    assert shown.exit_code == 0, shown.output
    assert "step 1, global sample 0: source packed, epoch 0, sample" in shown.output
    assert re.search(r"  document \d+, \d+ tokens: '.*\b(model|tokens|learns|word)\b", shown.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("clean", "nowhere", "--out", "o"), "nowhere: no such file or folder"),
        (("clean", "nowhere", "--out", "o", "--on-error", "stop"), "--on-error: on_error: found"),
        (("tokenize", "nowhere", "--tokenizer", "t", "--out", "o"), "nowhere: no such file or folder"),
        (("tokenize", __file__, "--tokenizer", "t", "--out", "o"), "t: no such folder; a tokenizer is a folder"),
        (("pack", "nowhere", "--out", "o", "--seq-len", "8"), "nowhere: no such folder, and no pair nowhere.bin"),
        (("pack", "nowhere", "--out", "o", "--seq-len", "0"), "--seq-len: seq_len: found 0"),
        (("prepare", "nowhere.yaml"), "nowhere.yaml: no such file"),
        (("show", "nowhere.yaml"), "nowhere.yaml: no such file"),
    ],
)
def test_bad_input_is_a_message(tmp_path, monkeypatch, arguments, message):
    """Errors of the user's family, which the command turns into exit code 2, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []
