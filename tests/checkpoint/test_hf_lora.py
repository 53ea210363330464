"""Runs with low-rank adapters as Hugging Face folders: added to their layers, and alone for PEFT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megalite.architecture.weights import weight_table
from megalite.checkpoint.hf.adapter import CONFIG_FILE, WEIGHTS_FILE, to_peft
from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.config.load import dump_config
from megalite.config.schema import Config, ModelConfig
from megalite.errors import ConversionError
from megalite.model.lora import WithAdaptersAdded, without_lora
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage, documents_of
from tests.checkpoint.hf_kit import (
    GPT,
    RandomWeights,
    reload_here,  # noqa: F401 (a fixture)
    tiny_model,
    write_checkpoint,
)
from tests.kit.paths import LM_EVAL

SOME = {"rank": 3, "alpha": 6.0, "targets": ["q", "v", "down"], "rank_stabilized": True}
TOKENS = torch.arange(5, 45).view(2, 20)

ASK_PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, tokens, logits = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
with torch.no_grad():
    torch.save(model(torch.load(tokens)).logits, logits)
"""


def write_run(root: Path, model: ModelConfig, begun_with: Path | None = None) -> Path:
    """A checkpoint whose config says what the run began with."""
    folder = write_checkpoint(root, model)
    train = {"steps": 20, "init_from": begun_with}
    (folder / "config.yaml").write_text(dump_config(Config.model_validate({"train": train})))
    return root


@pytest.fixture
def exported(tmp_path: Path, reload_here: None) -> dict[str, Any]:  # noqa: F811 (the fixture)
    """A base, a run that adapted it, and its adapters alone. Random weights follow from names: the base's are equal."""
    model = tiny_model(lora=SOME)
    base = tmp_path / "base"
    to_hugging_face(write_checkpoint(tmp_path / "plain", without_lora(model)), base)
    run = write_run(tmp_path / "run", model, base)
    done = to_peft(run, tmp_path / "adapter")
    return {"model": model, "base": base, "run": run, "adapter": done.folder, "done": done}


def test_adapters_are_added_to_their_layers(exported, tmp_path):
    """The exported model has the logits of megalite's own with adapters, and other ones than its base."""
    to_hugging_face(exported["run"], tmp_path / "whole")
    stage = Stage(StageSpec(exported["model"]), RandomWeights()).eval()
    with torch.no_grad():
        own = stage.logits(TOKENS.flatten(), documents_of(TOKENS))
        theirs, base = (
            AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits.flatten(0, 1)
            for folder in (tmp_path / "whole", exported["base"])
        )
    assert (theirs - own[:, : theirs.shape[1]]).abs().max() < 1e-5
    assert (theirs - base).abs().max() > 0.1


def test_a_rectangle_of_a_merged_weight_is_cut_from_the_whole():
    """`W + scale B A` by the formula, of any rows and columns."""
    model = tiny_model(lora=SOME)
    source, table = RandomWeights(), weight_table(model)
    merged = WithAdaptersAdded(source, model)
    for name in ("blocks.1.attention.q.weight", "blocks.0.mlp.down.weight", "blocks.0.mlp.up.weight", "head.weight"):
        row = table[name]
        whole = source.read(row, row.local(1, 0)).double()
        if f"{name.removesuffix('weight')}lora_a" in table:
            a, b = (table[f"{name.removesuffix('weight')}lora_{letter}"] for letter in "ab")
            a, b = (source.read(each, each.local(1, 0)).double() for each in (a, b))
            whole = whole + 6.0 / 3**0.5 * b @ a
        for tp_rank in range(2):
            part = row.local(2, tp_rank)
            torch.testing.assert_close(merged.read(row, part).double(), whole[part.slices], rtol=0, atol=1e-6)


def test_peft_computes_the_adapted_model(exported, tmp_path):
    """PEFT itself loads the adapter beside its base, and its logits are those of the model that was exported whole."""
    if not (LM_EVAL / "peft").is_dir():
        pytest.skip("PEFT is not here; `make lm-eval` fetches it")
    torch.save(TOKENS, tmp_path / "tokens.pt")
    arguments = [exported["base"], exported["adapter"], tmp_path / "tokens.pt", tmp_path / "logits.pt"]
    environment = {**os.environ, "PYTHONPATH": str(LM_EVAL)}
    command = [sys.executable, "-c", ASK_PEFT, *map(str, arguments)]
    subprocess.check_call(command, env=environment, cwd=tmp_path, timeout=300)
    stage = Stage(StageSpec(exported["model"]), RandomWeights()).eval()
    with torch.no_grad():
        own = stage.logits(TOKENS.flatten(), documents_of(TOKENS))
    theirs = torch.load(tmp_path / "logits.pt").flatten(0, 1)
    assert (theirs - own[:, : theirs.shape[1]]).abs().max() < 1e-5


def test_what_an_adapter_folder_says(exported):
    """Names and settings are PEFT's; layers are named by their last names."""
    settings = json.loads((exported["adapter"] / CONFIG_FILE).read_text())
    assert settings["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (3, 6.0, True)
    assert settings["base_model_name_or_path"] == str(exported["base"])
    tensors = load_file(exported["adapter"] / WEIGHTS_FILE)
    layers = exported["model"].num_layers
    assert len(tensors) == 2 * 3 * layers == 2 * exported["done"].num_layers
    assert sum(each.numel() for each in tensors.values()) == exported["done"].num_parameters
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors


def test_wrong_bases_are_refused(exported, tmp_path):
    """Another model's weights, a base that is none, and a run without adapters: in words, and no folder is left."""
    file = exported["base"] / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] += 0.25
    save_file(tensors, file, metadata={"format": "pt"})
    out = tmp_path / "out"
    with pytest.raises(ConversionError, match=r"final_norm.weight of .*base is another than in the checkpoint"):
        to_peft(exported["run"], out)
    with pytest.raises(ConversionError, match=r"--base: .*plain has no config.json"):
        to_peft(exported["run"], out, base=tmp_path / "plain")
    with pytest.raises(ConversionError, match="the run began with fresh weights"):
        to_peft(write_run(tmp_path / "fresh", exported["model"]), out)
    with pytest.raises(ConversionError, match="its run trained no adapters"):
        to_peft(tmp_path / "plain", out)
    assert not out.exists()


def test_layers_that_a_class_fuses_are_refused(tmp_path, reload_here):  # noqa: F811 (the fixture)
    """GPT-2 has no linear layers of queries: its adapters go out with the whole model alone."""
    model = tiny_model(**GPT, positions="learned", tie_embeddings=True, lora=SOME)
    to_hugging_face(write_checkpoint(tmp_path / "plain", without_lora(model)), tmp_path / "base")
    run = write_run(tmp_path / "run", model, tmp_path / "base")
    with pytest.raises(ConversionError, match=r"GPT2LMHeadModel holds .* no linear layer of its own"):
        to_peft(run, tmp_path / "out")
    assert to_hugging_face(run, tmp_path / "whole").architecture == "GPT2LMHeadModel"
