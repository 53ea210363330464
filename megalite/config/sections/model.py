"""The section `model`: the architecture as a config gives it, with what is left to be filled in."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt, field_validator, model_validator

from megalite.architecture.settings import InitConfig, ModelSettings, MupConfig, RopeConfig, RopeScaling
from megalite.config.presets import PRESETS, with_preset
from megalite.errors import did_you_mean

__all__ = ["InitConfig", "ModelConfig", "MupConfig", "RopeConfig", "RopeScaling"]


class ModelConfig(ModelSettings):
    """A decoder-only transformer. Start from a preset and override what differs."""

    preset: str | None = None
    """Name of a preset (`megalite config presets` lists them); keys given beside it win over the preset's."""
    num_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); null means num_heads."""
    head_dim: PositiveInt | None = None
    """Width of a head; null means hidden_size / num_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Width inside the MLP; null means 4 x hidden_size for gelu and 8/3 x hidden_size, rounded up to 64, for swiglu."""
    vocab_size: PositiveInt | None = None
    """True vocabulary size in tokens; null takes the tokenizer's. Padding for tp is derived and never exported."""
    max_positions: PositiveInt | None = None
    """Longest sequence the model is meant for, in tokens; null means batch.seq_len. Sizes the learned table."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, given: Any) -> Any:
        return with_preset(given) if isinstance(given, dict) else given

    @field_validator("preset")
    @classmethod
    def _know_preset(cls, preset: str | None) -> str | None:
        if preset is not None and preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise ValueError(f"there is no preset {preset!r}{did_you_mean(preset, PRESETS)}; use one of {known}")
        return preset
