"""Runs with rounded weights as Hugging Face folders: as numbers on the grid, and as integers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megalite.architecture.architecture import Architecture
from megalite.architecture.settings import WeightScales
from megalite.architecture.weights import weight_table
from megalite.checkpoint.hf import packed, verify
from megalite.checkpoint.hf.exporter import QUANTIZED, to_hugging_face
from megalite.checkpoint.hf.packed import pack, unpack
from megalite.checkpoint.rounded_weights import RoundedSource, RunRounding
from megalite.cli.main import main
from megalite.config.load import dump_config
from megalite.config.schema import Config, ModelConfig, QatConfig
from megalite.errors import ConversionError
from megalite.layers.parts import choose_parts
from megalite.layers.qat.precision import Qat
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage, documents_of
from megalite.train.evaluation.offline import open_model
from tests.checkpoint.hf_kit import (
    DEEPSEEK_V3,
    GPT,
    RandomWeights,
    assert_same_weights,
    reload_here,  # noqa: F401 (a fixture)
    tiny_model,
    write_checkpoint,
)

INT4 = {"bits": 4, "group_size": 32, "keep_first_blocks": 1}
LEARNED = {**INT4, "keep_first_blocks": 0, "learned_scales": True}
ROWS = {"bits": 8, "group_size": None}
WIDE = {"hidden_size": 64, "ffn_hidden_size": 96, "num_kv_heads": 2}


def write_run(root: Path, model: ModelConfig, qat: dict[str, Any], dtype: str = "bf16") -> Path:
    """A checkpoint of a run with rounded weights, at step 7."""
    folder = write_checkpoint(root / "run", model)
    config = Config.model_validate({"train": {"steps": 20}, "precision": {"dtype": dtype, "qat": qat}})
    (folder / "config.yaml").write_text(dump_config(config))
    return root / "run"


def with_scales(model: Architecture, qat: dict[str, Any]) -> Architecture:
    """The model, with scales where these are trained."""
    if not qat.get("learned_scales"):
        return model
    scales = WeightScales(
        bits=qat["bits"], group_size=qat["group_size"], first_block=0, last_block=model.num_layers - 1
    )
    return model.model_copy(update={"weight_scales": scales})


def own_logits(model: ModelConfig, qat: dict[str, Any], tokens: Tensor) -> Tensor:
    """Of megalite's forward pass in fp32, which rounds the weights that are trained."""
    precision = Qat(QatConfig(**qat), model.num_layers, keep_weights=False)
    parts = choose_parts(model, "cpu", torch.float32, precision)
    stage = Stage(StageSpec(model, parts=parts), RandomWeights()).eval()
    with torch.no_grad():
        return stage.logits(tokens.flatten(), documents_of(tokens))


@pytest.mark.parametrize(
    ("fields", "qat"),
    [
        (WIDE, INT4),
        ({**GPT, "positions": "rope", "parallel_residual": True, "rope": {"fraction": 0.5}}, ROWS),
        ({**WIDE, "ffn_hidden_size": 128}, LEARNED),
    ],
    ids=["Llama, int4", "GPT-NeoX, int8", "Llama, scales that are trained"],
)
@pytest.mark.usefixtures("reload_here")
def test_logits_in_transformers_are_those_of_the_forward_pass(fields, qat, tmp_path: Path):
    """Exported as numbers and as integers, transformers computes what megalite's own rounding forward pass does; a
    folder of integers is smaller, and its weights are those of the other, bit by bit."""
    model, tokens = with_scales(tiny_model(**fields), qat), torch.arange(20).reshape(2, 10)
    run = write_run(tmp_path, model, qat, dtype="fp32")
    wanted = own_logits(model, qat, tokens)
    for kind in ("fp32", QUANTIZED):
        done = to_hugging_face(run, tmp_path / kind, dtype=kind)
        assert done.verdict.max_difference <= verify.LOGIT_TOLERANCE
        with torch.no_grad():
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path / kind)(tokens).logits.flatten(0, 1)
        assert (theirs - wanted).abs().max() < verify.LOGIT_TOLERANCE
    sizes = [(tmp_path / kind / "model.safetensors").stat().st_size for kind in ("fp32", QUANTIZED)]
    assert sizes[1] < 0.6 * sizes[0]
    found = json.loads((tmp_path / QUANTIZED / "config.json").read_text())["quantization_config"]
    (group,) = found["config_groups"].values()
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (qat["bits"], qat["group_size"])


@pytest.mark.usefixtures("reload_here")
def test_numbers_are_on_the_grid(tmp_path: Path):
    """A bf16 export of a bf16 run has the very numbers of its forward pass: 15 in each group, and the blocks that are
    kept have all of theirs. Evaluation reads the same, and runs go on from what was trained."""
    model = tiny_model(**WIDE)
    run = write_run(tmp_path, model, INT4)
    to_hugging_face(run, tmp_path / "hf", dtype="bf16")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    for index in range(model.num_layers):
        groups = stored[f"model.layers.{index}.mlp.down_proj.weight"].float().unflatten(1, (-1, 32))
        most = max(len(group.unique()) for row in groups for group in row)
        assert (most <= 15) is (index >= 1)
    saved = open_model(run)
    rounded = RoundedSource(RandomWeights(), RunRounding(QatConfig(**INT4), torch.bfloat16, model.num_layers))
    assert_same_weights(saved.weights, rounded, model)
    name = "blocks.1.mlp.down.weight"
    whole = weight_table(model)[name].local(1, 0)
    assert torch.equal(
        saved.weights.read(weight_table(model)[name], whole).bfloat16(),
        stored["model.layers.1.mlp.down_proj.weight"],
    )


def test_integers_are_packed_as_compressed_tensors_does():
    """Every value of either width, in rows that are no whole words; and back."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        half = 2 ** (bits - 1)
        values = torch.arange(-half, half).repeat(3)[: 5 * (half // 2 + 1)].view(5, -1).to(torch.int8)
        words = pack(values.to(torch.int16) + half, bits)
        assert torch.equal(words, helpers.pack_to_int32(values, bits))
        assert torch.equal(unpack(words, bits, values.shape[1]) - half, values.to(torch.int16))


REFUSED = {
    "Conv1D": ({**GPT, "positions": "learned"}, ROWS, "GPT2LMHeadModel has no linear layers but Conv1D"),
    "experts": (DEEPSEEK_V3, ROWS, "has the experts of a block in one tensor"),
    "zero points": (WIDE, {**INT4, "symmetric": False}, "precision.qat.symmetric=false has zero points"),
    "muP": ({**WIDE, "mup": {"base_hidden_size": 32, "base_head_dim": 8}}, INT4, "muP's factors"),
    "not yet": (WIDE, {**INT4, "start_step": 8}, "rounds no weights, or not yet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused_by_name(name, tmp_path: Path):
    """Before anything is written."""
    fields, qat, why = REFUSED[name]
    run = write_run(tmp_path, tiny_model(**fields), qat)
    with pytest.raises(ConversionError, match=why):
        to_hugging_face(run, tmp_path / "hf", dtype=QUANTIZED)
    assert not (tmp_path / "hf").exists()


@pytest.mark.usefixtures("reload_here")
def test_a_wrong_word_is_noticed(tmp_path: Path, monkeypatch, capsys):
    """Numbers that read back otherwise are refused; so is a number format beside --quantized, and a machine on which
    nothing could be proven."""
    run = write_run(tmp_path, tiny_model(**WIDE), INT4)
    with monkeypatch.context() as patch:
        patch.setattr(packed, "pack", lambda unsigned, bits: pack(unsigned, bits) ^ 1)
        with pytest.raises(ConversionError, match="reads back from"):
            to_hugging_face(run, tmp_path / "hf", dtype=QUANTIZED)
    with monkeypatch.context() as patch:
        patch.setattr(packed, "PACKAGE", "no_such_package")
        with pytest.raises(ConversionError, match="needs compressed-tensors"):
            to_hugging_face(run, tmp_path / "hf", dtype=QUANTIZED)
    with pytest.raises(SystemExit) as left:
        main(["convert", "to-hf", str(run), str(tmp_path / "hf"), "--dtype", "bf16", "--quantized"])
    assert left.value.code == 2
    assert "leave one out" in capsys.readouterr().err
