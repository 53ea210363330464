"""Hugging Face folders as transformers writes them, read into checkpoints and into any rank's part; and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.architecture.weights import Rectangle, weight_table
from megalite.checkpoint.hf.importer import HuggingFaceWeights, model_config
from megalite.checkpoint.hf.to_checkpoint import from_hugging_face
from megalite.checkpoint.reader import CheckpointReader
from megalite.cli.main import main
from megalite.errors import CheckpointError, ConversionError
from tests.checkpoint.foreign import (
    FOREIGN,
    LLAMA3,
    LONGROPE,
    LONGROPE_OF_3,
    OF_DEEPSEEK,
    ONE_ABOVE,
    ONE_POSITION,
    YARN,
    edit_config,
    edit_tensors,
    save_foreign,
    without_theta,
)
from tests.checkpoint.hf_kit import (
    assert_same_weights,
    reload_here,  # noqa: F401 (a fixture)
    tiny_model,
)


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.usefixtures("reload_here")
def test_models_saved_by_transformers(name: str, tmp_path: Path):
    """A folder that transformers wrote becomes a checkpoint with equal logits, told from its own config alone."""
    save_foreign(tmp_path / "hf", name, max_shard_size="50KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    done = from_hugging_face(tmp_path / "hf", tmp_path / "out")
    assert done.checkpoint == tmp_path / "out" / "step-0000000"
    assert CheckpointReader(done.checkpoint).verify() == []
    assert_same_weights(
        HuggingFaceWeights(tmp_path / "hf"), CheckpointReader(done.checkpoint).source("weight"), done.model
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "phi3, longrope",
            {
                "auto_map": {
                    "AutoConfig": "microsoft/Phi-4-mini-instruct--configuration_phi3.Phi3Config",
                    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
                    "AutoTokenizer": "Xenova/gpt-4o",
                },
                **dict.fromkeys(("attention_bias", "lm_head_bias", "mlp_bias"), False),
                **dict.fromkeys(("full_attn_mod", "interpolate_factor"), 1),
            },
        ),
    ],
)
@pytest.mark.usefixtures("reload_here")
def test_published_folders(name: str, changes: dict, tmp_path: Path):
    """A folder that still names the code which its class was made from is read; transformers, too, takes the class."""
    save_foreign(tmp_path / "hf", name)
    edit_config(tmp_path / "hf", **changes)
    from_hugging_face(tmp_path / "hf", tmp_path / "out")


@pytest.mark.parametrize("name", ["llama", "llama, all biases", "gpt_neox", "gpt2", "phi3", "deepseek_v3", "gpt_oss"])
def test_any_rectangle(name: str, tmp_path: Path):
    """Each rank's part, and odd ones besides, equal the same part of the whole weight, however it is fused."""
    save_foreign(tmp_path, name)
    source = HuggingFaceWeights(tmp_path)
    for weight in weight_table(source.model).values():
        everything = source.read(weight, weight.local(1, 0))
        rectangles = [weight.local(tp, rank) for tp in (2, 4) for rank in range(tp)]
        rectangles.append(
            Rectangle(tuple(size // 3 for size in weight.shape), tuple(size // 2 for size in weight.shape))
        )
        for rectangle in rectangles:
            assert torch.equal(source.read(weight, rectangle), everything[rectangle.slices]), (weight.name, rectangle)


@pytest.mark.usefixtures("reload_here")
def test_folders_of_older_versions(tmp_path: Path):
    """Only the keys of transformers 4, buffers that it saved, a tied head stored twice: all read as today's."""
    model = save_foreign(tmp_path / "hf", "llama 3.1")
    old = {"rope_theta": 5e5, "rope_scaling": without_theta(LLAMA3)}
    edit_config(tmp_path / "hf", "rope_parameters", "dtype", torch_dtype="float32", **old)
    embedding = model.model.embed_tokens.weight.detach().clone()
    buffer = {"model/layers/0/self_attn/rotary_emb/inv_freq": torch.ones(6), "lm_head/weight": embedding}
    edit_tensors(tmp_path / "hf", **buffer)
    done = from_hugging_face(tmp_path / "hf", tmp_path / "out")
    assert done.model.rope.scaling.type == "llama3"
    assert done.model.rope.theta == 5e5


@pytest.mark.usefixtures("reload_here")
def test_names_without_the_base_prefix(tmp_path: Path):
    """GPT-2 as published names its tensors without `transformer.`, and stores its masks."""
    save_foreign(tmp_path / "hf", "gpt2")
    path = tmp_path / "hf" / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 40, 40)}, path, metadata={"format": "pt"})
    assert from_hugging_face(tmp_path / "hf", tmp_path / "out").architecture == "GPT2LMHeadModel"


@pytest.mark.usefixtures("reload_here")
def test_smaller_formats_are_read_exactly(tmp_path: Path):
    """bf16 weights become fp32 master weights of the same value."""
    model = save_foreign(tmp_path / "hf").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    from_hugging_face(tmp_path / "hf", tmp_path / "out")
    source = HuggingFaceWeights(tmp_path / "hf")
    row = weight_table(source.model)["blocks.1.mlp.gate.weight"]
    assert torch.equal(source.read(row, row.local(1, 0)), model.model.layers[1].mlp.gate_proj.weight.detach().float())


HALF_LINEAR = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}

CONFIG_REFUSALS = [
    ("llama", {"model_type": "phimoe"}, "model_type is 'phimoe'"),
    ("mixtral", {"num_experts": 4}, "num_experts: found 3 and 4, the other as num_local_experts"),
    ("mixtral", {"rope_parameters": YARN}, "head_dim: found null beside yarn, where transformers wants the number"),
    ("mixtral", {"num_experts_per_tok": 4}, "top_k: a token cannot go to 4 of num_experts=3"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers: leaves blocks with experts at uneven"),
    ("qwen3_moe", {"mlp_only_layers": ["full_attention"]}, "mlp_only_layers: found 'full_attention', expected numbers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: found 0, expected 1 or more"),
    ("qwen3_moe", {"n_group": 4}, "n_group: found 4, a key that megalite does not know"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window: found true"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "layer_types: found windows"),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps: found 1e-05, the norms of latents have 1e-06"),
    ("deepseek_v3", {"head_dim": 12}, "head_dim: found 12, expected 8 of a model with latents"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads: found 2, expected 4"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: found 'softmax'"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank: found 0, expected 1 or more"),
    ("deepseek_v3", {"head_dim": None}, "head_dim: found null, expected a whole number"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias: found true"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: found 2"),
    ("deepseek_v3, yarn", {"rope_scaling": {**OF_DEEPSEEK, "mscale_all_dim": 1.0}}, "mscale_all_dim and factor differ"),
    (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
        "stands beside",
    ),
    ("deepseek_v3", {"n_routed_experts": "6"}, "n_routed_experts: found '6', expected"),
    ("deepseek_v3", {"n_group": 6}, "n_group: found 6, whose best two experts are summed"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: found true"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group: topk_method 'group_limited_greedy' needs it"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit: found 5.0, megalite has only 7.0"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias: found false"),
    ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types: found 1 of 2 layers"),
    ("gpt_oss", {"rope_parameters": None, "rope_scaling": None}, "rope_scaling: missing, where transformers has a"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: found 8.0"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act: found 'gelu'"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type is 'dynamic'"),
    ("llama", {"rope_theta": 7.0}, "disagree"),
    ("llama 3.1", {"rope_theta": 5e5}, "disagree"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: found 0.5"),
    ("llama", {"mlp_bias": True}, "mlp_bias: found true"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantized"),
    ("llama", {"hidden_size": None}, "hidden_size: found null, expected a whole number"),
    ("llama", {"num_hidden_layers": -1}, "num_layers"),
    ("llama", {"rope_parameters": 3}, "rope_parameters: found 3, expected a group"),
    ("llama", {"is_causal": False}, "is_causal: found false, a key that megalite does not know"),
    ("qwen2", {"is_causal": False}, "is_causal"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings: found 1, expected true or false"),
    ("llama", {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, "disagree"),
    ("llama 3.1", {"original_max_position_embeddings": 32}, "found 16, and 32 outside the group"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types: found .* does not know"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("llama", {"rope_parameters": {"rope_type": "default", "gamma": 2.0}}, "parameters.gamma"),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "mine.Llama"}}, "auto_map: the folder brings code"),
    ("gpt_neox", {"rope_theta": 5e5}, "this class goes by rotary_emb_base"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "there is no window"),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, "mixes"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
    ("phi3", {"model_type": "phi3small"}, "model_type is 'phi3small', an architecture that megalite does not have"),
    ("phi3", {"model_type": "phimoe"}, "model_type is 'phimoe'"),
    ("phi3", {"model_type": "phi3_v"}, "model_type is 'phi3_v'"),
    ("phi3", {"embd_layer": {"image_embd_layer": {}}}, "embd_layer: found .* does not know"),
    ("phi3", {"layer_types": ["full_attention"] * 2}, "layer_types: found .* does not know"),
    ("phi3", {"mup_width_multiplier": 8.0}, "mup_width_multiplier: found 8.0"),
    ("phi3", {"hidden_act": "gelu"}, "hidden_act: found 'gelu'"),
    ("phi3", {"attention_bias": True}, "attention_bias: found true, megalite has only false"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod: found 2"),
    ("phi3", {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi4"}}, "code of its own, modeling_phi3.Phi4"),
    ("phi3", {"rope_scaling": {"type": "su", **LONGROPE_OF_3}}, "disagree"),
    ("phi3", {"rope_parameters": YARN}, "rope_scaling: found 'yarn', this class has only 'longrope'"),
    ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling: found 'linear'"),
    ("phi3, longrope", {"rope_scaling": {**LONGROPE_OF_3, "type": "su"}}, "rope_type is 'su'"),
    ("phi3, longrope", {"partial_rotary_factor": 1.0}, "disagree"),
    ("phi3, longrope", {"head_dim": 16}, "head_dim: found 16, beside longrope it can only be 12"),
    ("gemma2", {"rope_parameters": {**HALF_LINEAR, "rope_theta": 1e4}}, "found 0.5, this class rotates whole heads"),
    ("gemma3_text", {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, "disagree"),
    ("gemma3_text", {"rope_parameters": {"full_attention": HALF_LINEAR}}, "this class rotates whole heads"),
    ("gemma2", {"num_hidden_layers": 10**12}, "num_hidden_layers: found 1000000000000, expected at most 10000"),
    ("qwen2", {"num_hidden_layers": 10**12}, "num_hidden_layers: found 1000000000000"),
    ("llama, longrope", {"rope_scaling": {**LONGROPE, "factor": 1.5}}, "factor: found 1.5.*; 4 takes 2.5 of"),
    ("llama, longrope", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "found 16 outside .*; 4 takes 40"),
    ("olmo2", {"head_dim": None}, "head_dim: found null, expected a whole number"),
    ("deepseek_v2, dense", {"n_shared_experts": None}, "n_shared_experts: found null, expected a whole number"),
    ("qwen2_moe", {"layer_types": []}, "layer_types: found 0 of 2 layers"),
    ("llama, longrope", {"max_position_embeddings": 10**400}, "max_position_embeddings: found 10+.*beyond 2"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: found nan"),
    ("llama, longrope", {"rope_parameters": ONE_POSITION, **ONE_ABOVE}, "original_max_positions: 1, and null"),
    ("llama, yarn", {"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope.theta: 1 gives all pairs one frequency"),
    ("llama, yarn", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": -20.0}}, "mscale: found 1.0"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
]


@pytest.mark.parametrize(("name", "changes", "message"), CONFIG_REFUSALS)
def test_models_that_megalite_has_not(name: str, changes: dict, message: str, tmp_path: Path):
    """What changes the function and has no counterpart is refused by its key."""
    save_foreign(tmp_path, name)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConversionError, match=message):
        model_config(tmp_path)


def test_all_problems_of_a_config_at_once(tmp_path: Path):
    """One message names every setting in the way."""
    save_foreign(tmp_path, "gpt_neox")
    edit_config(tmp_path, "vocab_size", hidden_act="relu", attention_bias=False)
    with pytest.raises(ConversionError, match=r"(?s)vocab_size.*attention_bias.*hidden_act"):
        model_config(tmp_path)


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _shard_gone(folder: Path) -> None:
    weight_map = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _fused(folder: Path, *, missing: int | None = None, unfused: bool = False) -> None:
    """A Phi-3 without a block's fused matrix, or with a part of it besides."""
    save_foreign(folder, "phi3")
    name = "model.layers.{}.self_attn.qkv_proj.weight"
    if missing is not None:
        edit_tensors(folder, name.format(missing))
    if unfused:
        edit_tensors(folder, **{"model/layers/0/self_attn/q_proj/weight": torch.ones(48, 48)})


WEIGHT_REFUSALS = [
    (_pickle_only, "pickle"),
    (_no_weights, "neither model.safetensors nor"),
    (_truncated, "cannot be read"),
    (_shard_gone, "model-00002-of-00002.safetensors"),
    (lambda folder: edit_tensors(folder, "lm_head.weight"), "missing: lm_head.weight"),
    (lambda folder: edit_tensors(folder, **{"vision/weight": torch.ones(2)}), "no place for vision.weight"),
    (lambda folder: edit_config(folder, tie_word_embeddings=True), "transformers 4 ignores"),
    (lambda folder: _fused(folder, missing=1), "missing: model.layers.1.self_attn.qkv_proj.weight"),
    (lambda folder: _fused(folder, unfused=True), "no place for model.layers.0.self_attn.q_proj.weight"),
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
]


@pytest.mark.parametrize(("damage", "message"), WEIGHT_REFUSALS)
def test_folders_that_are_not_whole(damage, message: str, tmp_path: Path):
    """Pickles, missing, damaged, ambiguous or unknown parts of a folder are named when it is opened."""
    save_foreign(tmp_path)
    damage(tmp_path)
    with pytest.raises((ConversionError, CheckpointError), match=message):
        HuggingFaceWeights(tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "tensor", "message"),
    [
        ("llama", "model/norm/weight", torch.ones(47), r"norm.weight is \[47\], final_norm.weight needs \[48\]"),
        ("llama", "model/norm/weight", torch.ones(48).byte(), "U8"),
        (
            "phi3",  # as if it had as many keys and values as queries
            "model/layers/0/self_attn/qkv_proj/weight",
            torch.ones(144, 48),
            r"qkv_proj.weight is \[144, 48\], blocks.0.attention.q.weight needs \[96, 48\]",
        ),
        ("llama", "model/norm/weight", torch.full((48,), torch.nan), "final_norm.weight holds NaN or infinite numbers"),
        ("gpt_oss", "model/layers/1/self_attn/sinks", torch.full((4,), -torch.inf), "sinks holds NaN or infinite"),
    ],
)
def test_tensors_of_another_shape_or_kind(family: str, name: str, tensor: torch.Tensor, message: str, tmp_path: Path):
    """A tensor that is not what the config says is named with both shapes, and nothing is left behind."""
    save_foreign(tmp_path / "hf", family)
    edit_tensors(tmp_path / "hf", **{name: tensor})
    with pytest.raises((CheckpointError, ConversionError), match=message):
        from_hugging_face(tmp_path / "hf", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_weights_for_another_model(tmp_path: Path):
    """A run whose config computes something else from the same weights is refused with every difference."""
    save_foreign(tmp_path)
    ours = tiny_model(num_layers=2, num_kv_heads=2, norm_eps=1e-6)
    HuggingFaceWeights(tmp_path, ours.model_copy(update={"dropout": 0.1, "max_positions": 20}))
    with pytest.raises(ConversionError, match=r"(?s)model.norm_eps is 1e-05, the weights have 1e-06.*model.rope"):
        HuggingFaceWeights(tmp_path, tiny_model(num_layers=2, num_kv_heads=2, rope={"theta": 500000.0}))


@pytest.mark.usefixtures("reload_here")
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    """The command says what it checked and where the model section is, and leaves with 2 when it refuses."""
    save_foreign(tmp_path / "hf")
    command = ["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "out")]
    for expected_code, expected_text in ((0, "config.yaml"), (2, "--overwrite")):
        with pytest.raises(SystemExit) as left:
            main(command)
        assert left.value.code == expected_code
        said = capsys.readouterr()
        assert expected_text in said.out + said.err


@pytest.mark.usefixtures("reload_here")
def test_moments_are_refused(tmp_path: Path):
    """An imported checkpoint has weights only: whoever asks it for moments is told, not given zeros."""
    save_foreign(tmp_path / "hf")
    done = from_hugging_face(tmp_path / "hf", tmp_path / "out")
    row = weight_table(done.model)["final_norm.weight"]
    with pytest.raises(CheckpointError, match="weights only"):
        CheckpointReader(done.checkpoint).source("exp_avg").read(row, row.local(1, 0))
