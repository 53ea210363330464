"""A class of transformers: which models it represents, what it calls each weight, and its config.json both ways.

No torch here: whether a config can be exported is asked before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.checkpoint.hf.settings import Key, Settings
from megalite.config.schema import ModelConfig

QKV = ("attention.q", "attention.k", "attention.v")

EVEN_HEADS = "hidden_size / num_heads"
ALL_HEADS = "num_heads"


@dataclass(frozen=True)
class Family:
    """A causal language model of transformers."""

    model_type: str
    """The value in config.json."""
    architecture: str
    """Name of the class."""
    needs: Mapping[str, tuple]
    """For each trait of a model (see `traits`) the values that the class can represent; others may be anything."""
    keys: Mapping[str, Key]
    """Field of ModelConfig -> key of config.json that has the same meaning."""
    read: Callable[[Settings], dict[str, Any]]
    """The other fields of a model, from the other keys."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The other keys of config.json, of a filled model."""
    outer: Mapping[str, str]
    """Canonical name -> name, outside the blocks."""
    blocks: str
    """What the names inside the blocks begin with."""
    inner: Mapping[str, str]
    """Canonical name without `blocks.N.` and `.weight` -> the same of transformers, inside a block."""
    harmless: frozenset[str] = frozenset()
    """Keys of this class, beside those of all classes, that change nothing of what it computes."""
    qkv: str = "separate"
    """separate; whole: fused q | k | v; per_head: fused q, k, v of each head."""
    transposed: bool = False
    """Whether the matrices inside the blocks are stored `[in, out]`."""
    condition: str = ""
    """What else an export depends on, for people."""

    @property
    def base(self) -> str:
        """What all names but the head's begin with; folders saved without the head lack it."""
        return self.blocks.split(".")[0] + "."


def traits(model: ModelConfig) -> dict[str, Any]:
    """What decides which classes can represent a filled model."""
    is_even = model.head_dim * model.num_heads == model.hidden_size
    return {
        "norm": model.norm,
        "activation": model.activation,
        "positions": model.positions,
        "rope.fraction": model.rope.fraction,
        "qk_norm": model.qk_norm,
        "bias": model.bias,
        "sliding_window": model.sliding_window,
        "num_kv_heads": ALL_HEADS if model.num_kv_heads == model.num_heads else model.num_kv_heads,
        "head_dim": EVEN_HEADS if is_even else model.head_dim,
        "hidden_size % num_heads": model.hidden_size % model.num_heads,
    }
