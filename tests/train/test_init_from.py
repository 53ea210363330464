"""Runs that start from weights of others: what is compared, what is refused, what may be chosen anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megalite.checkpoint.hf import proof
from megalite.config.load import load_config
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE, ConversionError
from tests.checkpoint.hf_kit import reloading_here
from tests.kit.data import VOCAB_SIZE
from tests.kit.runs import events, metrics, write_run
from tests.train.forked import launch

LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}
MODEL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 64, "vocab_size": VOCAB_SIZE}
STEPS = {"steps": 2, "eval_batches": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that transformers wrote."""
    folder = tmp_path_factory.mktemp("hf") / "llama"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


def here() -> None:
    """Let transformers answer in the rank's own process, which saves seconds of imports."""
    reloading_here().__enter__()


def said(folder: Path, kind: str) -> list[str]:
    return [event["why"] for event in events(folder) if event["event"] == kind]


def train(
    folder: Path, start: Path, world_size: int = 2, model: dict | None = None, *, prepare=here, **settings
) -> tuple[int, Path]:
    config = load_config(
        write_run(
            folder,
            model={**MODEL, **(model or {})},
            parallel={"tp": 1, "dp": world_size, "zero_stage": 1},
            train={**STEPS, "init_from": str(start), **settings},
        )
    )
    return launch(config, world_size, prepare=prepare), config.run.dir


def test_logits_are_compared_before_the_first_step(llama, tmp_path):
    """The first rank lets transformers compute the same, and the events say what was equal."""
    code, folder = train(tmp_path, llama)
    assert code == EXIT_DONE
    (compared,) = said(folder, "weights_compared")
    assert compared.startswith("logits through all 2 blocks equal those of transformers")
    assert said(folder, "model_choice_changed") == []


def test_choices_are_said_and_taken(llama, tmp_path):
    """Another theta, window and z-loss are no other model: the run trains with its own, and says so."""
    code, plain = train(tmp_path / "plain", llama, 1, verify_init_from=False)
    assert code == EXIT_DONE
    assert said(plain, "weights_compared") == ["not compared with transformers, as asked"]
    chosen = {"rope": {"theta": 100.0}, "sliding_window": 5, "z_loss": 1e-4}
    code, folder = train(tmp_path / "chosen", llama, 1, chosen, verify_init_from=False)
    assert code == EXIT_DONE
    changed = said(folder, "model_choice_changed")
    assert changed == [
        "model.sliding_window is 5, the weights have None",
        "model.rope.theta is 100.0, the weights have 10000.0",
    ]
    assert metrics(folder)[0]["loss"] != metrics(plain)[0]["loss"]


def test_another_architecture_is_refused(llama, tmp_path):
    """From a folder and from a checkpoint alike, by name, before anything is trained."""
    code, folder = train(tmp_path / "first", llama, 1, verify_init_from=False)
    for name, start in (("hf", llama), ("checkpoint", folder)):
        code, refused = train(tmp_path / name, start, 1, {"qk_norm": True, "activation": "gelu"})
        assert code == EXIT_BAD_INPUT
        word = json.loads((refused / "logs/error-0.json").read_text())["message"]
        for field in ("activation is gelu, the weights have swiglu", "qk_norm is True, the weights have False"):
            assert f"model.{field}" in word


def misreading() -> None:
    """Let ranks compare what a reader with a fault would have read."""
    here()
    original = proof.HuggingFaceWeights

    def misread(folder: Path):
        weights = original(folder)
        weights.model = weights.model.model_copy(update={"norm_eps": 1e-3})
        return weights

    proof.HuggingFaceWeights = misread


def test_what_transformers_computes_otherwise_is_refused(llama, tmp_path):
    """A reader that had misread a folder would not get past the comparison; its message says how to go on anyway."""
    code, folder = train(tmp_path, llama, prepare=misreading)
    assert code == EXIT_BAD_INPUT
    word = json.loads((folder / "logs/error-0.json").read_text())["message"]
    assert "train.init_from: transformers computes another model" in word
    assert "--no-verify" in word
    assert not (folder / "metrics.jsonl").exists()


def test_only_blocks_that_fit_are_compared(llama, monkeypatch):
    """With little memory the first blocks are run; with too little for one, that is said with the numbers."""
    memory = {"bytes": 10**9}
    monkeypatch.setattr("megalite.checkpoint.hf.memory.available_bytes", lambda: memory["bytes"])
    monkeypatch.setattr(proof, "MOST_PARAMETERS", 1)
    with reloading_here():
        assert "through the first 1 blocks" in proof.prove(llama)
    memory["bytes"] = 1000
    with pytest.raises(ConversionError, match=r"running 1 block of it .* use a machine with more"):
        proof.prove(llama)
