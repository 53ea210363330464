"""Equal start: every layout holds parts of the same whole weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.architecture.weights import weight_table
from megalite.config.schema import ModelConfig
from megalite.model.initialize import FreshWeights, fill, local_weights
from megalite.model.transformer import Stage
from megalite.parallel.axes import Axis
from tests.model.stages import GPT_STYLE, LATENTS, make_stage, tiny_model

MODELS = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "grouped-query": {"num_heads": 8, "num_kv_heads": 4, "qk_norm": True},
    "gpt": GPT_STYLE,
    "latents": LATENTS,
}

SIGMAS = 6.0
"""An estimated deviation this far off happens once in a billion draws; the draws are fixed."""


def fake_axis(size: int, rank: int) -> Axis:
    """A tensor-parallel axis to be built with, not to talk over."""
    return Axis("tp", size, rank, None, tuple(range(size)))


def assemble(model: ModelConfig, tp: int, pp: int) -> dict[str, Tensor]:
    """Whole weights, put together from what every rank of a layout holds; every element must come from somewhere."""
    whole = {row.name: torch.full(row.shape, float("nan")) for row in weight_table(model).values()}
    for pp_rank in range(pp):
        for tp_rank in range(tp):
            stage = make_stage(model, tp=fake_axis(tp, tp_rank), dtype=torch.float32, pp=pp, pp_rank=pp_rank)
            parameters = dict(stage.named_parameters())
            for local in local_weights(stage):
                part = local.view(parameters[local.parameter_name]).detach()
                target = whole[local.weight.name][local.rectangle.slices]
                assert torch.equal(target.isnan().all() | (target == part).all(), torch.tensor(True))
                target.copy_(part)
    return whole


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_starts_from_equal_weights(name):
    """The whole weights put together from the ranks of tp 1, 2, 4 and pp 2 are bit-equal, and copies agree."""
    model = tiny_model(**MODELS[name])
    one = assemble(model, 1, 1)
    assert not any(weight.isnan().any() for weight in one.values())
    for tp, pp in ((2, 1), (4, 1), (1, 2), (2, 2)):
        other = assemble(model, tp, pp)
        different = [key for key in one if not torch.equal(one[key], other[key])]
        assert not different, f"tp {tp} pp {pp}: {different}"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_vocabulary_padding_is_zero(tp):
    """Rows past the true vocabulary are zero on every rank, those that hold nothing else included."""
    model = tiny_model()
    for rank in range(tp):
        stage = make_stage(model, tp=fake_axis(tp, rank))
        for layer in (stage.embedding, stage.head):
            true_rows = max(0, min(layer.weight.shape[0], model.vocab_size - layer.first_row))
            assert layer.weight[true_rows:].count_nonzero() == 0


def is_cut(stage: Stage) -> dict[str, bool]:
    return {name: parameter.tensor_model_parallel for name, parameter in stage.named_parameters()}


def test_cut_parameters_are_marked():
    """Matrices and the biases of column layers are marked as cut over tp, so that a gradient norm counts each part;
    norms, position tables and the biases of row layers count once. Without tp nothing is marked."""
    model = tiny_model(**GPT_STYLE)
    marks = is_cut(make_stage(model, tp=fake_axis(2, 0)))
    whole = {name for name, cut in marks.items() if not cut}
    norms = {name for name in marks if "norm" in name}
    row_biases = {f"blocks.{block}.{layer}.bias" for block in (0, 1) for layer in ("attention.o", "mlp.down")}
    assert whole == {"embedding.positions", *norms, *row_biases}
    assert not any(is_cut(make_stage(model)).values())


def test_deviations_are_gpt2s():
    """Matrices have the deviation init_std, those that write to the residual stream init_std / sqrt(2 x layers)
    unless that is off; norms are 1 and biases 0."""
    for scaled in (True, False):
        model = tiny_model(**GPT_STYLE, init_std=0.02, init_depth_scaling=scaled)
        residual = 0.02 / (2 * model.num_layers) ** 0.5 if scaled else 0.02
        for name, weight in assemble(model, 1, 1).items():
            if "norm.weight" in name:
                assert bool((weight == 1).all())
            elif name.endswith("bias"):
                assert bool((weight == 0).all())
            else:
                std = residual if name.endswith(("attention.o.weight", "mlp.down.weight")) else 0.02
                error = SIGMAS * std / (2 * weight.numel()) ** 0.5
                assert abs(weight.std().item() - std) < error, name


def test_weights_differ_by_name_and_seed():
    """Two weights of one shape, and one weight under two seeds, are drawn apart."""
    model = tiny_model()
    row = weight_table(model)["blocks.0.mlp.gate.weight"]
    other = weight_table(model)["blocks.0.mlp.up.weight"]
    source, again = FreshWeights(model, 1), FreshWeights(model, 2)
    rectangle = row.local(1, 0)
    assert not torch.equal(source.read(row, rectangle), source.read(other, rectangle))
    assert not torch.equal(source.read(row, rectangle), again.read(row, rectangle))
    assert torch.equal(source.read(row, rectangle), FreshWeights(model, 1).read(row, rectangle))


def test_fill_sets_a_source_in_the_stages_own_format():
    """A stage in bf16 gets the rounded weights, nothing else."""
    model = tiny_model()
    wide, narrow = make_stage(model, dtype=torch.float32), make_stage(model, dtype=torch.bfloat16)
    fill(narrow, FreshWeights(model, 1))
    for first, second in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert second.dtype == torch.bfloat16
        assert torch.equal(first.to(torch.bfloat16), second)
