"""Any model, in any layout, by any optimizer: tiny runs drawn by chance, of which those are kept that a config may ask
for."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megalite.config.validate import validate
from megalite.errors import UserError
from tests.kit.train import tiny_config

Sections = dict[str, dict[str, Any]]
Choice = tuple[float, str, Sequence[Any]]
"""How often a setting is other than its default, and what it is then."""

MODEL: tuple[Choice, ...] = (
    (0.3, "tie_embeddings", (True,)),
    (0.3, "qk_norm", (True, "whole")),
    (0.4, "activation", ("swiglu_clamped", "geglu", "geglu_tanh", "reglu", "gelu", "gelu_tanh", "silu", "relu2")),
    (0.4, "norm", ("layernorm", "zero_centered_rmsnorm")),
    (0.3, "norm_placement", ("after", "both", "post")),
    (0.15, "parallel_residual", (True,)),
    (0.2, "attention_sinks", (True,)),
    (0.15, "attention_soft_cap", (5.0,)),
    (0.15, "logit_soft_cap", (3.0,)),
    (0.15, "embedding_scale", (3.0,)),
    (0.3, "bias", ("qkv", "attention", "all")),
    (0.15, "z_loss", (0.1,)),
    (0.3, "sliding_window", (3, 9)),
    (0.1, "dropout", (0.2,)),
    (0.05, "attention_dropout", (0.2,)),
    (0.1, "mup", ({"base_hidden_size": 16},)),
    (0.15, "head_dim", (4, 6, 16)),
    (0.15, "attention_scale", (0.7,)),
    (0.2, "init", ({"rule": "xavier_uniform"}, {"rule": "he_normal", "gain": 0.5}, {"cut": 2.0}, {"head_std": 0.01})),
    (0.1, "init_depth_scaling", (False, "layer")),
    (0.15, "mtp", ({"num_layers": 1}, {"num_layers": 2})),
    (0.15, "lora", ({"rank": 4, "alpha": 8}, {"rank": 4, "alpha": 8, "targets": ["q", "down"]})),
)
ROPE: tuple[Choice, ...] = (
    (0.5, "theta", (100.0,)),
    (0.3, "fraction", (0.5,)),
    (0.3, "interleaved", (True,)),
    (
        0.5,
        "scaling",
        (
            {"type": "linear", "factor": 2.0},
            {"type": "llama3", "factor": 4.0, "original_max_positions": 16},
            {"type": "yarn", "factor": 4.0, "original_max_positions": 8},
        ),
    ),
)
EXPERTS: tuple[Choice, ...] = (
    (1.0, "num_experts", (4, 8)),
    (1.0, "top_k", (1, 2, 3)),
    (1.0, "ffn_hidden_size", (16, 20)),
    (0.4, "shared_ffn_hidden_size", (16, 24)),
    (0.3, "shared_gate", (True,)),
    (0.4, "scores", ("sigmoid",)),
    (0.4, "normalize", (False,)),
    (0.3, "scale", (2.5,)),
    (0.3, "logit_bias", (True,)),
    (0.3, "num_groups", (2,)),
    (0.4, "bias_rate", (0, 0.01)),
    (0.5, "aux_loss", (0.02,)),
    (0.3, "aux_loss_over", ("sequence", "micro_batch")),
    (0.3, "z_loss", (0.01,)),
    (0.3, "capacity_factor", (0.75, 1.5)),
    (0.3, "first_dense", (1,)),
    (0.2, "every", (2,)),
)
LATENT: tuple[Choice, ...] = (
    (0.5, "q_lora_rank", (24,)),
    (1.0, "kv_lora_rank", (16,)),
    (1.0, "qk_nope_head_dim", (12,)),
    (1.0, "qk_rope_head_dim", (8,)),
    (1.0, "v_head_dim", (10, 20)),
)
GROUPS = (
    [{"match": ["blocks.0.*", "embedding.*"], "frozen": True}],
    [{"match": ["blocks.*.attention.*"], "frozen": True}],
    [{"match": ["*.mlp.*"], "lr_scale": 0.3}],
    [{"match": ["*norm*"], "optimizer": "lion"}],
    [{"match": ["blocks.1.*"], "weight_decay": 0.5}],
    [{"match": ["*.mlp.*"], "but": ["blocks.0.*"], "frozen": True}],
    [{"match": ["head.*", "embedding.*"], "schedule": {"name": "linear"}}, {"match": ["*bias*"], "optimizer": "sgd"}],
)
CLIPS = (
    {"by": "value", "threshold": 0.001},
    {"by": "parameter", "threshold": 0.05},
    {"by": "layer", "threshold": 0.1},
    {"by": "unit", "threshold": 0.1},
    {"by": "percentile", "threshold": 50, "window": 4},
)
OPTIMIZERS = (
    *("adamw", "adamw", "adamw8bit", "lion", "lion8bit", "muon", "muon8bit", "sgd", "adafactor"),
    "schedule_free_adamw",
)
"""Not soap: bases of a few gradients are what rounding makes them."""
OPTIMIZER: tuple[Choice, ...] = (
    (1.0, "name", OPTIMIZERS),
    (0.2, "clip", CLIPS),
    (0.1, "betas", ((0.8, 0.99), (0.0, 0.9))),
    (0.1, "nesterov", (False,)),
    (0.1, "momentum", (0.5,)),
    (0.3, "clip_grad_norm", (None,)),
    (0.2, "groups", GROUPS),
    (0.15, "decay", ({"kind": "coupled"}, {"kind": "independent"}, {"layer_factor": 1.1})),
    (0.1, "centralize", (True,)),
    (0.1, "noise", (0.1,)),
    (0.1, "lr_scales", ({"embedding": 2.0, "layer_decay": 0.8},)),
    (0.1, "qk_clip", ({"threshold": 0.05},)),
    (0.1, "offload", (True,)),
)
TRAIN: tuple[Choice, ...] = (
    (0.4, "recompute", ("selective", "full")),
    (0.1, "mlp_chunk_tokens", (5,)),
    (0.1, "offload_activations", (True,)),
    (0.1, "recompute_layers", ([{"mode": "full", "first": 1}], [{"mode": "selective", "every": 2}])),
)
LAYOUT: tuple[Choice, ...] = (
    (0.5, "sequence_parallel", (True,)),
    (0.6, "cp_kind", ("ulysses", "ring")),
    (0.6, "schedule", ("interleaved", "zb-h1", "zb-v", "dualpipe-v")),
    (0.3, "chunks", (2, 3)),
    (0.5, "ep", (2, 4)),
    (0.1, "dp_replicate", (2,)),
    (0.1, "hpz_size", (2,)),
    (0.1, "reduce_within", (2,)),
)
ENGINES = (("native", 0), ("native", 1), ("native", 1), *(("deepspeed", stage) for stage in range(4)), ("fsdp2", 3))

MOST_DRAWS = 2000


@dataclass(frozen=True)
class Run:
    """A config of a tiny model, and on how many ranks."""

    world_size: int
    sections: Sections

    @property
    def alone(self) -> Sections:
        """The same training on one rank, with nothing but what it computes."""
        optimizer = {key: value for key, value in self.sections["optimizer"].items() if key != "offload"}
        plain: Sections = {"parallel": {"engine": "native", "zero_stage": 0}, "train": {"compile": "off"}}
        return {**self.sections, "optimizer": optimizer, **plain}


def draw_run(rng: random.Random) -> Run:
    """Any run that a config may ask for."""
    for _ in range(MOST_DRAWS):
        world_size = rng.choice((1, 2, 2, 4))
        parallel = _layout(rng, world_size)
        num_batches, size = rng.choice((1, 2, 3, 4)), rng.choice((1, 2))
        total = num_batches * size * parallel.get("dp", 1)
        batch = {"micro_batch_size": size, "global_batch_size": total, "seq_len": rng.choice((16, 24))}
        other = {"model": _model(rng), "optimizer": some(rng, OPTIMIZER), "train": some(rng, TRAIN)}
        _cut_unevenly(rng, parallel, other["model"]["num_layers"])
        run = Run(world_size, {**other, "parallel": parallel, "batch": batch})
        if is_legal(run):
            return run
    raise AssertionError(f"none of {MOST_DRAWS} configs is one that may be asked for")


def draw_other_layout(rng: random.Random, run: Run) -> Run:
    """The same training in another layout, with as many sequences a step; of experts, whose losses may go by it, with
    as many in a micro-batch."""
    for _ in range(MOST_DRAWS):
        sections = copy.deepcopy(run.sections)
        world_size = rng.choice((1, 2, 2, 4))
        sections["parallel"], sections["train"] = _layout(rng, world_size), some(rng, TRAIN)
        _cut_unevenly(rng, sections["parallel"], sections["model"]["num_layers"])
        if "moe" not in sections["model"]:
            sections["batch"]["micro_batch_size"] = rng.choice((1, 2))
        other = Run(world_size, sections)
        if is_legal(other):
            return other
    return run


def is_legal(run: Run) -> bool:
    """Whether `megalite config check` accepts it, on as many ranks as it has."""
    try:
        validate(tiny_config(**run.sections), run.world_size)
    except (UserError, ValidationError):
        return False
    return True


def _model(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice((2, 4, 4, 8))
    model: dict[str, Any] = {
        "num_layers": rng.choice((1, 2, 3, 4, 4, 5, 8)),
        "num_heads": heads,
        "num_kv_heads": rng.choice([number for number in (1, 2, 4, 8) if heads % number == 0]),
        "vocab_size": rng.choice((64, 97, 101, 128)),
        "ffn_hidden_size": rng.choice((40, 48, 52)),
        **some(rng, MODEL),
    }
    if rng.random() < 0.2:
        model["rope"] = some(rng, ROPE)
    if rng.random() < 0.35:
        model["moe"] = some(rng, EXPERTS)
    if rng.random() < 0.2:
        model |= {"mla": some(rng, LATENT), "num_kv_heads": None}
    elif rng.random() < 0.2:
        model |= {"positions": "learned", "max_positions": 64}
    if "sliding_window" in model and rng.random() < 0.6:
        model["layer_types"] = ["full_attention", "sliding_attention"]
    return model


def _layout(rng: random.Random, world_size: int) -> dict[str, Any]:
    axes = ("tp", "pp", "dp", "cp")
    parallel: dict[str, Any] = dict(zip(axes, rng.choice(_cuts(world_size, len(axes))), strict=True))
    parallel["engine"], parallel["zero_stage"] = rng.choice(ENGINES)
    needs = {"sequence_parallel": "tp", "cp_kind": "cp", "schedule": "pp"}
    choices = [choice for choice in LAYOUT if parallel.get(needs.get(choice[1], ""), 2) > 1]
    return parallel | some(rng, choices)


def _cut_unevenly(rng: random.Random, parallel: dict[str, Any], num_layers: int) -> None:
    """Now and then, blocks of a pipeline's stages as somebody may count them out."""
    if (pp := parallel["pp"]) > 1 and rng.random() < 0.3:
        borders = sorted(rng.randrange(num_layers + 1) for _ in range(pp - 1))
        counts = [stop - first for first, stop in itertools.pairwise((0, *borders, num_layers))]
        parallel["blocks_per_stage"] = counts


def _cuts(world_size: int, num_axes: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of so many."""
    if num_axes == 1:
        return [(world_size,)]
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return [(size, *others) for size in sizes for others in _cuts(world_size // size, num_axes - 1)]


def some(rng: random.Random, choices: Sequence[Choice]) -> dict[str, Any]:
    """Settings by chance."""
    return {name: copy.deepcopy(rng.choice(values)) for chance, name, values in choices if rng.random() < chance}
