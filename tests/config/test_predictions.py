"""What must hold where a model predicts further than the next token."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.architecture.settings import MtpConfig
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError

MODEL = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "ffn_hidden_size": 128, "vocab_size": 101, "mtp": {}}
BATCH = {"micro_batch_size": 1, "global_batch_size": 8}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a noise scale of a gradient in two parts": (
        {"parallel": {"pp": 2}, "batch": {**BATCH, "noise_scale": {}}},
        "batch.noise_scale: an embedding that the stage of the head has too",
    ),
    "a table of positions": ({"model": {"positions": "learned"}}, "model.mtp: tokens further ahead have no rows"),
    "muP": ({"model": {"mup": {"base_hidden_size": 32}}}, "model.mup: no rule is known here for the matrix that joins"),
    "steps that fall": ({"model": {"mtp": {"loss_weight_steps": [[5, 0.1], [3, 0.2]]}}}, r"must rise, found \[5, 3\]"),
    "none": ({"model": {"mtp": {"num_layers": 0}}}, "num_layers"),
    "a negative weight": ({"model": {"mtp": {"loss_weight": -0.1}}}, "loss_weight"),
}


def config(**sections: Any) -> Config:
    model = {**MODEL, **sections.pop("model", {})}
    return Config(model=model, batch=sections.pop("batch", BATCH), train={"steps": 1}, **sections)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    changes, sentence = REFUSED[name]
    with pytest.raises((ConfigError, ValueError), match=sentence):
        validate(config(**changes), changes.get("parallel", {}).get("pp", 1))


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_pipelines_whose_ends_meet(schedule: str):
    validate(config(parallel={"pp": 2, "schedule": schedule}), 2)


def test_weight_by_step():
    """The first weight, until a step that names another."""
    mtp = MtpConfig(loss_weight=0.3, loss_weight_steps=((10, 0.1), (20, 0.0)))
    assert [mtp.weight_at(step) for step in (1, 9, 10, 19, 20, 99)] == [0.3, 0.3, 0.1, 0.1, 0.0, 0.0]
    assert MtpConfig().weight_at(10**9) == 0.3
