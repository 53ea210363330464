"""Small filled models for tests of layers."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.config.fill import fill_model
from megalite.config.schema import BatchConfig, ModelConfig


def small_model(**settings: Any) -> Architecture:
    """A filled model that tp 4 divides, with some settings replaced."""
    defaults = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "ffn_hidden_size": 48,
        "vocab_size": 101,
        "max_positions": 64,
    }
    return fill_model(ModelConfig(**{**defaults, **settings}), BatchConfig(seq_len=64))
