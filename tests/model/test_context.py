"""Each weight's gradient under context parallelism is that of one rank, whatever else a model has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.batch_cut import BatchCut, documents_of_batch
from megalite.engine.steps import targets_of_batch
from megalite.layers.attention_blocks import attend_in_blocks
from megalite.layers.context import choose_context, choose_latent_context
from megalite.layers.norm import LayerNorm, RMSNorm
from megalite.layers.parts import Parts
from megalite.model.initialize import FreshWeights
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage
from megalite.parallel.axes import connect
from megalite.parallel.collectives import all_reduce
from megalite.parallel.mesh import Mesh
from tests.kit.graphs import make_no_kernels
from tests.kit.spawn import run_ranks
from tests.model.stages import GPT_STYLE, LATENTS, gradients, make_batch, tiny_model

EXACT = 1e-11
"""Relative to the largest entry, float64: sums in another order."""
CLOSE = 1e-5
"""The same in fp32, in which compiled blocks are tried."""
LEAST = 1e-3
"""Of a gradient's largest entry. That of a key's bias is 0, and left out: the same added to all scores of a query
changes nothing."""

MODELS: dict[str, dict[str, Any]] = {
    "grouped, norms, dropout": {"num_kv_heads": 2, "qk_norm": True, "dropout": 0.2},
    "one kv head, window": {"num_kv_heads": 1, "sliding_window": 5},
    "gpt": GPT_STYLE,
    "latents": LATENTS,
    "sinks": {"attention_sinks": True, "num_kv_heads": 2},
    "latents, wide values": {**LATENTS, "mla": {**LATENTS["mla"], "q_lora_rank": None, "v_head_dim": 20}},
    "bounded scores": {"attention_soft_cap": 3.0},
    "dropped weights": {"attention_dropout": 0.2, "num_kv_heads": 2, "sliding_window": 5},
    "latents, dropped weights": {**LATENTS, "attention_dropout": 0.2},
    "long rope": {
        "rope": {
            "scaling": {
                "type": "longrope",
                "factor": 4.0,
                "original_max_positions": 6,
                "short_factor": (1.0,) * 4,
                "long_factor": (4.0,) * 4,
            }
        }
    },
}


WITH_KERNELS = ("grouped, norms, dropout", "gpt", "latents")
"""Models for which the compiler makes kernels, which are the same whatever the exchange; the others' graphs alone are
made."""

REFUSED_BY_THE_RING = {"attention_soft_cap", "attention_sinks", "attention_dropout"}


def gradients_of(
    kind: str, recompute: str, dtype: torch.dtype, compiled: bool, names: Iterable[str] = MODELS
) -> dict[str, dict[str, Tensor]]:
    """Loss and gradients of models over two micro-batches, summed over the ranks that cut them."""
    axes = connect(Mesh(cp=dist.get_world_size()), dist.get_rank())
    found = {}
    for name, settings in ((name, MODELS[name]) for name in names):
        if kind == "ring" and REFUSED_BY_THE_RING & settings.keys():
            continue  # which is refused
        model = tiny_model(**settings)
        parts = Parts(norm=LayerNorm if model.norm == "layernorm" else RMSNorm, attend=attend_in_blocks)
        over = choose_context(axes.cp, kind, keeps_all=recompute == "none")
        spec = StageSpec(
            model,
            recompute=recompute,
            parts=replace(parts, over_context=over, over_latents=choose_latent_context(axes.cp, kind)),
            seed=1,
        )
        stage = Stage(spec, FreshWeights(model, 1)).to(dtype)
        if compiled:
            stage.compile_blocks()
        cut, total = BatchCut(axes.cp, kind, model), torch.zeros(())
        for first in (0, 2):
            batch = cut.own(make_batch(first))
            loss = stage(batch.tokens, documents_of_batch(batch), targets_of_batch(batch, 1 / 64))
            loss.backward()
            total += loss.detach()
        sums = {key: all_reduce(value.clone(), axes.cp) for key, value in gradients(stage).items()}
        found[name] = {"loss": all_reduce(total, axes.cp), **sums}
    return found


def worst(found: dict[str, dict[str, Tensor]], truth: dict[str, dict[str, Tensor]]) -> dict[str, float]:
    """By model, the largest difference of a weight's gradient, of its largest entry."""
    return {
        name: max(
            float((found[name][key] - value).abs().max() / value.abs().max().clamp(min=LEAST))
            for key, value in each.items()
            if key != "loss" and "k.bias" not in key
        )
        for name, each in truth.items()
    }


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", ["allgather", "ulysses", "ring"])
def test_gradients_are_those_of_one_rank(kind, recompute):
    """In float64, with documents that cross the cuts; none of the gradients is zero."""
    (truth,) = run_ranks(gradients_of, 1, kind, "none", torch.float64, False)
    for found in run_ranks(gradients_of, 2, kind, recompute, torch.float64, False):
        off = worst(found, truth)
        assert max(off.values()) < EXACT, off
        for name, each in truth.items():
            assert math.isclose(float(found[name]["loss"]), float(each["loss"]), rel_tol=1e-6)
            assert all(value.abs().max() > LEAST for key, value in each.items() if "k.bias" not in key), name


def compiled_gradients(kind: str, with_kernels: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    found = gradients_of(kind, "none", torch.float32, True, with_kernels)
    make_no_kernels()
    others = [name for name in MODELS if name not in with_kernels]
    return found | gradients_of(kind, "none", torch.float32, True, others)


@pytest.mark.parametrize(("kind", "with_kernels"), [("allgather", WITH_KERNELS), ("ulysses", ()), ("ring", ())])
def test_compiled_blocks(kind, with_kernels):
    """In fp32, with the exchange inside the compiled graph."""
    (truth,) = run_ranks(gradients_of, 1, kind, "none", torch.float32, False)
    for found in run_ranks(compiled_gradients, 2, kind, with_kernels):
        assert found.keys() == truth.keys()
        off = worst(found, truth)
        assert max(off.values()) < CLOSE, off
