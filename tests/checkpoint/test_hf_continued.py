"""Continued pretraining by the README's commands: someone's model, more training on our data, a model again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.checkpoint.hf_kit import TOKENIZER_SIZE, train_tokenizers
from tests.kit.runs import megalite, metrics

SEQ_LEN = 64
STEPS = 12
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

LOSS_TOLERANCE = 1e-4
"""Of a mean over 512 tokens, fp32: sums in another order differ by 1e-6, another model by 0.01 and more."""


def save_llama(folder: Path, work: Path) -> None:
    """A tiny Llama 3.1 with its tokenizer and licence, as transformers saves them, random weights."""
    config = LlamaConfig(
        vocab_size=TOKENIZER_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(train_tokenizers(work, ["byte-bpe"]) / "byte-bpe").save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: llama3.1\n---\n# A llama\n")


def run(*arguments: str | Path) -> str:
    """Run a command that has to succeed; what it says."""
    done = megalite(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loss_by_transformers(folder: Path, batches: Path, step: int) -> float:
    """Mean loss of a Hugging Face folder over a step of `megalite data show`, without megalite."""
    shown = {name: torch.from_numpy(array[step - 1].astype(np.int64)) for name, array in np.load(batches).items()}
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(shown["tokens"]).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shown["labels"].flatten(), reduction="none")
    mask = shown["loss_mask"].flatten().bool()
    return losses[mask].mean().item()


def test_from_hugging_face_through_training_and_back(tmp_path: Path):
    """`from-hf`, `data prepare` with its tokenizer, `train`, `to-hf`: nothing of the model is lost on the way.

    The first step's loss is the one that transformers computes with the original folder, that of a batch behind the
    last step is the one it computes with the exported folder, and the card tells the whole story.
    """
    llama, base, out = tmp_path / "llama", tmp_path / "base", tmp_path / "out"
    save_llama(llama, tmp_path / "tokenizers")
    assert "every prediction equal" in run("convert", "from-hf", llama, base)

    recipe = {
        "out": str(tmp_path / "data"),
        "valid_fraction": 0.0,
        "sources": [{"kind": "python", "max_mb": 1, "description": "Python's library", "license": "PSF-2.0"}],
        "tokenizer": {"path": str(base / "tokenizer")},
        "pack": {"seq_len": SEQ_LEN},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run("data", "prepare", tmp_path / "recipe.yaml")

    config = {
        **yaml.safe_load((base / "step-0000000" / "config.yaml").read_text()),
        "run": {"dir": str(tmp_path / "run")},
        "parallel": {"tp": 2},
        "batch": {"micro_batch_size": 4, "global_batch_size": 8, "seq_len": SEQ_LEN},
        "data": {"train": [{"path": str(tmp_path / "data/packed/train")}], "document_masks": False},
        "precision": {"dtype": "fp32"},
        "optimizer": {"lr": 5.0e-3},
        "train": {"steps": STEPS, "init_from": str(base), "device": "cpu"},
        "monitor": {"tensorboard": False},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    batches = tmp_path / "batches.npz"
    run("data", "show", tmp_path / "config.yaml", "--steps", f"1:{STEPS + 2}", "--out", batches)
    run("train", tmp_path / "config.yaml")
    steps = metrics(tmp_path / "run")
    assert steps[0]["loss"] == pytest.approx(loss_by_transformers(llama, batches, 1), abs=LOSS_TOLERANCE)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2

    said = run("convert", "to-hf", tmp_path / "run", out)
    assert "WARNING" not in said
    assert "texts with equal ids" in said
    run("train", tmp_path / "config.yaml", f"train.steps={STEPS + 1}")
    last = metrics(tmp_path / "run")[-1]
    assert last["step"] == STEPS + 1
    assert last["loss"] == pytest.approx(loss_by_transformers(out, batches, STEPS + 1), abs=LOSS_TOLERANCE)

    card = (out / "README.md").read_text()
    for line in ("| began as | llama, licence llama3.1 |", f"| training step | {STEPS} of {STEPS} |"):
        assert line in card.splitlines()
    assert "| PSF-2.0 |" in card
    assert json.loads((out / "config.json").read_text())["rope_parameters"] == LLAMA3
