"""A class of transformers: which models it represents, what it calls each weight, and its config.json both ways.

No torch here: whether a config can be exported is asked before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.architecture.settings import MoeConfig
from megalite.checkpoint.hf.settings import Key, Settings

QKV = ("attention.q", "attention.k", "attention.v")


class _Anything(tuple[Any, ...]):
    """Values of a trait, none of which is refused by itself."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return True


ANYTHING = _Anything()

PLAIN: dict[str, tuple] = {
    "layer_types": ("one",),
    "sliding_rope": (False,),
    "attention": ("softmax",),
    "norm_placement": ("before",),
    "parallel_residual": (False,),
    "attention_scale": (False,),
    "attention_soft_cap": (False,),
    "attention_sinks": (False,),
    "logit_soft_cap": (False,),
    "embedding_scale": (1.0,),
    "rope.scaling": (None, "linear", "llama3", "yarn", "longrope"),
    "rope.interleaved": (False,),
    "mla": (False,),
    "mtp": (False,),
    "moe": (False,),
    "moe.scores": ("softmax",),
    "moe.normalize": (True,),
    "moe.scale": (1.0,),
    "moe.shared": (False,),
    "moe.shared_gate": (False,),
    "moe.num_groups": (1,),
    "moe.bias_rate": (False,),
    "moe.logit_bias": (False,),
    "moe.blocks": ("all", "some"),
}
"""What few classes have: those that say nothing of it have these."""

EVEN_HEADS = "hidden_size / num_heads"
ALL_HEADS = "num_heads"
SQRT_HIDDEN = "sqrt(hidden_size)"
ROOT = "1 / sqrt(a whole number)"


@dataclass(frozen=True)
class Family:
    """A causal language model of transformers."""

    model_type: str
    """The value in config.json."""
    architecture: str
    """Name of the class."""
    needs: Mapping[str, tuple]
    """For each trait of a model (see `traits`) the values that the class can represent: of `PLAIN` where one is left
    out that stands there, anything for the others."""
    keys: Mapping[str, Key]
    """Field of Architecture -> key of config.json that has the same meaning."""
    read: Callable[[Settings], dict[str, Any]]
    """The other fields of a model, from the other keys."""
    write: Callable[[Architecture], dict[str, Any]]
    """The other keys of config.json, of a filled model."""
    outer: Mapping[str, str]
    """Canonical name -> name, outside the blocks."""
    blocks: str
    """What the names inside the blocks begin with."""
    inner: Mapping[str, str]
    """Canonical name without `blocks.N.` and `.weight` -> the same of transformers, inside a block, `*` for the number
    of an expert. Several of one name there are fused in this order: all rows of the first, then all of the next."""
    predicting: Mapping[str, str] = field(default_factory=dict)
    """The same of layers that predict further ahead, beside their block: in blocks that count on from the last one."""
    harmless: frozenset[str] = frozenset()
    """Keys of this class, beside those of all classes, that change nothing of what it computes."""
    fused_by_head: frozenset[str] = frozenset()
    """Names in `inner` of fused tensors that hold the rows of each key and value head together: q0 k0 v0 | q1 k1 v1."""
    transposed: bool = False
    """Whether the matrices inside the blocks are stored `[in, out]`."""
    transposed_experts: bool = False
    """The same of experts that are one tensor: their names in `inner` have no `*`."""
    experts_by_row: bool = False
    """Whether such a tensor of fused weights has their rows in turns: gate0 up0 | gate1 up1."""
    published_code: frozenset[str] = frozenset()
    """Code that published folders bring in `auto_map`, and that this class has taken the place of."""
    refuses: Callable[[Architecture], Iterable[str]] = lambda model: ()
    """What keeps a model from this class that no trait by itself tells, as sentences."""
    condition: str = ""
    """What else an export depends on, for people."""
    rank: int = 50
    """Of several classes that represent a model the one of the lowest rank is taken."""

    @property
    def all_needs(self) -> Mapping[str, tuple]:
        """`needs`, and the plain value of what it leaves out."""
        return {**PLAIN, **self.needs}

    @property
    def base(self) -> str:
        """What all names but the head's begin with; folders saved without the head lack it."""
        return self.blocks.split(".")[0] + "."


def traits(model: Architecture) -> dict[str, Any]:
    """What decides which classes can represent a filled model."""
    is_even = model.head_dim * model.num_heads == model.hidden_size
    return {
        "attention": model.attention,
        "norm": model.norm,
        "activation": model.activation,
        "positions": model.positions,
        "rope.fraction": model.rope.fraction,
        "qk_norm": model.qk_norm,
        "bias": model.bias,
        "sliding_window": model.sliding_window,
        "layer_types": "mixed" if model.layer_types is not None else "one",
        "sliding_rope": model.sliding_rope is not None,
        "norm_placement": model.norm_placement,
        "parallel_residual": model.parallel_residual,
        "attention_scale": _attention_scale(model),
        "attention_sinks": model.attention_sinks,
        "attention_soft_cap": model.attention_soft_cap is not None,
        "logit_soft_cap": model.logit_soft_cap is not None,
        "embedding_scale": _embedding_scale(model),
        "rope.scaling": _stretch(model),
        "rope.interleaved": model.positions == "rope" and model.rope.interleaved,
        "mla": model.mla is not None,
        "mtp": model.mtp is not None,
        "num_kv_heads": ALL_HEADS if model.num_kv_heads == model.num_heads else model.num_kv_heads,
        "head_dim": EVEN_HEADS if is_even else model.head_dim,
        "hidden_size % num_heads": model.hidden_size % model.num_heads,
        **_experts(model),
    }


def _experts(model: Architecture) -> dict[str, Any]:
    """The traits of a model's experts; where there are none, those that ask nothing of a class."""
    moe = model.moe or MoeConfig()
    return {
        "moe": model.moe is not None,
        "moe.scores": moe.scores,
        "moe.normalize": moe.normalize,
        "moe.scale": moe.scale,
        "moe.shared": moe.shared_ffn_hidden_size > 0,
        "moe.shared_gate": moe.shared_gate,
        "moe.num_groups": moe.num_groups,
        "moe.logit_bias": moe.logit_bias,
        "moe.bias_rate": moe.bias_rate is not None,
        "moe.blocks": "all" if all(model.sparse_blocks) else "some",
    }


def _embedding_scale(model: Architecture) -> float | str:
    """The factor on the embedding, by its name where it has one."""
    return SQRT_HIDDEN if model.embedding_scale == model.hidden_size**0.5 else model.embedding_scale


def _stretch(model: Architecture) -> str | None:
    """How positions are stretched."""
    return model.rope.scaling.type if model.positions == "rope" and model.rope.scaling is not None else None


def _attention_scale(model: Architecture) -> bool | float | str:
    """The factor on the scores, False where it is the usual one."""
    if model.attention_scale is None:
        return False
    is_root = whole_scalar(model.attention_scale) ** -0.5 == model.attention_scale
    return ROOT if is_root else model.attention_scale


def whole_scalar(attention_scale: float) -> int:
    """The whole number whose inverse root is nearest to a factor."""
    return max(1, round(attention_scale**-2))
