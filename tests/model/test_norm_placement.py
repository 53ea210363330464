"""Where norms stand: each placement against a plain module, and in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.architecture.weights import weight_table
from megalite.checkpoint.hf.families.registry import choose_family
from megalite.config.load import load_config
from megalite.config.plan import default_world_size
from megalite.config.validate import validate
from megalite.errors import ConfigError, UserError
from megalite.model.initialize import FreshWeights
from megalite.model.transformer import documents_of
from tests.kit.spawn import run_ranks
from tests.kit.train import tiny_config, train
from tests.model.stages import SEQ_LEN, VOCAB, gradients, make_stage, tiny_model

PLACEMENTS = ("before", "after", "both", "post")

EXACT = 1e-12
"""Relative, in float64: products in another order."""
CURVE_TOLERANCE = 2e-5
"""fp32 over 3 steps at a high learning rate."""

ORIGINAL = {"norm": "layernorm", "activation": "relu", "bias": "all", "positions": "learned"}
"""The original Transformer, decoder alone, with learned positions."""


class PlainBlock(nn.Module):
    """A block as a textbook has it, for each placement. Shape: `[b, s, h]`."""

    def __init__(self, placement: str, hidden: int, heads: int, width: int):
        super().__init__()
        self.placement = placement
        self.attention = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, hidden)
        names = ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")
        self.norms = nn.ModuleDict({name: nn.LayerNorm(hidden, eps=1e-5) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        x = self._add(x, "attention", self._attend)
        return self._add(x, "mlp", lambda y: self.down(torch.relu(self.up(y))))

    def _add(self, x: Tensor, name: str, layer: Any) -> Tensor:
        before, after = self.norms[f"{name}_norm"], self.norms[f"{name}_out_norm"]
        match self.placement:
            case "before":
                return x + layer(before(x))
            case "after":
                return x + after(layer(x))
            case "both":
                return x + after(layer(before(x)))
            case _:
                return after(x + layer(x))

    def _attend(self, x: Tensor) -> Tensor:
        hidden = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.attention(x, x, x, attn_mask=hidden, need_weights=False)[0]


class PlainModel(nn.Module):
    """Blocks between tables and a head."""

    def __init__(self, placement: str, model: Any):
        super().__init__()
        hidden = model.hidden_size
        self.embedding, self.positions = nn.Embedding(VOCAB, hidden), nn.Embedding(model.max_positions, hidden)
        self.blocks = nn.ModuleList(
            PlainBlock(placement, hidden, model.num_heads, model.ffn_hidden_size) for _ in range(model.num_layers)
        )
        self.final_norm, self.head = nn.LayerNorm(hidden, eps=1e-5), nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))

    def weight(self, name: str) -> tuple[nn.Parameter, slice]:
        """Where a canonical weight is."""
        parts = name.split(".")
        if name == "embedding.positions":
            return self.positions.weight, slice(None)
        if parts[0] != "blocks":
            return self.get_parameter(name), slice(None)
        block = f"blocks.{parts[1]}"
        if parts[2].endswith("norm"):
            return self.get_parameter(f"{block}.norms.{parts[2]}.{parts[3]}"), slice(None)
        _, _, layer, part, kind = parts
        if layer == "mlp":
            return self.get_parameter(f"{block}.{part}.{kind}"), slice(None)
        if part == "o":
            return self.get_parameter(f"{block}.attention.out_proj.{kind}"), slice(None)
        fused = self.get_parameter(f"{block}.attention.in_proj_{kind}")
        size = fused.shape[0] // 3
        return fused, slice("qkv".index(part) * size, ("qkv".index(part) + 1) * size)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_plain_module_computes_the_same(placement):
    """Logits, and the gradient of every weight, are those of torch's own attention, linear layers and norms, put
    together as each paper draws them, in float64."""
    model = tiny_model(**ORIGINAL, norm_placement=placement)
    stage, plain = make_stage(model), PlainModel(placement, model).double()
    source, table = FreshWeights(model, 1), weight_table(model)
    for name, row in table.items():
        parameter, rows = plain.weight(name)
        parameter.data[rows] = source.read(row, row.local(1, 0)).double()
    tokens = torch.randint(0, VOCAB, (3, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    weights = torch.randn(3 * SEQ_LEN, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, wanted = stage.logits(tokens.flatten(), documents_of(tokens)), plain(tokens).flatten(0, 1)
    assert (found - wanted).abs().max() <= EXACT * wanted.abs().max()
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    own = gradients(stage)
    assert own.keys() == table.keys()
    largest = max(value.abs().max() for value in own.values())
    for name, value in own.items():
        parameter, rows = plain.weight(name)
        assert parameter.grad is not None
        assert (value - parameter.grad[rows]).abs().max() <= EXACT * largest, name


def test_torch_has_the_original():
    """A post-norm block is torch's own encoder layer with `norm_first=False` and a causal mask."""
    model = tiny_model(**ORIGINAL, norm_placement="post")
    plain = PlainModel("post", model).double()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=False, dtype=torch.float64)
    block = plain.blocks[0]
    assert isinstance(block, PlainBlock)
    block.attention.load_state_dict(layer.self_attn.state_dict())
    for ours, theirs in (("up", "linear1"), ("down", "linear2")):
        getattr(block, ours).load_state_dict(getattr(layer, theirs).state_dict())
    x = torch.randn(2, SEQ_LEN, 32, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(SEQ_LEN, dtype=torch.float64)
    wanted = layer(x, src_mask=mask)
    assert (block(x) - wanted).abs().max() <= EXACT * wanted.abs().max()


LAYOUTS = [
    {"parallel": {"tp": 2, "sequence_parallel": True}},
    {"parallel": {"pp": 2, "zero_stage": 1}, "train": {"recompute": "selective"}},
    {"parallel": {"dp": 2, "zero_stage": 2}},
    {"parallel": {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}},
]


def train_layouts(layouts: list[dict[str, Any]]) -> dict[str, list[list[tuple[float, float]]]]:
    return {
        placement: [train(tiny_config(**layout, model={"norm_placement": placement}), 3) for layout in layouts]
        for placement in PLACEMENTS
    }


def test_layouts_agree():
    """Three steps of each placement have the losses and gradient norms of one process, whatever the layout."""
    truth = run_ranks(train_layouts, 1, [{}])[0]
    assert len({curves[0][-1] for curves in truth.values()}) == len(PLACEMENTS), "placements that are one"
    for found in run_ranks(train_layouts, 2, LAYOUTS):
        for placement, curves in found.items():
            wanted = torch.tensor(truth[placement][0])
            off = [float((torch.tensor(curve) - wanted).abs().max()) for curve in curves]
            assert max(off) < CURVE_TOLERANCE, (placement, off)


@pytest.mark.parametrize(
    ("placement", "wanted"),
    [("before", "LlamaForCausalLM"), ("after", "Olmo2ForCausalLM"), ("both", None), ("post", None)],
)
def test_families_that_have_it(placement, wanted):
    """Pre-norm and OLMo 2's exports, Gemma's where the rest is Gemma's too; post-norm by no class, which is said."""
    settings = {"norm_placement": placement, "qk_norm": "whole" if placement == "after" else False}
    if wanted is not None:
        assert choose_family(tiny_model(**settings)).architecture == wanted
        return
    with pytest.raises(UserError, match=f"norm_placement.*{placement}"):
        choose_family(tiny_model(**settings))


def test_a_parallel_residual_has_no_norm_between(tmp_path):
    """Post-norm stands between attention and MLP, which a parallel residual leaves no place for."""
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 1}\nmodel: {vocab_size: 101, norm_placement: post, parallel_residual: true}\n")
    config = load_config(path)
    with pytest.raises(ConfigError, match=r"model.parallel_residual: norm_placement=post"):
        validate(config, default_world_size(config))
