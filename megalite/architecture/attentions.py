"""How queries, keys and values are mixed, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megalite.plugins import Table


@dataclass(frozen=True)
class Attention:
    """A way to mix."""

    function: str | Callable[..., Any] | None = None
    """A function of queries, keys, values, documents and window, as `layers.attention.attend_by_document`, or
    `module:name` of one; None for the best kernel of the device."""
    takes_soft_cap: bool = False
    """Scores can be bounded (`model.attention_soft_cap`)."""


ATTENTIONS = Table("attention", {"softmax": Attention(takes_soft_cap=True)})
