"""Checkpoints to Hugging Face folders: every family, every option, and what is refused."""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megalite.architecture.weights import Rectangle, Weight
from megalite.checkpoint.hf import exporter, memory, verify
from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.checkpoint.hf.families import deepseek_v2, phi3
from megalite.checkpoint.hf.families.registry import choose_family
from megalite.checkpoint.hf.to_checkpoint import from_hugging_face
from megalite.checkpoint.merge import merge
from megalite.checkpoint.reader import CheckpointReader
from megalite.cli.main import main
from megalite.config.load import dump_config
from megalite.config.model_match import Match, match
from megalite.config.schema import Config, RopeScaling
from megalite.errors import CheckpointError, ConversionError
from megalite.model.initialize import fill
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage, documents_of
from tests.checkpoint.hf_kit import (
    FAMILIES,
    LONG,
    LONGROPE,
    RandomWeights,
    assert_same_weights,
    reload_here,  # noqa: F401 (a fixture)
    tiny_model,
    write_checkpoint,
)

PHI_SHARPNESS = RopeScaling(**LONGROPE).sharpness
ROUNDING = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("reload_here")
def test_round_trip_of_every_family(name: str, tmp_path: Path):
    """A checkpoint cut four ways becomes the right class with equal logits, and comes back with equal bits."""
    model = tiny_model(**FAMILIES[name])
    write_checkpoint(tmp_path / "run", model)
    done = to_hugging_face(tmp_path / "run", tmp_path / "hf")
    assert done.verdict.max_difference <= verify.LOGIT_TOLERANCE
    assert done.verdict.num_blocks == model.num_layers
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == name.split(",")[0]
    assert config["dtype"] == config["torch_dtype"] == "float32"

    back = from_hugging_face(tmp_path / "hf", tmp_path / "back")
    assert match(back.model, model) == Match((), ())
    assert back.model.model_copy(update={"rope": model.rope}) == model.model_copy(update={"dropout": 0.0})
    assert_same_weights(CheckpointReader(back.checkpoint).source("weight"), RandomWeights(), model)


@pytest.mark.usefixtures("reload_here")
def test_mup_is_multiplied_into_the_weights(tmp_path: Path):
    """What is exported is the usual model; its logits in transformers are those of the muP model, tied table or not."""
    mup = {"base_hidden_size": 12, "base_head_dim": 3, "embedding_multiplier": 3.0, "output_multiplier": 2.0}
    for tied in (False, True):
        model = tiny_model(num_kv_heads=2, tie_embeddings=tied, mup=mup)
        write_checkpoint(tmp_path / f"run-{tied}", model)
        to_hugging_face(tmp_path / f"run-{tied}", tmp_path / f"hf-{tied}")
        stage = Stage(StageSpec(model))
        fill(stage, RandomWeights())
        tokens = torch.arange(20).reshape(2, 10)
        with torch.no_grad():
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path / f"hf-{tied}")(tokens).logits.flatten(0, 1)
            ours = stage.logits(tokens.flatten(), documents_of(tokens))
        assert (theirs - ours).abs().max() < verify.LOGIT_TOLERANCE


def test_in_a_fresh_process_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    """The command verifies in a real subprocess, takes the newest checkpoint of a run, and says what it checked."""
    model = tiny_model(num_kv_heads=2)
    write_checkpoint(tmp_path / "run", model, step=3)
    newest = write_checkpoint(tmp_path / "run", model, step=11)
    (newest / "config.yaml").write_text(dump_config(Config.model_validate({"train": {"steps": 20}})))
    with pytest.raises(SystemExit) as left:
        main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "hf"), "--dtype", "bf16"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert "step-0000011" in said
    assert "LlamaForCausalLM" in said
    assert "fresh process" in said
    assert "NOTE: Exported without a tokenizer" in said
    assert "WARNING: This is step 11 of a run that goes to step 20" in said
    assert "| training step | 11 of 20 |" in (tmp_path / "hf" / "README.md").read_text()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.usefixtures("reload_here")
def test_smaller_formats_are_rounded_once(dtype: str, tmp_path: Path):
    """A bf16 or fp16 export holds the rounded master weights, and passes against megalite's weights rounded alike."""
    model = tiny_model(num_kv_heads=2)
    write_checkpoint(tmp_path, model)
    done = to_hugging_face(tmp_path, tmp_path / "hf", dtype=dtype)
    assert done.verdict.max_difference <= verify.LOGIT_TOLERANCE
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {ROUNDING[dtype]}


@pytest.mark.usefixtures("reload_here")
def test_shards_and_index(tmp_path: Path):
    """Shards keep to the size asked for, the index names every tensor in order, and the sum is that of one file."""
    model = tiny_model(num_kv_heads=2)
    write_checkpoint(tmp_path, model)
    limit = 30_000
    done = to_hugging_face(tmp_path, tmp_path / "hf", max_shard_bytes=limit)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    names = list(index["weight_map"])
    assert names == sorted(names)
    assert index["metadata"] == {
        "total_parameters": done.written.num_parameters,
        "total_size": 4 * done.written.num_parameters,
    }
    assert len(done.written.files) > 2
    for file in done.written.files:
        with safe_open(tmp_path / "hf" / file, framework="pt") as shard:
            tensors = [shard.get_tensor(name) for name in names if index["weight_map"][name] == file]
            assert shard.metadata() == {"format": "pt"}
        assert sum(tensor.nbytes for tensor in tensors) <= limit
    assert done.written.files[0] == f"model-00001-of-{len(done.written.files):05d}.safetensors"


@pytest.mark.usefixtures("reload_here")
def test_tied_head_is_left_out_and_vocabulary_is_true(tmp_path: Path):
    """A tied export has no head, and no row of the padding that tensor parallelism adds."""
    model = tiny_model(tie_embeddings=True)
    write_checkpoint(tmp_path, model)
    to_hugging_face(tmp_path, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert stored["model.embed_tokens.weight"].shape == (101, 48)


@pytest.mark.usefixtures("reload_here")
def test_first_blocks_only(tmp_path: Path):
    """For models larger than memory fewer blocks are run, and that is what the verdict says."""
    write_checkpoint(tmp_path, tiny_model(**FAMILIES["qwen2, window"]))
    done = to_hugging_face(tmp_path, tmp_path / "hf", verify_blocks=1)
    assert done.verdict.num_blocks == 1


def test_too_large_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model that does not fit into memory is refused with the number of blocks that would fit."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 400_000)
    write_checkpoint(tmp_path, tiny_model())
    with pytest.raises(ConversionError, match=r"--verify-blocks 2$"):
        to_hugging_face(tmp_path, tmp_path / "hf")


class _Damaged(RandomWeights):
    """One number of one weight replaced."""

    def __init__(self, name: str, number: float):
        self.name, self.number = name, number

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        part = super().read(weight, rectangle).clone()
        if weight.name == self.name:
            part.view(-1)[0] = self.number
        return part


@pytest.mark.parametrize(("number", "dtype"), [(float("nan"), "fp32"), (float("inf"), "bf16"), (1e5, "fp16")])
def test_numbers_that_are_not_finite(number: float, dtype: str, tmp_path: Path):
    """NaN, infinity and what overflows the format asked for are refused with the weight's name, nothing left behind."""
    name = "blocks.1.mlp.up.weight"
    write_checkpoint(tmp_path, tiny_model(), source=_Damaged(name, number))
    with pytest.raises(ConversionError, match=name):
        to_hugging_face(tmp_path, tmp_path / "hf", dtype=dtype)
    assert not list(tmp_path.glob("hf*"))


def _flip_lowest_bit(folder: Path) -> None:
    """Damage one number by one part in ten million."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 5] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})


def _edit_config(**changes: object):
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def _drop_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


NEW_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_lowest_bit, "blocks.1.mlp.up.weight reads back"),
        (_drop_tensor, "model.norm.weight"),
        (_edit_config(**NEW_ROPE), "rope"),
        (_edit_config(rms_norm_eps=1e-3), "norm_eps"),
    ],
)
@pytest.mark.usefixtures("reload_here")
def test_damage_after_writing(damage, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A flipped low bit, a lost tensor or a changed setting is caught before the folder gets its name."""
    write_checkpoint(tmp_path, tiny_model())

    def verify_damaged(folder: Path, *args, **options):
        damage(folder)
        return verify.verify(folder, *args, **options)

    monkeypatch.setattr(exporter, "verify", verify_damaged)
    with pytest.raises((ConversionError, CheckpointError), match=message):
        to_hugging_face(tmp_path, tmp_path / "hf")
    assert not list(tmp_path.glob("hf*"))


@pytest.mark.usefixtures("reload_here")
def test_transformers_meaning_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """When all bits and settings agree and transformers still computes another model, the logits tell."""
    write_checkpoint(tmp_path, tiny_model(num_kv_heads=2))
    rotate = "transformers.models.llama.modeling_llama.rotate_half"
    monkeypatch.setattr(rotate, lambda x: torch.cat((x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1))
    with pytest.raises(ConversionError, match="transformers computes another model"):
        to_hugging_face(tmp_path, tmp_path / "hf")
    assert not list(tmp_path.glob("hf*"))


FEW_EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}


@pytest.mark.parametrize(
    ("fields", "nearest", "reason"),
    [
        ({"rope": {"fraction": 0.5}, "qk_norm": True}, "Qwen3ForCausalLM", "model.rope.fraction is 0.5, it needs 1.0"),
        ({"norm": "layernorm"}, "LlamaForCausalLM", "model.norm is layernorm, it needs rmsnorm"),
        ({"qk_norm": True, "bias": "all"}, "LlamaForCausalLM", "model.qk_norm is True, it needs False"),
        ({**FAMILIES["gpt2"], "num_kv_heads": 2}, "GPT2LMHeadModel", "model.num_kv_heads is 2, it needs num_heads"),
        ({**FAMILIES["olmoe"], "head_dim": 24}, "Qwen3MoeForCausalLM", "model.qk_norm is whole, it needs True"),
        ({"bias": "qkv", "moe": FEW_EXPERTS}, "Qwen2ForCausalLM", "model.moe is set, it needs null"),
        ({**FAMILIES["gpt_neox"], "bias": "none"}, "GPTNeoXForCausalLM", "model.bias is none, it needs all"),
    ],
)
def test_models_without_a_class(fields: dict, nearest: str, reason: str):
    """A combination that no class represents is refused with the nearest class and the settings in the way."""
    with pytest.raises(ConversionError, match=f"nearest is {nearest}") as refused:
        choose_family(tiny_model(**fields))
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"max_positions": 500}, "it takes max_positions / original_max_positions = 6.66"),
        ({"rope": {"scaling": {**LONGROPE, "attention_factor": 2.0}}}, "attention_factor=2.0, it takes"),
        ({"rope": {"scaling": {**LONGROPE, "attention_factor": PHI_SHARPNESS}}}, ""),
        ({"head_dim": 20}, "model.head_dim is 20, with longrope it needs hidden_size / num_heads"),
    ],
)
def test_longrope_of_phi3(fields: dict, reason: str):
    """Its factor is not said but derived, and heads of another width are refused by transformers beside it."""
    model = tiny_model(**{"rope": {"scaling": LONGROPE}, **LONG, **fields})
    assert reason in "; ".join(phi3.FAMILY.refuses(model))
    assert bool(reason) == bool([*phi3.FAMILY.refuses(model)])


@pytest.mark.usefixtures("reload_here")
def test_output_folders(tmp_path: Path):
    """A folder with something in it is kept; --overwrite replaces an older model, and nothing but a model."""
    write_checkpoint(tmp_path, tiny_model())
    out = tmp_path / "hf"
    to_hugging_face(tmp_path, out)
    (out / "mark").touch()
    with pytest.raises(ConversionError, match="--overwrite"):
        to_hugging_face(tmp_path, out)
    assert (out / "mark").exists()
    to_hugging_face(tmp_path, out, overwrite=True)
    assert not (out / "mark").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("hf")] == ["hf"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").touch()
    with pytest.raises(ConversionError, match="not a model's folder"):
        to_hugging_face(tmp_path, tmp_path / "thesis", overwrite=True)
    with pytest.raises(ConversionError, match="checkpoints: has in it what is read here"):
        to_hugging_face(tmp_path, tmp_path / "checkpoints", overwrite=True)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disk that becomes full in the middle is named, and nothing is left on it."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_checkpoint(tmp_path, tiny_model())
    monkeypatch.setattr("megalite.checkpoint.tensor_file.HashedFile.write", full)
    with pytest.raises(ConversionError, match="disk is full"):
        to_hugging_face(tmp_path, tmp_path / "hf")
    assert not list(tmp_path.glob("hf*"))


def test_places_that_cannot_be_written(tmp_path: Path):
    """What is below a file is no place for a folder, which is said."""
    folder = write_checkpoint(tmp_path, tiny_model())
    (tmp_path / "file").touch()
    with pytest.raises(ConversionError, match="not written"):
        to_hugging_face(tmp_path, tmp_path / "file" / "hf")
    with pytest.raises(CheckpointError, match="not written"):
        merge(folder, tmp_path / "file" / "merged")
    assert (tmp_path / "file").is_file()


@pytest.mark.parametrize("damage", [b"\0", b"\xff\xfe", b": [", b"a: " + b"[" * 1000], ids=range(4))
def test_a_damaged_config(damage: bytes, tmp_path: Path):
    folder = write_checkpoint(tmp_path, tiny_model())
    (folder / "config.yaml").write_bytes(b"run: {}\n" + damage)
    with pytest.raises(CheckpointError, match=r"config\.yaml: damaged"):
        to_hugging_face(tmp_path, tmp_path / "hf")
    assert not list(tmp_path.glob("hf*"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mla": {"qk_nope_head_dim": 5}}, "qk_nope_head_dim is 5"),
        ({"mla": {"kv_lora_rank": 15}}, "kv_lora_rank is 15"),
        ({"hidden_size": 32, "num_heads": 6}, "hidden_size=32 is no multiple of num_heads=6"),
    ],
)
def test_what_deepseek_v2_cannot_be(fields: dict, reason: str):
    """Its class refuses it, or fails when it computes."""
    given = {**FAMILIES["deepseek_v2"], **fields}
    given["mla"] = {**FAMILIES["deepseek_v2"]["mla"], **fields.get("mla", {})}
    assert reason in "; ".join(deepseek_v2.FAMILY.refuses(tiny_model(**given)))
    assert not [*deepseek_v2.FAMILY.refuses(tiny_model(**FAMILIES["deepseek_v2"]))]


@pytest.mark.usefixtures("reload_here")
def test_longrope_of_gemma3(tmp_path: Path):
    """Both generations of transformers find where it began."""
    scaling = {"type": "longrope", "factor": 2.0, "original_max_positions": 20}
    scaling |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = tiny_model(**{**FAMILIES["gemma3_text"], "rope": {"theta": 1e6, "scaling": scaling}})
    write_checkpoint(tmp_path, model)
    to_hugging_face(tmp_path, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["original_max_position_embeddings"] == 20


def test_broken_checkpoints(tmp_path: Path):
    """No checkpoint at all, and one whose file was damaged, are named."""
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        to_hugging_face(tmp_path, tmp_path / "hf")
    folder = write_checkpoint(tmp_path, tiny_model())
    path = folder / "rank-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"rank-00002.safetensors: its checksum"):
        to_hugging_face(tmp_path, tmp_path / "hf")


@pytest.mark.usefixtures("reload_here")
def test_untrained_models_say_so(tmp_path: Path):
    """An export of step 0 is marked in its result and at the top of its card."""
    write_checkpoint(tmp_path, tiny_model(), step=0)
    done = to_hugging_face(tmp_path, tmp_path / "hf")
    assert any("not been trained" in alarm for alarm in done.alarms)
    assert "**This model has not been trained" in (tmp_path / "hf" / "README.md").read_text()


@pytest.mark.usefixtures("reload_here")
def test_transformers_alone_reads_the_folder(tmp_path: Path):
    """Without megalite, `from_pretrained` finds the class, the number format and no token ids of another vocabulary."""
    write_checkpoint(tmp_path, tiny_model(num_kv_heads=2))
    to_hugging_face(tmp_path, tmp_path / "hf", dtype="bf16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.bos_token_id is loaded.config.eos_token_id is None


def test_no_room_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They lie on another disk than what is converted, whoever of the two processes finds it full."""

    def run(command: list[str], **options) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 1, "", "SafetensorError: No space left on device (os error 28)\n")

    monkeypatch.setattr(verify.subprocess, "run", run)
    with pytest.raises(ConversionError, match=rf"{tmp_path}: temporary files .*No space left.*set TMPDIR"):
        verify._reload(tmp_path / "hf", tmp_path / "work")
    with pytest.raises(ConversionError, match=rf"{tmp_path}: temporary files .*set TMPDIR"):
        verify.ask(tmp_path / "away", tiny_model())


@pytest.mark.parametrize(("has_read", "said"), [(False, "cannot read hf"), (True, "reads, but cannot run, hf")])
def test_what_transformers_fails_at(has_read: bool, said: str, tmp_path: Path, monkeypatch):
    """A folder that it cannot read is told from a model that it cannot compute, and either with its own words."""

    def run(command: list[str], **options) -> subprocess.CompletedProcess:
        if has_read:
            (tmp_path / "loaded").touch()
        return subprocess.CompletedProcess(command, 1, "", "RuntimeError: strides must be multiples of 16 bytes\n")

    monkeypatch.setattr(verify.subprocess, "run", run)
    with pytest.raises(ConversionError, match=rf"{said} in a fresh process, and says:\nRuntimeError: strides"):
        verify._reload(tmp_path / "hf", tmp_path)
