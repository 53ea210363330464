"""Which weights decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.config.schema import OptimizerConfig
from megalite.optim.groups import parameter_groups
from megalite.optim.optimizers import build_optimizer
from tests.model.stages import GPT_STYLE, make_stage, tiny_model

BLOCK_MATRICES = {
    "llama": ("attention.qkv.weight", "attention.o.weight", "mlp.gate_up.weight", "mlp.down.weight"),
    "gpt": ("attention.qkv.weight", "attention.o.weight", "mlp.up.weight", "mlp.down.weight"),
}
STYLES: dict[str, dict[str, Any]] = {"llama": {"qk_norm": True}, "gpt": GPT_STYLE}


def names_by_decay(settings: dict[str, Any], **options: Any) -> dict[float, set[str]]:
    """Names of a two-block model's parameters by their group's weight decay; each parameter stands in one group."""
    pp = {key: options.pop(key) for key in ("pp", "pp_rank") if key in options}
    stage = make_stage(tiny_model(**settings), **pp)
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    groups = parameter_groups(stage, OptimizerConfig(weight_decay=0.1, **options))
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(listed) == sorted(names)
    return {group["weight_decay"]: {names[id(parameter)] for parameter in group["params"]} for group in groups}


def matrices(style: str, blocks: range = range(2)) -> set[str]:
    return {f"blocks.{block}.{name}" for block in blocks for name in BLOCK_MATRICES[style]}


@pytest.mark.parametrize("style", STYLES)
def test_matrices_decay_and_vectors_do_not(style):
    """Matrices, the embedding tables and the head decay; norms (of heads too) and biases do not."""
    groups = names_by_decay(STYLES[style])
    tables = {"embedding.weight", "head.weight"} | ({"embedding.positions"} if style == "gpt" else set())
    assert groups[0.1] == matrices(style) | tables
    assert all("norm" in name or name.endswith("bias") for name in groups[0.0])


@pytest.mark.parametrize("style", STYLES)
def test_embeddings_can_be_left_out(style):
    """With decay_embeddings off, only the matrices of the blocks decay, tied or not."""
    for tied in (False, True):
        groups = names_by_decay({**STYLES[style], "tie_embeddings": tied}, decay_embeddings=False)
        assert groups[0.1] == matrices(style)
        assert "embedding.weight" in groups[0.0]


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_a_tied_table_decays_alike_on_both_ends_of_a_pipeline(decay_embeddings):
    """The two copies of a tied table are in groups of one decay, else they would drift apart."""
    first, last = (
        names_by_decay({"tie_embeddings": True}, pp=2, pp_rank=rank, decay_embeddings=decay_embeddings)
        for rank in (0, 1)
    )
    decay = 0.1 if decay_embeddings else 0.0
    assert "embedding.weight" in first[decay]
    assert "head.weight" in last[decay]
    assert first[0.1] >= matrices("llama", range(1))
    assert last[0.1] >= matrices("llama", range(1, 2))


def test_empty_groups_are_left_out():
    """A stage without decayed weights, or without others, has one group."""
    stage = make_stage(tiny_model())
    for parameter_name in [name for name, _ in stage.named_parameters() if "norm" in name]:
        owner, _, leaf = parameter_name.rpartition(".")
        delattr(stage.get_submodule(owner), leaf)
    groups = parameter_groups(stage, OptimizerConfig())
    assert [group["weight_decay"] for group in groups] == [0.1]


def test_adamw_is_the_papers():
    """Two updates are those of Loshchilov & Hutter's formulas, written out: decay is not part of the gradient."""
    lr, (beta1, beta2), eps, decay = 1e-2, (0.9, 0.95), 1e-8, 0.1
    stage = make_stage(tiny_model())
    settings = OptimizerConfig(lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    optimizer = build_optimizer(stage, settings)
    parameters = dict(stage.named_parameters())
    expected = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    generator = torch.Generator().manual_seed(0)
    for step in (1, 2):
        for name, parameter in parameters.items():
            grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = grad
            first[name] = beta1 * first[name] + (1 - beta1) * grad
            second[name] = beta2 * second[name] + (1 - beta2) * grad**2
            update = first[name] / (1 - beta1**step) / ((second[name] / (1 - beta2**step)).sqrt() + eps)
            rate = 0.0 if "norm" in name else decay
            expected[name] = expected[name] - lr * (update + rate * expected[name])
        optimizer.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0.0, atol=1e-12)  # float64
