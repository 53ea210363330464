"""Equal start: every layout holds parts of the same whole weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.architecture.initial import cut_deviation
from megalite.architecture.weights import weight_table
from megalite.config.fill import fill_model
from megalite.config.load import load_config
from megalite.config.plan import default_world_size
from megalite.config.schema import BatchConfig, ModelConfig
from megalite.config.validate import validate
from megalite.errors import ConfigError
from megalite.model.initialize import FreshWeights, fill, local_weights
from megalite.model.transformer import Stage
from megalite.parallel.axes import Axis
from megalite.parallel.random import name_seed
from tests.model.stages import GPT_STYLE, LATENTS, make_stage, tiny_model

MODELS = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "grouped-query": {"num_heads": 8, "num_kv_heads": 4, "qk_norm": True},
    "gpt": GPT_STYLE,
    "latents": LATENTS,
    "evenly": {"init": {"rule": "xavier_uniform"}, "init_depth_scaling": "layer", "num_kv_heads": 4},
    "cut": {"init": {"rule": "fan_in", "cut": 2.0, "head_std": 0.1}},
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


def draw(name: str, model: ModelConfig) -> Tensor:
    """A weight whole."""
    row = weight_table(model)[name]
    return FreshWeights(model, 1).read(row, row.local(1, 0))


def test_the_default_is_what_it_was():
    """Bit for bit what was drawn before there were other rules: one normal distribution, from a seed of the name."""
    for mup in (None, {"base_hidden_size": 16}):
        model = tiny_model(mup=mup)
        for row in weight_table(model).values():
            if row.init in ("normal", "residual"):
                std = 0.2 / (4**0.5 if row.init == "residual" else 1.0)
                if mup is not None and row.layer.startswith("blocks."):
                    std = std / 2.0**0.5
                generator = torch.Generator().manual_seed(name_seed(1, row.name))
                wanted = torch.empty(row.shape).normal_(0.0, std, generator=generator)
                assert torch.equal(draw(row.name, model), wanted), row.name


LARGE = {
    "hidden_size": 512,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 32,
    "ffn_hidden_size": 640,
    "num_layers": 2,
    "vocab_size": 700,
    "moe": {"num_experts": 2, "ffn_hidden_size": 320, "every": 2, "shared_ffn_hidden_size": 96},
}
"""Large enough to see a deviation, no two matrices of a block of one shape but keys and values, gate and up."""
LARGE_LATENTS = {
    "hidden_size": 512,
    "num_heads": 8,
    "vocab_size": 700,
    "num_layers": 2,
    "mla": {"q_lora_rank": 160, "kv_lora_rank": 96, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "mtp": {"num_layers": 1},
}

RULES: dict[str, Any] = {
    "xavier_normal": torch.nn.init.xavier_normal_,
    "xavier_uniform": torch.nn.init.xavier_uniform_,
    "he_normal": lambda weight: torch.nn.init.kaiming_normal_(weight, nonlinearity="relu"),
    "he_uniform": lambda weight: torch.nn.init.kaiming_uniform_(weight, nonlinearity="relu"),
    "fan_in": lambda weight: torch.nn.init.kaiming_normal_(weight, nonlinearity="linear"),
}
"""torch's own, whose fans are of `[out, in]` too."""


def large_model(**settings: Any) -> ModelConfig:
    return fill_model(ModelConfig(**settings), BatchConfig(seq_len=16))


def matrices(model: ModelConfig) -> dict[str, Tensor]:
    """Every matrix but the table, drawn once."""
    rows = [row for row in weight_table(model).values() if len(row.shape) == 2 and row.layer != "embedding"]
    return {row.name: draw(row.name, model) for row in rows}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", [LARGE, LARGE_LATENTS], ids=["experts", "latents"])
def test_rules_are_torchs(rule, sizes):
    """Every matrix, each expert's and those of latents, router and head among them, has the deviation, and where it is
    drawn evenly the bound, of torch's function on the unfused matrix; means are 0; outputs to the stream are scaled."""
    model = large_model(**sizes, init={"rule": rule})
    torch.manual_seed(0)
    for name, weight in matrices(model).items():
        is_residual = name.endswith(("attention.o.weight", "down.weight"))
        scale = 0.5 if is_residual else 1.0  # sqrt(2 x 2 layers)
        theirs = RULES[rule](torch.empty_like(weight)) * scale
        error = SIGMAS * float(theirs.std()) / (2 * weight.numel()) ** 0.5
        assert abs(weight.std() - theirs.std()) < 2 * error, name
        assert abs(weight.mean()) < SIGMAS * weight.std() / weight.numel() ** 0.5, name
        if rule.endswith("uniform"):
            fans = weight.shape[0] + weight.shape[1]
            bound = scale * math.sqrt(6 / fans if rule == "xavier_uniform" else 6 / weight.shape[1])
            assert bound * (1 - 40 / weight.numel()) < weight.abs().max() <= bound * (1 + 1e-6), name
            assert abs(theirs.abs().max() / bound - 1) < 40 / weight.numel(), name
    table = draw("embedding.weight", model)
    assert abs(table.std() - 0.02) < SIGMAS * 0.02 / (2 * table.numel()) ** 0.5


def test_gains():
    """torch's default for linear layers, kaiming_uniform_ with a = sqrt(5), is he_uniform with a gain of sqrt(1/3)."""
    model = large_model(**LARGE, init={"rule": "he_uniform", "gain": 3**-0.5})
    weight = draw("blocks.0.attention.q.weight", model)
    theirs = torch.nn.Linear(512, 256).weight
    assert abs(theirs.abs().max() - weight.abs().max()) < 1e-4
    assert 0.999 * 512**-0.5 < weight.abs().max() <= 512**-0.5 * (1 + 1e-6)


@pytest.mark.parametrize("cut", [0.5, 2.0, 3.0])
def test_a_cut_normal_distribution(cut):
    """Its deviation is the one asked for, and its bounds those of a wider normal distribution; or both are those of
    torch's trunc_normal_, to whose distribution it is as near as two samples of one are (Kolmogorov-Smirnov)."""
    name, std = "blocks.0.mlp.gate.weight", 0.02
    exact = draw(name, large_model(**LARGE, init={"cut": cut}))
    assert abs(exact.std() - std) < SIGMAS * std / (2 * exact.numel()) ** 0.5
    bound = cut * std / cut_deviation(cut)
    assert 0.98 * bound < exact.abs().max() <= bound * (1 + 1e-6)

    narrower = draw(name, large_model(**LARGE, init={"cut": cut, "cut_keeps_std": False}))
    torch.manual_seed(0)
    theirs = torch.nn.init.trunc_normal_(torch.empty_like(exact), std=std, a=-cut * std, b=cut * std)
    assert 0.98 * cut * std < narrower.abs().max() <= cut * std * (1 + 1e-6)
    assert abs(narrower.std() - theirs.std()) < SIGMAS * std / narrower.numel() ** 0.5
    both = torch.cat((narrower.flatten(), theirs.flatten()))
    ours_first = torch.cat((torch.ones(narrower.numel()), -torch.ones(theirs.numel())))
    steps = ours_first[both.argsort()].cumsum(0).abs().max() / theirs.numel()
    assert steps < 2.5 * (2 / theirs.numel()) ** 0.5  # once in a quarter of a million pairs


def test_depth():
    """Outputs to the stream are divided by sqrt(2 (l + 1)) of their own block, those that predict further count on."""
    for rule, own in (("normal", 0.02), ("fan_in", None)):
        model = large_model(**LARGE_LATENTS, init={"rule": rule}, init_depth_scaling="layer")
        for depth, block in enumerate(("blocks.0", "blocks.1", "mtp.0.block")):
            for name in ("attention.o.weight", "mlp.down.weight"):
                weight = draw(f"{block}.{name}", model)
                std = (own or weight.shape[1] ** -0.5) / (2 * (depth + 1)) ** 0.5
                assert abs(weight.std() - std) < SIGMAS * std / (2 * weight.numel()) ** 0.5


def test_tables_and_the_head_have_their_own():
    """`embedding_std` and `head_std` go before any rule, and a cut holds for them too."""
    for rule in ("normal", "xavier_uniform"):
        init = {"rule": rule, "embedding_std": 0.5, "head_std": 0.003, "cut": 2.0}
        model = large_model(**LARGE, positions="learned", max_positions=400, init=init)
        for name, std in (("embedding.weight", 0.5), ("embedding.positions", 0.5), ("head.weight", 0.003)):
            weight = draw(name, model)
            assert abs(weight.std() - std) < SIGMAS * std / (2 * weight.numel()) ** 0.5
            assert weight.abs().max() <= 2 * std / cut_deviation(2.0) * (1 + 1e-6)


def test_with_mup():
    """Under muP matrices are narrower by the root of the width multiplier, cut or not, and what is set for tables and
    the head stays."""
    init = {"cut": 2.0, "head_std": 0.3, "embedding_std": 0.4}
    model = large_model(**LARGE_LATENTS | {"mla": None}, init=init, mup={"base_hidden_size": 128})
    for name, std in (("blocks.0.mlp.up.weight", 0.01), ("head.weight", 0.3), ("embedding.weight", 0.4)):
        weight = draw(name, model)
        assert abs(weight.std() - std) < SIGMAS * std / (2 * weight.numel()) ** 0.5


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            ["model.init.rule=he_normal", "model.mup={base_hidden_size: 64}"],
            "model.init.rule: he_normal makes deviations",
        ),
        (["model.init.gain=2.0"], "model.init.gain: found 2.0, but it has no effect with rule=normal"),
        (
            ["model.init.cut_keeps_std=false"],
            "model.init.cut_keeps_std: found False, but it has no effect with cut=null",
        ),
        (["model.init.head_std=0.1", "model.tie_embeddings=true"], "model.init.head_std: found 0.1, but the head is"),
        (
            ["model.init.rule=fan_in", "model.init.embedding_std=0.1", "model.init_std=0.5"],
            "model.init_std: found 0.5, but it has no effect with init.rule=fan_in",
        ),
    ],
)
def test_what_goes_not_together_is_refused(tmp_path, settings, complaint):
    """By name, before anything is built."""
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 1}\nmodel: {vocab_size: 101}\n")
    config = load_config(path, settings)
    with pytest.raises(ConfigError) as caught:
        validate(config, default_world_size(config))
    assert complaint in str(caught.value)
