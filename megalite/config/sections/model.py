"""The section `model`: the architecture."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from megalite.config.presets import PRESETS, with_preset
from megalite.config.section import Section
from megalite.errors import did_you_mean


class RopeScaling(Section):
    """Stretching of the rotary frequencies to longer sequences than the base frequencies suit."""

    type: Literal["linear", "llama3"]
    """`linear` divides every frequency by `factor` (Chen et al. 2023); `llama3` only the low ones (Llama 3.1)."""
    factor: PositiveFloat = 8.0
    """How many times longer the sequences become."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above original_max_positions / low_freq_factor are divided by `factor`."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below original_max_positions / high_freq_factor are left alone."""
    original_max_positions: PositiveInt = 8192
    """llama3: sequence length in tokens of the training before the stretch."""


class RopeConfig(Section):
    """Rotary position embedding (Su et al. 2021), in the half-split form of GPT-NeoX and Llama in Hugging Face."""

    theta: PositiveFloat = 10000.0
    """Base of the frequencies. Raise it (500000) for long sequences."""
    fraction: float = Field(1.0, gt=0.0, le=1.0)
    """Part of each head that is rotated; 0.25 is GPT-NeoX's choice."""
    scaling: RopeScaling | None = None
    """Stretch to longer sequences; null for none."""


class MupConfig(Section):
    """Maximal update parametrization (Yang et al. 2022): rates tuned on a narrow model hold on a wide one.

    The width multiplier m is hidden_size / base_hidden_size. Matrices inside the blocks start narrower by sqrt(m) and
    learn at lr / m (adamw, adamw8bit, lion) or lr / sqrt(m) (muon); logits are divided by m; attention divides by
    head_dim instead of its root. At m = 1 nothing changes.
    """

    base_hidden_size: PositiveInt = 256
    """hidden_size of the model that the settings were tuned on."""
    base_ffn_hidden_size: PositiveInt | None = None
    """Its ffn_hidden_size; null takes the same ratio to hidden_size as here."""
    base_head_dim: PositiveInt | None = None
    """Its head_dim; null takes the same as here, the number of heads growing with the width."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor on the embedding; tuned on the base model and kept."""
    output_multiplier: PositiveFloat = 1.0
    """Factor on the logits, beside 1 / m; tuned on the base model and kept."""


class ModelConfig(Section):
    """A decoder-only transformer. Start from a preset and override what differs."""

    preset: str | None = None
    """Name of a preset (`megalite config presets` lists them); keys given beside it win over the preset's."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream."""
    num_layers: PositiveInt = Field(4, le=10_000)
    """Number of transformer blocks."""
    num_heads: PositiveInt = 4
    """Number of query heads; tp must divide it."""
    num_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); null means num_heads."""
    head_dim: PositiveInt | None = None
    """Width of a head; null means hidden_size / num_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Width inside the MLP; null means 4 x hidden_size for gelu and 8/3 x hidden_size, rounded up to 64, for swiglu."""
    vocab_size: PositiveInt | None = None
    """True vocabulary size in tokens; null takes the tokenizer's. Padding for tp is derived and never exported."""
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """MLP form: gated SiLU (Shazeer 2020), or plain GELU, exact or by tanh (GPT-2)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention, before the MLP and at the end. LayerNorm always has a bias."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary positions, or a learned table of max_positions rows (GPT-2)."""
    rope: RopeConfig = RopeConfig()
    """Rotary settings; ignored only when positions is `learned`, in which case they must be left at their defaults."""
    max_positions: PositiveInt | None = None
    """Longest sequence the model is meant for, in tokens; null means batch.seq_len. Sizes the learned table."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation (Qwen3)."""
    bias: Literal["none", "qkv", "attention", "all"] = "none"
    """Which linear layers have a bias: none (Llama), query, key and value (Qwen2), these and attention's output, or all
    (GPT-2)."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of log(Z)^2 beside the cross-entropy of each token, Z being the sum that softmax divides by (PaLM:
    1e-4); keeps logits from drifting. Training alone minimises it: the loss in metrics stays the cross-entropy."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head."""
    sliding_window: PositiveInt | None = None
    """Attend to this many tokens back, the token itself included (Mistral); null for the whole document."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout after the embedding and on each residual branch. The mask is a function of seed, token and channel, so
    it is the same in every layout."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    init_depth_scaling: bool = True
    """Divide the deviation of the two projections that write to the residual stream by sqrt(2 x num_layers) (GPT-2)."""
    mup: MupConfig | None = None
    """Maximal update parametrization; null for the usual one."""

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections to query, key and value have a bias."""
        return self.bias != "none"

    @property
    def has_output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.bias in ("attention", "all")

    @property
    def has_mlp_bias(self) -> bool:
        """Whether the MLP's linear layers have biases."""
        return self.bias == "all"

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
