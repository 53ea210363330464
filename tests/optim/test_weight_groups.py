"""Groups of weights by pattern, and kinds of decay: fifty updates are those of torch's optimizers with groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.architecture.weights import weight_table
from megalite.config.schema import OptimizerConfig
from megalite.optim.groups import rates_of
from megalite.optim.rules import rule_of, state_bytes
from tests.model.stages import GPT_STYLE, tiny_model
from tests.optim import test_references
from tests.optim.test_references import (
    DECAY,
    LR,
    ROUNDING,
    DecoupledSgd,
    assert_close,
    groups,
    run_reference,
    start,
    trained,
)


def test_groups_are_torchs():
    """Rate, decay, another optimizer and none, by pattern; the first group that has a weight decides."""
    own = [
        {"match": "blocks.0.attention.[qk].*", "lr_scale": 0.5, "weight_decay": 0.3},
        {"match": ["embedding.*", "blocks.1.mlp.up.bias"], "frozen": True},
        {"match": "head.*", "optimizer": "sgd", "weight_decay": 0.0},
        {"match": "blocks.0.*", "lr_scale": 2.0},
    ]
    weights, before = start(), start()
    adamw, sgd = [], []
    for name, weight in weights.items():
        decay = DECAY if weight.dim() > 1 else 0.0
        if name.startswith(("blocks.0.attention.q.", "blocks.0.attention.k.")):
            adamw.append({"params": [weight], "lr": 0.5 * LR, "weight_decay": 0.3})
        elif name.startswith("head."):
            sgd.append({"params": [weight], "decoupled": 0.0})
        elif not name.startswith("embedding.") and name != "blocks.1.mlp.up.bias":
            lr = 2.0 * LR if name.startswith("blocks.0.") else LR
            adamw.append({"params": [weight], "lr": lr, "weight_decay": decay})
    reference = (
        torch.optim.AdamW(adamw, lr=LR, betas=(0.9, 0.95)),
        DecoupledSgd(sgd, lr=LR, momentum=0.95, nesterov=True),
    )
    run_reference(weights, *reference)
    found = trained(groups=own)
    assert_close(found, weights, 10 * ROUNDING)  # twice the rate, and steps of 20 lr
    for name in ("embedding.weight", "embedding.positions", "blocks.1.mlp.up.bias"):
        assert torch.equal(found[name], before[name].detach()), name


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_coupled_decay_is_torchs(name):
    """L2: torch's Adam, and its SGD, whose decay goes through the moments."""
    weights = start()
    if name == "adamw":
        reference = torch.optim.Adam(groups(weights), lr=LR, betas=(0.9, 0.95))
    else:
        reference = torch.optim.SGD(groups(weights), lr=LR, momentum=0.95, nesterov=True)
    run_reference(weights, reference)
    assert_close(trained(name=name, decay={"kind": "coupled"}), weights, 10 * ROUNDING)


@pytest.mark.parametrize("name", ["muon", "adafactor", "adamw8bit", "lion"])
def test_coupled_decay_is_a_gradient(name, monkeypatch):
    """With any rule it is that rule, without decay, given gradients with decay x weight added to those of matrices."""
    found = trained(name=name, decay={"kind": "coupled"})
    plain = test_references.gradients

    def with_decay(weights: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        given = plain(weights, step)
        return {n: g + DECAY * weights[n] if g.dim() > 1 else g for n, g in given.items()}

    monkeypatch.setattr(test_references, "gradients", with_decay)
    expected = trained(name=name, groups=[{"match": "*", "weight_decay": 0.0}])
    assert_close(found, expected, ROUNDING)


def test_decay_by_depth_and_independent_of_the_rate():
    """Factors of blocks, and shrinking by decay x share of the peak: what rate x decay of a weight come to."""
    model = tiny_model(num_layers=3)
    table = weight_table(model)
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "lr_scales": {"head": 4.0}}
    deep = OptimizerConfig(**settings, decay={"layer_factor": 0.5})
    found = {name: rates_of(weight, deep, model).weight_decay for name, weight in table.items()}
    assert found["blocks.2.mlp.up.weight"] == found["head.weight"] == pytest.approx(0.1)
    assert found["blocks.0.mlp.up.weight"] == pytest.approx(0.025)
    assert found["embedding.weight"] == pytest.approx(0.0125)
    apart = OptimizerConfig(**settings, decay={"kind": "independent"})
    for name in ("head.weight", "blocks.0.mlp.up.weight"):
        rates = rates_of(table[name], apart, model)
        assert 1e-2 * rates.lr_scale * rates.weight_decay == pytest.approx(0.1), name


def test_rules_and_state():
    """A group has the rule that its optimizer has for such weights; what is frozen has none, and no state."""
    own = [{"match": "blocks.0.*", "optimizer": "muon"}, {"match": "head.*", "frozen": True}]
    optimizer, table = OptimizerConfig(name="lion", groups=own), weight_table(tiny_model(**GPT_STYLE))
    rules = {
        "blocks.0.mlp.up.weight": ("muon", 4),
        "blocks.0.mlp.up.bias": ("adamw", 8),
        "blocks.1.mlp.up.weight": ("lion", 4),
        "head.weight": ("frozen", 0),
    }
    for name, (rule, num_bytes) in rules.items():
        weight = table[name]
        size = weight.shape[0] * (weight.shape[1] if len(weight.shape) > 1 else 1)
        assert (rule_of(weight, optimizer), state_bytes(weight, optimizer)) == (rule, num_bytes * size), name
