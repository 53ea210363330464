"""Models of other sizes made from one config, and runs of a given number of tokens a parameter.

From a config of width w0, with L0 layers, h0 heads, k0 key and value heads and an MLP of width f0, that of width w:

    layers L0 w / w0, rounded      heads h0 w / w0       key and value heads k0 w / w0      MLP f0 w / w0, rounded to 8

so heads keep their width and a model its shape; with a fixed depth layers stay L0. Widths for which heads come out
whole are legal. Everything else is the config's: with `model.mup` the rate of the narrow ones is right for the wide.

N counts the weights that a token is multiplied with: those of the blocks and of the head, which is the embedding where
they are tied. D counts tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, Literal

from megalite.architecture.architecture import Architecture
from megalite.architecture.costs import count_parameters, flops_per_token
from megalite.config.fill import fill
from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.config.wording import or_
from megalite.errors import ConfigError
from megalite.tokenizer.tokenizer import Tokenizer
from megalite.train.preflight import open_samples_of

Depth = Literal["scaled", "fixed"]

FFN_MULTIPLE = 8


@dataclass(frozen=True)
class Size:
    """A model of the ladder."""

    width: int
    layers: int
    num_parameters: int
    """N."""
    flops_per_token: float
    """Forward and backward, attention included."""
    settings: dict[str, Any]
    """Keys of the config that make it."""


@dataclass(frozen=True)
class SizeFamily:
    """The models that a rule makes of a config.

    Args:
        config: the config as loaded.
        vocab_size: of its model.
        depth: whether layers grow with the width.
    """

    config: Config
    vocab_size: int
    depth: Depth = "scaled"

    @property
    def base(self) -> Architecture:
        """The config's own model."""
        return fill(self.config, self.vocab_size)

    @property
    def granule(self) -> int:
        """Widths are multiples of it: those for which all heads come out whole."""
        base = self.base
        return base.hidden_size // gcd(base.hidden_size, base.num_heads, base.num_kv_heads)

    def problems(self, widths: Sequence[int]) -> Iterator[str]:
        """What keeps the rule from making models of such widths."""
        model = self.config.model
        for key in ("moe", "mla", "layer_types", "mtp"):
            if getattr(model, key) is not None:
                yield f"model.{key}: how it grows with the width is no part of the ladder's rule; use a dense model"
        for width in sorted({each for each in widths if widths.count(each) > 1}):
            yield f"--widths: {width} is there twice"
        for width in widths:
            if width < 1 or width % self.granule:
                near = sorted({max(1, width // self.granule) * self.granule, -(-width // self.granule) * self.granule})
                yield (
                    f"--widths: {width} gives no whole number of heads ({self.base.num_heads} and "
                    f"{self.base.num_kv_heads} at {self.base.hidden_size}); use {or_([str(each) for each in near])}"
                )

    def size(self, width: int) -> Size:
        """The model of a legal width."""
        base = self.base
        share = width / base.hidden_size
        settings: dict[str, Any] = {
            "model.hidden_size": width,
            "model.num_layers": base.num_layers if self.depth == "fixed" else max(1, round(base.num_layers * share)),
            "model.num_heads": round(base.num_heads * share),
            "model.num_kv_heads": round(base.num_kv_heads * share),
            "model.head_dim": base.head_dim,
            "model.ffn_hidden_size": max(1, round(base.ffn_hidden_size * share / FFN_MULTIPLE)) * FFN_MULTIPLE,
        }
        changed = {key.removeprefix("model."): value for key, value in settings.items()}
        model = fill(
            self.config.model_copy(update={"model": self.config.model.model_copy(update=changed)}), self.vocab_size
        )
        flops = flops_per_token(model, self.config.batch.seq_len)
        return Size(width, model.num_layers, multiplied_weights(model), flops, settings)

    def run(self, size: Size, ratio: float) -> dict[str, Any]:
        """Settings of a run of so many tokens a parameter, in whole steps."""
        return {**size.settings, "train.steps": self.steps(ratio * size.num_parameters), "train.tokens": None}

    def steps(self, tokens: float) -> int:
        """Whole steps nearest to a number of tokens."""
        return max(1, round(tokens / self.tokens_per_step))

    @property
    def tokens_per_step(self) -> int:
        """Of the config's batch."""
        return self.config.batch.global_batch_size * self.config.batch.seq_len

    def with_size(self, size: Size) -> Config:
        """The config with another model."""
        changed = {key.removeprefix("model."): value for key, value in size.settings.items()}
        return self.config.model_copy(update={"model": self.config.model.model_copy(update=changed)})


def multiplied_weights(model: Architecture) -> int:
    """N: all parameters but tables that are only looked up."""
    tables = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    if model.positions == "learned":
        tables += model.max_positions * model.hidden_size
    return count_parameters(model) - tables


def load_family(path: Path, overrides: Sequence[str], widths: Sequence[int], depth: Depth) -> SizeFamily:
    """The models of a config.

    Raises:
        ConfigError: the config is wrong, or the rule cannot make such widths of it.
    """
    config = load_config(path, overrides)
    if config.batch.ramp is not None or config.batch.stages or config.batch.noise_scale is not None:
        raise ConfigError(["batch: ramp, stages and noise_scale change what a step is; a ladder wants one batch"])
    family = SizeFamily(config, config.model.vocab_size or _vocab_size(config), depth)
    found = list(family.problems(widths))
    if found:
        raise ConfigError(found)
    return family


def _vocab_size(config: Config) -> int:
    """Of the tokenizer, or of the data."""
    if config.data.tokenizer is not None:
        return Tokenizer.load(config.data.tokenizer).vocab_size
    found = open_samples_of(config).vocab_size
    if found is None:
        raise ConfigError(["model.vocab_size: null, and the data does not say it; set it, or set data.tokenizer"])
    return found
