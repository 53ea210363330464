"""config.json of every supported class with any key set to anything: refused, or transformers computes the same.

The truth is transformers itself, which is given the same folder. A folder that transformers cannot read either is none
that anyone can start from: the comparison before training says so.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megalite.checkpoint.hf.families.common import HARMLESS
from megalite.checkpoint.hf.families.registry import FAMILIES
from megalite.checkpoint.hf.importer import HuggingFaceWeights
from megalite.checkpoint.hf.probes import Probe
from megalite.checkpoint.hf.verify import LOGIT_TOLERANCE, compute_logits
from megalite.errors import UserError
from tests.checkpoint.foreign import FOREIGN, IS_TRANSFORMERS_4, LLAMA3, LONGROPE, save_foreign, without_theta

ORIGINAL = {"original_max_position_embeddings": 16}

ROPES = (
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0, "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    without_theta(LLAMA3),
    {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 2.5},
    {"rope_type": "yarn", "factor": 2.5, "attention_factor": 1.5, "truncate": False, **ORIGINAL},
    {"rope_type": "yarn", "factor": 2.5, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_slow": 2, **ORIGINAL},
    {"rope_type": "yarn", "factor": 2.5, "mscale": 0.7, "beta_fast": 3, **ORIGINAL},
    LONGROPE,
    {**LONGROPE, "attention_factor": 1.5},
    {**LONGROPE, "factor": 1.5},
)
LAYER_TYPES = tuple([first, second] for first in ("full", "sliding") for second in ("full", "sliding"))
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 5, 16, 40, 80, -1, 0.5, 1.5, 7.0, 1e4, "x", "", [], {}),
    *(-20.0, 1e-300, float("nan")),
    *("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "silu", "swish", "relu"),
    *ROPES,
    {"full_attention": ROPES[0]},
    *([f"{kind}_attention" for kind in kinds] for kinds in LAYER_TYPES),
)
OTHER_KEYS = (
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"),
    *("original_max_position_embeddings", "layer_types", "is_causal", "sliding_window", "use_sliding_window"),
    *("max_window_layers", "attention_chunk_size", "per_layer_config", "attention_bias", "mlp_bias", "head_dim"),
    *("is_decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "pruned_heads"),
    *("tie_encoder_decoder", "tie_last_hidden_states", "use_bidirectional_attention", "logit_scale", "logits_scaling"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "query_pre_attn_scalar"),
    *("rope_local_base_freq", "sliding_window_pattern", "hidden_activation", "use_parallel_residual"),
    *("final_logit_softcapping", "attn_logit_softcapping", "no_rope_layers", "num_experts", "num_local_experts"),
    *("text_config", "return_dict", "auto_map", "quantization_config", "_attn_implementation", "hidden_size"),
)
"""Keys that some class of transformers computes something from, or that its own machinery knows."""

TOKENS = tuple(torch.randint(101, (30,), generator=torch.Generator().manual_seed(1)).tolist())
PROBES = (Probe(TOKENS, tuple(range(30))), Probe(TOKENS[:16], tuple(index * 39 // 15 for index in range(16))))

REFUSED_BY_TRANSFORMERS = "transformers cannot read it"
UNLIKE_IN_4 = {"deepseek_v2, groups, yarn": "transformers 4 leaves mscale_all_dim out of DeepSeek-V2's attention"}


OFTEN = 40
"""Of keys that a class' first model has alike so many times as many cases as of harmless ones."""


def cases(
    config: dict[str, Any], harmless: Set[str], first: dict[str, Any], rng: random.Random, number: int
) -> Iterator[dict[str, Any]]:
    """The config with one key left out or set to something: every key to everything, of harmless ones only `number`.

    Args:
        first: the config of this class' first model, if that is another one. What it has alike has been set to
            everything there; here some of it, by chance.
    """
    keys = sorted({*config, *HARMLESS, *OTHER_KEYS} - {"model_type"})
    for key in config.keys() - {"model_type"}:
        yield {name: value for name, value in config.items() if name != key}
    some = [(key, value) for key in keys if key in harmless for value in VALUES]
    changes = [(key, value) for key in keys if key not in harmless for value in VALUES]
    if first != config:
        alike = [each for each in changes if config.get(each[0], KeyError) == first.get(each[0], KeyError)]
        others = [each for each in changes if each[0] not in dict(alike)]
        changes = others + rng.sample(alike, min(OFTEN * number, len(alike)))
    for key, value in changes + rng.sample(some, min(number, len(some))):
        yield {**config, key: copy.deepcopy(value)}


def by_transformers(folder: Path) -> list[Tensor]:
    """Logits of the probes."""
    options = {}
    if getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"  # version 4's others leave the bound out
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    found = []
    for probe in PROBES:
        ids = torch.tensor([probe.tokens])
        mask = torch.ones_like(ids)
        out = model(ids, position_ids=torch.tensor([probe.positions]), attention_mask=mask, use_cache=False)
        found.append(out.logits[0])
    return found


def what_differs(folder: Path, known: dict[str, list[Tensor]]) -> str:
    """Nothing, where the folder is refused or both compute the same from it; else what happens instead."""
    try:
        weights = HuggingFaceWeights(folder)
        key = weights.model.model_dump_json()
        if key not in known:
            known[key] = list(compute_logits(weights, weights.model, PROBES))
    except UserError:
        return ""
    try:
        theirs = by_transformers(folder)
    except Exception:  # whatever it is, transformers reads no model from this folder
        return REFUSED_BY_TRANSFORMERS
    worst = max((a - b).abs().max().item() for a, b in zip(known[key], theirs, strict=True))
    return "" if worst <= LOGIT_TOLERANCE else f"logits differ by {worst:.2g}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOREIGN)
@torch.inference_mode()
def test_any_key_of_a_config(name: str, num_cases: int, rng: random.Random, tmp_path: Path):
    """Whatever a key is set to, the folder is refused or means the same to transformers, for every supported class."""
    if IS_TRANSFORMERS_4 and name in UNLIKE_IN_4:
        pytest.skip(UNLIKE_IN_4[name])
    save_foreign(tmp_path, name)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    known: dict[str, list[Tensor]] = {}
    of_class = next(other for other in FOREIGN if FOREIGN[other][0] is FOREIGN[name][0])
    save_foreign(tmp_path / "first", of_class)
    first = json.loads((tmp_path / "first" / "config.json").read_text())
    family = FAMILIES[config["model_type"]]
    numbers = {key.name for key in family.keys.values() if key.kind is float}  # transformers 5 takes no 1 for 1.0
    numbers |= {key for key, value in config.items() if isinstance(value, float)}
    harmless = HARMLESS | family.harmless
    may_be_unreadable = harmless | numbers | {"auto_map"}
    complaints = []
    for case in cases(config, harmless, first, rng, num_cases // 8):
        path.unlink()  # or a disk would write down each before the next
        path.write_text(json.dumps(case))
        found = what_differs(tmp_path, known)
        changed = {key for key in {**case, **config} if case.get(key, KeyError) != config.get(key, KeyError)}
        may_stop = IS_TRANSFORMERS_4 or changed <= may_be_unreadable  # an old reader that stops computes nothing else
        if found and not (found == REFUSED_BY_TRANSFORMERS and may_stop):
            complaints.append(f"{ {key: case.get(key, 'left out') for key in changed} }: {found}")
    assert not complaints, "\n".join(complaints)


def test_parameters_of_generation_are_harmless():
    """What transformers keeps for `generate` and once wrote into config.json is read past, whatever its version."""
    from transformers import GenerationConfig, PretrainedConfig

    found = (
        PretrainedConfig._get_global_generation_defaults
        if IS_TRANSFORMERS_4
        else (GenerationConfig._get_default_generation_params)
    )
    assert set(found()) - HARMLESS == set()
