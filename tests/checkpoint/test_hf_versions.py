"""Exported folders read by transformers 4.57 and by 5, in fresh processes; folders saved by 4.57 read by megalite.

Version 4 lies in a folder of its own beside the environment (`make transformers-4`), in front of the other on the path
of that process. Torch is the same for both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megalite.checkpoint.hf import verify
from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.checkpoint.hf.to_checkpoint import from_hugging_face
from megalite.config.schema import ModelConfig
from megalite.tokenizer.tokenizer import Tokenizer
from tests.checkpoint.hf_kit import (
    FAMILIES,
    TOKENIZER_KINDS,
    TOKENIZER_SIZE,
    RandomWeights,
    reloading_here,
    tiny_model,
    train_tokenizers,
    write_checkpoint,
)

VERSION_4 = Path(sys.prefix) / "transformers-4"
VERSIONS = {"4.57": VERSION_4, "5": None}
TIMEOUT_SECONDS = 300

READ_ALL = """
import sys
from pathlib import Path
from megalite.checkpoint.hf import reload
for folder, work in zip(sys.argv[1::2], sys.argv[2::2]):
    reload.main(Path(folder), Path(work))
"""

SAVE_ALL = """
import sys
from pathlib import Path
import torch
import transformers as t
sizes = dict(vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=40)
gated = dict(**sizes, num_key_value_heads=2)
llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
yarn = dict(rope_type="yarn", factor=2.5, original_max_position_embeddings=16)
longrope = dict(rope_type="longrope", short_factor=[1.0 + 0.1 * pair for pair in range(6)],
                long_factor=[1.0 + pair for pair in range(6)])
longrope_of_3 = dict(type="longrope", short_factor=[1.0, 1.2, 1.4], long_factor=[1.0, 3.0, 5.0])
linear = dict(rope_type="linear", factor=8.0)
experts = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32)
latents = dict(q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
               moe_intermediate_size=24, num_experts_per_tok=3, n_routed_experts=6, num_key_value_heads=4)
layers = ["sliding_attention", "full_attention"]
configs = {
    "llama 2": t.LlamaConfig(**sizes),
    "llama 3": t.LlamaConfig(**gated, rope_theta=5e5),
    "llama 3.1": t.LlamaConfig(**gated, rope_theta=5e5, rope_scaling=llama3, tie_word_embeddings=True),
    "mistral": t.MistralConfig(**gated, sliding_window=6, head_dim=16),
    "qwen2": t.Qwen2Config(**gated, rope_theta=1e6),
    "qwen2, window": t.Qwen2Config(**gated, use_sliding_window=True, sliding_window=5, max_window_layers=0),
    "qwen2, own head_dim": t.Qwen2Config(**{**gated, "num_attention_heads": 10}, head_dim=8),
    "qwen3": t.Qwen3Config(**gated, head_dim=16, tie_word_embeddings=True),
    "gpt_neox": t.GPTNeoXConfig(**sizes, rotary_pct=0.5, use_parallel_residual=False),
    "gpt2": t.GPT2Config(vocab_size=101, n_embd=48, n_layer=2, n_head=4, n_positions=40),
    "pythia": t.GPTNeoXConfig(**sizes, rotary_pct=0.5, use_parallel_residual=True),
    "llama, yarn": t.LlamaConfig(**gated, rope_scaling=yarn),
    "llama, longrope": t.LlamaConfig(**gated, rope_scaling=longrope, original_max_position_embeddings=16),
    "ministral": t.MinistralConfig(**gated, head_dim=12, sliding_window=6, layer_types=layers),
    "olmo2": t.Olmo2Config(**gated),
    "phi3": t.Phi3Config(**gated, sliding_window=6, pad_token_id=None),
    "phi3, longrope": t.Phi3Config(**gated, partial_rotary_factor=0.5, rope_scaling=longrope_of_3,
                                   original_max_position_embeddings=16, pad_token_id=None, tie_word_embeddings=True),
    "mixtral": t.MixtralConfig(**gated, num_local_experts=3),
    "qwen2_moe": t.Qwen2MoeConfig(**gated, **experts, shared_expert_intermediate_size=24),
    "qwen3_moe": t.Qwen3MoeConfig(**gated, **experts, head_dim=16, mlp_only_layers=[0]),
    "olmoe": t.OlmoeConfig(**gated, num_experts=3, num_experts_per_tok=2, pad_token_id=None),
    "deepseek_v3": t.DeepseekV3Config(**sizes, **latents, first_k_dense_replace=1, n_group=3, topk_group=2),
    "deepseek_v3, yarn": t.DeepseekV3Config(**sizes, **latents, first_k_dense_replace=1, n_group=1, topk_group=1,
                                            rope_scaling=dict(yarn, mscale=1.0, mscale_all_dim=1.0)),
    "deepseek_v2": t.DeepseekV2Config(**sizes, **latents, first_k_dense_replace=1),
    "gpt_oss": t.GptOssConfig(**gated, num_local_experts=3, num_experts_per_tok=2, head_dim=16, sliding_window=6,
                              rope_theta=1.5e5, rope_scaling=dict(yarn, truncate=False)),
    "gemma2": t.Gemma2Config(**gated, head_dim=16, sliding_window=6),
    "gemma3": t.Gemma3TextConfig(**gated, head_dim=16, sliding_window=6, layer_types=layers, rope_scaling=linear),
}
for name, config in configs.items():
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data.normal_(0.0, 0.1)
    model.save_pretrained(Path(sys.argv[1]) / name)
"""


@dataclass(frozen=True)
class Case:
    """A folder and what it stands for."""

    folder: Path
    model: ModelConfig
    dtype: str = "fp32"
    tokenizer: Tokenizer | None = None


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Case]]:
    """Every family; every number format; shards; every kind of tokenizer."""
    root = tmp_path_factory.mktemp("versions")
    tokenizers = train_tokenizers(root / "tokenizers")
    plain = {"num_kv_heads": 2, "rope": FAMILIES["llama, tied, llama3 scaling"]["rope"]}
    made = []

    def make(name: str, fields: dict, **options: object) -> None:
        model = tiny_model(**fields)
        write_checkpoint(root / name, model)
        tokenizer = options.get("tokenizer")
        to_hugging_face(root / name, root / name / "hf", **options)
        own = Tokenizer.load(tokenizer) if tokenizer else None
        made.append(Case(root / name / "hf", model, str(options.get("dtype", "fp32")), own))

    with reloading_here():
        for name, fields in FAMILIES.items():
            make(name, fields)
        for dtype in ("bf16", "fp16"):
            make(dtype, plain, dtype=dtype, max_shard_bytes=30_000)
        for kind in TOKENIZER_KINDS:
            make(kind, {"vocab_size": TOKENIZER_SIZE}, tokenizer=tokenizers / kind)
    return made


@pytest.mark.parametrize("version", VERSIONS)
def test_read_by_both_generations(version: str, cases: list[Case], tmp_path: Path):
    """Each version finds every key, computes megalite's logits and predictions, and gives equal ids and texts."""
    work = [tmp_path / str(number) for number in range(len(cases))]
    probes = []
    for case, folder in zip(cases, work, strict=True):
        folder.mkdir()
        probes.append(verify.ask(folder, case.model, tokenizer=case.tokenizer))
    _run(version, READ_ALL, [path for case, folder in zip(cases, work, strict=True) for path in (case.folder, folder)])
    for case, folder, asked in zip(cases, work, probes, strict=True):
        source = verify.Rounded(RandomWeights(), case.dtype)
        answer = verify.check_answer(folder, source, case.model, asked, tokenizer=case.tokenizer)
        assert answer.transformers.startswith(version)
        assert answer.max_difference <= verify.LOGIT_TOLERANCE
        assert answer.tokenizer_problem is None


def test_folders_saved_by_version_4(tmp_path: Path):
    """What transformers 4.57 saves, with only its own keys, is imported with equal logits in version 5 and here."""
    _run("4.57", SAVE_ALL, [tmp_path])
    saved = sorted(path for path in tmp_path.iterdir())
    assert len(saved) == 27
    for folder in saved:
        config = json.loads((folder / "config.json").read_text())
        assert config["transformers_version"].startswith("4.57")
        assert "rope_parameters" not in config
        with reloading_here():
            done = from_hugging_face(folder, folder / "imported")
        assert done.verdict.max_difference <= verify.LOGIT_TOLERANCE


def _run(version: str, code: str, arguments: list[Path]) -> None:
    """Run a script with a version of transformers, or skip the test when that version is not here."""
    place = VERSIONS[version]
    if place is not None and not (place / "transformers").is_dir():
        pytest.skip(f"no transformers {version} in {place}: `make transformers-4` fetches it")
    paths = [*([str(place)] if place else []), str(verify.PACKAGE_ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **verify.OFFLINE, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
