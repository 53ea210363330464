"""Tiny models of every family, checkpoints of them without training, and transformers in this process."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight, stored_table
from megalite.checkpoint.format import (
    Manifest,
    Piece,
    Progress,
    TensorRecord,
    folder_name,
    hash_file,
    tensor_name,
    write_manifest,
)
from megalite.checkpoint.hf import reload
from megalite.checkpoint.hf.families.deepseek import scale_of, sharpness
from megalite.config.fill import fill_model
from megalite.config.plan import split_blocks
from megalite.config.schema import BatchConfig, ModelConfig
from megalite.corpus.corpus import Corpus
from megalite.corpus.recipe import DocumentSource
from megalite.corpus.stations.train_tokenizer import train_tokenizer
from megalite.model.initialize import WeightSource
from megalite.parallel.random import name_seed
from megalite.tokenizer.settings import TokenizerConfig

TP, PP = 2, 2

TOKENIZER_KINDS = ("sentencepiece-bpe", "sentencepiece-unigram", "byte-bpe")
TOKENIZER_SIZE = 420

TINY = {
    "hidden_size": 48,
    "num_layers": 3,
    "num_heads": 4,
    "ffn_hidden_size": 80,
    "vocab_size": 101,
    "max_positions": 40,
}
"""The vocabulary is no multiple of 64, so every layout pads it."""

GPT = {"norm": "layernorm", "activation": "gelu", "bias": "all"}
LLAMA3 = {"theta": 5e5, "scaling": {"type": "llama3", "factor": 8.0, "original_max_positions": 64}}
LONG = {"max_positions": 600}
"""Beyond the longest plain sequence of the verification."""

YARN = {"type": "yarn", "factor": 8.0, "original_max_positions": 75}
LONGROPE = {
    "type": "longrope",
    "factor": 8.0,
    "original_max_positions": 75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
LONGROPE_OF_3 = {**LONGROPE, "short_factor": [1.0, 1.2, 1.4], "long_factor": [1.0, 3.0, 5.0]}
GEMMA = {
    "norm": "zero_centered_rmsnorm",
    "norm_placement": "both",
    "activation": "geglu_tanh",
    "embedding_scale": 48**0.5,
    "tie_embeddings": True,
    "num_kv_heads": 2,
    "head_dim": 16,
    "sliding_window": 7,
}
MLA = {
    "norm_eps": 1e-6,
    "rope": {"interleaved": True},
    "mla": {
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
    },
}
DEEPSEEK = {**MLA, "moe": {"num_experts": 6, "top_k": 3, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 48}}
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "moe": {
        **DEEPSEEK["moe"],
        "first_dense": 1,
        "scores": "sigmoid",
        "scale": 2.5,
        "bias_rate": 0.0,
        "num_groups": 3,
        "top_groups": 2,
        "group_score": "sum_of_two",
    },
}
GPT_OSS = {
    "activation": "swiglu_clamped",
    "bias": "all",
    "num_kv_heads": 2,
    "attention_sinks": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
    "moe": {"num_experts": 3, "top_k": 2, "ffn_hidden_size": 32, "logit_bias": True},
}
EXPERTS = {"num_experts": 3, "top_k": 2, "ffn_hidden_size": 32}
GEMMA2_LAYERS = ["sliding_attention", "full_attention"]
GEMMA3 = {**GEMMA, "qk_norm": True, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 2},
    "llama, tied, llama3 scaling": {"tie_embeddings": True, "rope": LLAMA3, **LONG},
    "llama, linear scaling": {"rope": {"scaling": {"type": "linear", "factor": 4.0}}},
    "llama, wide heads": {"num_kv_heads": 2, "head_dim": 20},
    "llama, biases": {"bias": "all", "num_kv_heads": 2},
    "llama, attention's biases": {"bias": "attention", "num_kv_heads": 2},
    "mistral, window": {"num_kv_heads": 2, "sliding_window": 7},
    "mistral, heads that do not divide": {"num_heads": 10, "num_kv_heads": 2, "head_dim": 8},
    "qwen2": {"num_kv_heads": 2, "bias": "qkv"},
    "qwen2, window": {"num_kv_heads": 2, "bias": "qkv", "sliding_window": 9, "tie_embeddings": True},
    "qwen2, wide heads": {"num_kv_heads": 2, "bias": "qkv", "head_dim": 20},
    "qwen2, heads that do not divide": {"num_heads": 10, "num_kv_heads": 2, "head_dim": 8, "bias": "qkv"},
    "qwen3, attention's biases": {"bias": "attention", "qk_norm": True, "head_dim": 16},
    "qwen3": {"num_kv_heads": 2, "qk_norm": True, "head_dim": 16},
    "qwen3, tied, window": {"num_kv_heads": 2, "qk_norm": True, "sliding_window": 5, "tie_embeddings": True},
    "gpt_neox": {**GPT, "rope": {"theta": 2e4, "fraction": 0.5}},
    "gpt_neox, tied, llama3 scaling": {**GPT, "tie_embeddings": True, "rope": LLAMA3, **LONG},
    "gpt_neox, tanh": {**GPT, "activation": "gelu_tanh", "rope": {"fraction": 0.5}},
    "gpt2": {**GPT, "activation": "gelu_tanh", "positions": "learned", "tie_embeddings": True, **LONG},
    "gpt2, untied": {**GPT, "positions": "learned"},
    "gpt_neox, Pythia": {**GPT, "rope": {"fraction": 0.5}, "parallel_residual": True},
    "llama, yarn": {"rope": {"scaling": YARN}, **LONG},
    "qwen3, yarn of its own": {
        "qk_norm": True,
        "head_dim": 16,
        "rope": {"scaling": {**YARN, "attention_factor": 1.3, "beta_fast": 8.0, "truncate": False}},
        **LONG,
    },
    "mistral, longrope": {"num_kv_heads": 2, "sliding_window": 7, "rope": {"scaling": LONGROPE}, **LONG},
    "ministral": {"num_kv_heads": 2, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]},
    "olmo2": {"qk_norm": "whole", "norm_placement": "after", "num_kv_heads": 2},
    "olmo2, attention's biases": {"qk_norm": "whole", "norm_placement": "after", "bias": "attention"},
    "gemma2": {**GEMMA, "attention_soft_cap": 5.0, "logit_soft_cap": 3.0, "layer_types": GEMMA2_LAYERS},
    "gemma2, unbounded": {**GEMMA, "attention_scale": 24**-0.5, "bias": "attention", "tie_embeddings": False},
    "mistral, longrope of its own factor": {
        "num_kv_heads": 2,
        "sliding_window": 7,
        "rope": {"scaling": {**LONGROPE, "factor": 4.0}},
        **LONG,
    },
    "phi3": {"num_kv_heads": 2, "sliding_window": 7, "rope": {"fraction": 0.5}},
    "phi3, wide heads": {"num_kv_heads": 2, "head_dim": 20, "tie_embeddings": True, "rope": {"fraction": 0.8}},
    "phi3, longrope": {"num_kv_heads": 2, "rope": {"theta": 2e4, "fraction": 0.5, "scaling": LONGROPE_OF_3}, **LONG},
    "mixtral": {"num_kv_heads": 2, "moe": {"num_experts": 4}},
    "mixtral, window": {"num_kv_heads": 2, "sliding_window": 7, "moe": EXPERTS, "tie_embeddings": True},
    "qwen2_moe": {
        "bias": "qkv",
        "moe": {**EXPERTS, "normalize": False, "shared_ffn_hidden_size": 24, "shared_gate": True, "every": 2},
    },
    "qwen3_moe": {"num_kv_heads": 2, "qk_norm": True, "head_dim": 16, "moe": EXPERTS},
    "qwen3_moe, one dense": {"qk_norm": True, "moe": {**EXPERTS, "normalize": False, "first_dense": 1}},
    "olmoe": {"qk_norm": "whole", "num_kv_heads": 2, "moe": {**EXPERTS, "normalize": False, "top_k": 1}},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3, dense": {**MLA, "rope": {}, "mla": {**MLA["mla"], "q_lora_rank": None}},
    "deepseek_v3, yarn": {
        **DEEPSEEK_V3,
        "rope": {"interleaved": True, "scaling": {**YARN, "attention_factor": 1.0}},
        "attention_scale": scale_of(20, sharpness(8.0, 0.707)),
        **LONG,
    },
    "deepseek_v3, further": {**DEEPSEEK_V3, "mtp": {"num_layers": 2}, "tie_embeddings": True},
    "deepseek_v2": {**DEEPSEEK, "moe": {**DEEPSEEK["moe"], "normalize": False, "first_dense": 1, "scale": 2.0}},
    "deepseek_v2, groups": {
        **DEEPSEEK,
        "mla": {**MLA["mla"], "q_lora_rank": None, "v_head_dim": 20},
        "moe": {**DEEPSEEK["moe"], "normalize": False, "num_groups": 2, "top_groups": 1},
    },
    "gpt_oss": GPT_OSS,
    "gpt_oss, no window": {**GPT_OSS, "sliding_window": None, "layer_types": None},
    "gpt_oss, yarn": {
        **GPT_OSS,
        "layer_types": None,
        "rope": {"theta": 1.5e5, "scaling": {**YARN, "truncate": False}},
        **LONG,
    },
    "gemma3_text": {**GEMMA3, "rope": {"theta": 1e6}, "sliding_rope": {"theta": 1e4}},
    "gemma3_text, stretched": {
        **GEMMA3,
        "rope": {"theta": 1e6, "scaling": {"type": "linear", "factor": 8.0}},
        "sliding_rope": {"theta": 1e4},
        "logit_soft_cap": 3.0,
    },
}
"""One model for each thing that a class of transformers can represent; the family's name comes first."""


def tiny_model(**fields: Any) -> ModelConfig:
    """`TINY` with some fields replaced, filled."""
    return fill_model(ModelConfig(**{**TINY, **fields}), BatchConfig())


class RandomWeights:
    """Large random numbers in every weight: no norm is 1 and no bias 0, so nothing can be left out unseen."""

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        generator = torch.Generator().manual_seed(name_seed(1, weight.name))
        numbers = torch.empty(weight.shape).normal_(0.0, 0.1, generator=generator)
        return (numbers + (weight.init == "ones"))[rectangle.slices]


def write_checkpoint(
    run: Path,
    model: ModelConfig,
    *,
    source: WeightSource | None = None,
    step: int = 7,
    num_updates: int | None = None,
    data: dict[str, Any] | None = None,
) -> Path:
    """A complete checkpoint of a run, as tp 2 x pp 2 would have cut it: one file a rank."""
    source = source or RandomWeights()
    folder = run / "checkpoints" / folder_name(step)
    folder.mkdir(parents=True)
    updates = step if num_updates is None else num_updates
    progress = Progress(step=step, num_updates=updates, num_tokens=1000 * step)
    manifest = Manifest(progress, model.model_dump(mode="json"), {"pp": PP, "tp": TP}, {}, {}, data=data or {})
    stages = split_blocks((1.0,) * model.num_layers, PP, head_cost=0)
    for stage, tp_rank in itertools.product(range(PP), range(TP)):
        file, tensors = f"rank-{stage * TP + tp_rank:05d}.safetensors", {}
        for weight in stored_table(model).values():
            if _stage_of(weight, stages) != stage or (weight.cut is None and tp_rank > 0):
                continue
            rectangle, name = weight.local(TP, tp_rank), weight.state or tensor_name("weight", weight.name)
            tensors[name] = source.read(weight, rectangle).contiguous()
            record = manifest.tensors.setdefault(name, TensorRecord(weight.shape))
            record.pieces.append(Piece(file, name, rectangle.start, rectangle.shape))
        save_file(tensors, folder / file)
        manifest.files[file] = hash_file(folder / file)
    write_manifest(folder, manifest)
    return folder


def _stage_of(weight: Weight, stages: tuple[tuple[int, int], ...]) -> int:
    if not weight.layer.startswith("blocks."):
        return 0 if weight.layer == "embedding" else PP - 1
    index = int(weight.layer.split(".")[1])
    return next(stage for stage, (start, stop) in enumerate(stages) if start <= index < stop)


def assert_same_weights(first: WeightSource, second: WeightSource, model: ModelConfig) -> None:
    """Every canonical weight is equal bit by bit."""
    for weight in stored_table(model).values():
        everything = weight.local(1, 0)
        assert torch.equal(first.read(weight, everything), second.read(weight, everything)), weight.name


def train_tokenizers(root: Path, kinds: Iterable[str] = TOKENIZER_KINDS) -> Path:
    """A small tokenizer of each kind in a folder of its name, trained on this project's own text."""
    corpus = Corpus([DocumentSource(path=Path(__file__).parent, include=("*.py",))])
    for kind in kinds:
        train_tokenizer(corpus, root / kind, TokenizerConfig(kind=kind, vocab_size=TOKENIZER_SIZE))
    return root


@contextmanager
def reloading_here() -> Iterator[None]:
    """The verification's reload in this process: the same code without seconds of imports, on one thread."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        assert command[1:3] == ["-m", reload.__name__]
        reload.main(*map(Path, command[3:]))
        return subprocess.CompletedProcess(command, 0, "", "")

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.checkpoint.hf.verify.subprocess.run", run)
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def reload_here() -> Iterator[None]:
    """`reloading_here` for one test."""
    with reloading_here():
        yield
