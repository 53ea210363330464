"""Bad input ends before any work starts: exit code 2, a message that says what was found, expected and to do, no
traceback, and nothing left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megalite.config.fill import fill_model
from megalite.config.load import load_config
from tests.kit.data import random_documents, write_json_lines, write_packed_folder, write_pair
from tests.kit.runs import megalite, write_run


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config that would train."""
    return write_run(tmp_path_factory.mktemp("bad-input"))


def refused(*arguments: str | Path) -> str:
    """Run a command that must be refused; returns its message."""
    done = megalite(*arguments)
    assert done.returncode == 2, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


SETTINGS = {
    "unknown key": (["model.hiden_size=64"], ["hiden_size", "did you mean", "hidden_size"]),
    "unknown section": (["modle.hidden_size=64"], ["modle", "did you mean", "model"]),
    "not a number": (["optimizer.lr=fast"], ["optimizer.lr", "fast"]),
    "heads and tp": (["model.num_heads=6", "model.hidden_size=48", "parallel.tp=4"], ["num_heads=6", "tp=4", "use"]),
    "kv heads and tp": (["model.num_kv_heads=4", "model.num_heads=12", "parallel.tp=6"], ["num_kv_heads=4", "tp=6"]),
    "batch": (["batch.global_batch_size=5"], ["global_batch_size: 5", "micro_batch_size", "use 4 or 6"]),
    "pipeline and ZeRO": (["parallel.pp=2", "parallel.zero_stage=3"], ["zero_stage", "pp", "1"]),
    "more stages than blocks": (["parallel.pp=4"], ["pp=4", "num_layers=2"]),
    "context parallel": (["parallel.cp=3"], ["cp=3", "not divisible by 6", "use seq_len", "pad_tokens"]),
    "no length": (["train.steps=null"], ["train.steps", "train.tokens"]),
    "fp8": (["precision.fp8={backend: te}"], ["fp8.backend", "train.device=cpu", "emulate"]),
    "cuda": (["train.device=cuda"], ["cuda", "train.device=cpu"]),
    "ZeRO-0 in bf16": (
        ["precision.dtype=bf16", "parallel.zero_stage=0", "parallel.engine=deepspeed"],
        ["zero_stage", "1"],
    ),
    "owned DeepSpeed key": (["engine.deepspeed_extra={gradient_clipping: 1}"], ["gradient_clipping"]),
    "no data": (["data.train=[]"], ["data.train", "source"]),
    "missing data": (["data.train=[{path: no/such/folder}]"], ["no/such/folder"]),
    "another seq_len": (["batch.seq_len=64"], ["32", "64"]),
    "vocabulary": (["model.vocab_size=500"], ["500", "1000"]),
    "init_from": (["train.init_from=no/such/model"], ["no/such/model"]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_is_refused(config, name):
    """A wrong setting: the message names what was found and what to do."""
    overrides, words = SETTINGS[name]
    message = refused("train", config, *overrides)
    assert all(word in message for word in words), message


def test_all_mistakes_at_once(config):
    """Several mistakes are told together, those of the file with its name."""
    message = refused("train", config, "model.ffn_hidden_size=65", "batch.global_batch_size=5", "parallel.cp=3")
    assert "3 problems" in message, message


def test_world_size_must_match(config):
    """`config check` for a world that the layout does not fill says which sizes it would."""
    message = refused("config", "check", config, "--world-size", "3")
    assert "3 ranks" in message
    assert "use 2 or 4 ranks" in message


def test_missing_and_broken_files(tmp_path):
    """A config that is not there, not YAML, or not UTF-8."""
    assert "no-such.yaml" in refused("train", tmp_path / "no-such.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: {hidden_size: 64\nrun: [")
    assert "broken.yaml" in refused("train", broken)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("run: {dir: 'é'}".encode("latin-1"))
    assert "UTF-8" in refused("train", latin)


def test_truncated_bin(config, tmp_path):
    """A `.bin` shorter than its index says: both sizes."""
    prefix = write_pair(tmp_path / "pair", random_documents(50))
    data = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes(data[:-100])
    message = refused("train", config, f"data.train=[{{path: {prefix}}}]")
    assert str(len(data) - 100) in message
    assert str(len(data)) in message


def test_empty_data(config, tmp_path):
    """A pair without documents."""
    prefix = write_pair(tmp_path / "empty", [])
    assert "empty" in refused("train", config, f"data.train=[{{path: {prefix}}}]")


def test_data_without_any_label(config, tmp_path):
    """No token of it has a next one: nothing would be learnt, or validated."""
    prefix = write_pair(tmp_path / "single", [np.array([5])] * 40)
    for key in ("train", "valid"):
        message = refused("train", config, f"data.{key}=[{{path: {prefix}}}]")
        assert f"{prefix}: no label: none of its 40 documents" in message


def test_tokenizers_that_differ(config, tmp_path):
    """A mixture of sources made with other tokenizers."""
    other = write_packed_folder(tmp_path / "other", random_documents(50), seq_len=32)
    for manifest in tmp_path.glob("other*/manifest.json"):
        manifest.write_text(manifest.read_text().replace("a tokenizer", "another tokenizer"))
    shutil.copytree(config.parent / "packed", tmp_path / "packed")
    shutil.copytree(config.parent / "packed-tokens", tmp_path / "packed-tokens")
    message = refused("train", config, f"data.train=[{{path: {tmp_path / 'packed'}}}, {{path: {other}}}]")
    assert "tokenizer" in message or "changed" in message, message


def test_run_folder_of_another_config(tmp_path):
    """A folder that holds a run of another model is not touched."""
    config = write_run(tmp_path)
    (tmp_path / "run").mkdir()
    assert megalite("config", "show", config).returncode == 0
    shown = megalite("config", "show", config, "model.num_layers=3").stdout
    (tmp_path / "run" / "config.yaml").write_text(shown)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    message = refused("train", config)
    assert "model.num_layers: 3" in message
    assert "run.dir" in message


def test_run_folder_that_cannot_be_written(config, tmp_path):
    """A run folder below a file."""
    (tmp_path / "file").write_text("")
    assert "run.dir" in refused("train", config, f"run.dir={tmp_path / 'file' / 'run'}")


def test_disk_too_small_for_a_checkpoint(config):
    """A model whose checkpoint cannot fit on any disk: what is needed and what is free."""
    message = refused("train", config, "model.hidden_size=262144", "model.ffn_hidden_size=1048576")
    assert "B free" in message
    assert "run.dir" in message


def test_checkpoint_of_another_model(config, tmp_path):
    """Weights of another shape: both shapes are named."""
    from megalite.checkpoint.format import Manifest, Piece, Progress, TensorRecord, hash_file, write_manifest

    folder = tmp_path / "step-0000001"
    folder.mkdir()
    save_file({"a": torch.zeros(1000, 64)}, folder / "rank-00000.safetensors")
    files = {"rank-00000.safetensors": hash_file(folder / "rank-00000.safetensors")}
    record = TensorRecord((1000, 64), [Piece(*files, "a", (0, 0), (1000, 64))])
    given = load_config(config)
    model = fill_model(given.model, given.batch).model_dump(mode="json")
    manifest = Manifest(Progress(step=1), model, {}, {"weight/embedding.weight": record}, files)
    write_manifest(folder, manifest)
    message = refused("train", config, f"train.init_from={folder}")
    assert "[1000, 64]" in message
    assert "[1000, 32]" in message


def test_text_that_is_not_utf8(tmp_path):
    """Bad bytes in text are put aside with a reason, and are an error when the user asks for one."""
    good = write_json_lines(tmp_path / "in" / "good.jsonl", ["some text that is long enough to be kept " * 5])
    (tmp_path / "in" / "bad.txt").write_bytes(b"caf\xe9 " * 50)
    done = megalite("data", "clean", good.parent, "--out", tmp_path / "clean")
    assert done.returncode == 0, done.stderr
    assert any((tmp_path / "clean" / "rejected").iterdir())
    assert "UTF-8" in refused("data", "clean", good.parent, "--out", tmp_path / "strict", "--on-error", "fail")
    assert not (tmp_path / "strict").exists()


def test_document_longer_than_any_pack(tmp_path):
    """A document longer than the sequence is cut, counted and said; no token is lost."""
    from tests.kit.data import write_tokens_folder

    long = [np.arange(3, 503), *random_documents(5, longest=20)]
    tokens = write_tokens_folder(tmp_path / "tokens", long)
    done = megalite("data", "pack", tokens, "--out", tmp_path / "packed", "--seq-len", "64")
    assert done.returncode == 0, done.stderr
    counts = json.loads((tmp_path / "packed" / "manifest.json").read_text())["counts"]
    assert counts["documents_longer_than_seq_len"] == 1
    assert counts["tokens"] == sum(map(len, long))
