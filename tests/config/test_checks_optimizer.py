"""Settings of the section `optimizer` that would have no effect, or cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError
from tests.config.test_files import ROOT, run, world_size_of

REFUSED = [
    ({"name": "adamw", "momentum": 0.9}, "optimizer.momentum: found 0.9, but it has no effect with name=adamw"),
    ({"name": "lion", "eps": 1e-6}, "optimizer.eps: found 1e-06, but it has no effect with name=lion"),
    ({"name": "adafactor", "betas": [0.9, 0.99]}, "optimizer.betas: found"),
    ({"name": "sgd", "newton_schulz_steps": 6}, "has no effect with name=sgd; leave it at 5"),
    ({"noise_decay": 1.0}, "optimizer.noise_decay: found 1.0, but it has no effect with noise=0"),
    ({"clip": {"by": "value", "threshold": 1, "window": 20}}, "optimizer.clip.window: found 20"),
    ({"clip": {"by": "percentile", "threshold": 100}}, "optimizer.clip.threshold: found 100, expected a percentile"),
]


@pytest.mark.parametrize(("settings", "complaint"), REFUSED)
def test_refused(settings: dict[str, Any], complaint: str):
    """What has no effect is named, with the value to leave it at."""
    with pytest.raises(ConfigError) as caught:
        validate(Config(optimizer=settings, train={"steps": 10}), 1)
    assert complaint in str(caught.value)


RECIPES = {
    "8-bit AdamW": ["optimizer.name=adamw8bit"],
    "Lion": ["optimizer.name=lion", "optimizer.lr=3.0e-4", "optimizer.betas=[0.9, 0.99]", "optimizer.weight_decay=0.3"],
    "Adafactor": ["optimizer.name=adafactor", "optimizer.clip_grad_norm=null"],
    "Muon": ["optimizer.name=muon"],
    "SGD": ["optimizer.name=sgd", "optimizer.lr=0.3", "optimizer.momentum=0.9"],
    "rates by depth": ["optimizer.lr_scales.layer_decay=0.9", "optimizer.lr_scales.embedding=0.1"],
    "clip each number": ["optimizer.clip.by=value", "optimizer.clip.threshold=0.01"],
    "clip each weight": ["optimizer.clip.by=parameter", "optimizer.clip.threshold=0.1"],
    "clip each block": ["optimizer.clip.by=layer", "optimizer.clip.threshold=0.3"],
    "adaptive": ["optimizer.clip.by=unit", "optimizer.clip.threshold=0.01", "optimizer.clip_grad_norm=null"],
    "percentile": ["optimizer.clip.by=percentile", "optimizer.clip.threshold=90", "optimizer.clip.window=200"],
    "centralisation": ["optimizer.centralize=true"],
    "noise": ["optimizer.noise=1.0e-4"],
    "z-loss": ["model.z_loss=1.0e-4"],
    "half precision": ["precision.dtype=bf16"],
}
"""The overrides of docs/recipe.md, on top of configs/demo.yaml."""


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_check(name: str):
    """Each override of the page is in it as written here, and is valid for the demo."""
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert f"`{' '.join(RECIPES[name])}`" in page
    path = ROOT / "configs" / "demo.yaml"
    validate(load_config(path, RECIPES[name]), world_size_of(path))


def test_check_prints_the_bytes_of_state():
    """`config check` says what the optimizer keeps of a parameter."""
    output = run("check", str(ROOT / "configs" / "demo.yaml"), "--vocab-size", "8192", "optimizer.name=adamw8bit")
    assert "adamw8bit, 2.03 bytes of state a parameter" in output
