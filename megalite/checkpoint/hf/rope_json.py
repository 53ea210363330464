"""Rotary settings in config.json, in two forms.

    transformers 4     rope_theta, rope_scaling: null or {rope_type, factor, ...}; NeoX: rotary_emb_base, rotary_pct
    transformers 5     rope_parameters: {rope_type, rope_theta, factor, ..., partial_rotary_factor}

Version 4 does not know the second form and version 5 mixes the two, so a folder where they disagree is two models.
Version 5 also finds theta and the fraction inside rope_scaling, where version 4 does not look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megalite.checkpoint.hf.settings import Key, Settings
from megalite.config.schema import RopeConfig

DEFAULT_THETA = 10000.0
"""Of every class; a folder without theta has this one."""


@dataclass(frozen=True)
class RopeKeys:
    """What a class calls its rotary settings at the top of config.json, beside rope_scaling and rope_parameters."""

    theta: str = "rope_theta"
    fraction: str = "partial_rotary_factor"
    default_fraction: float = 1.0


SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ORIGINAL = Key("original_max_position_embeddings", int, None)

DISAGREE = (
    "rope_parameters and the older keys (rope_theta, rope_scaling, rotary_pct) disagree, and versions of transformers "
    "follow different ones; delete the wrong ones"
)


def write_rope(rope: RopeConfig, *, with_fraction: bool = False) -> dict[str, Any]:
    """Both forms: rope_theta, rope_scaling and rope_parameters; the latter with the fraction if the class has one."""
    scaling = rope.scaling
    stretch: dict[str, Any] = {}
    if scaling is not None:
        stretch = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling is not None and scaling.type == "llama3":
        stretch |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    parameters = {"rope_type": "default", **stretch, "rope_theta": rope.theta}
    if with_fraction:
        parameters["partial_rotary_factor"] = rope.fraction
    return {"rope_theta": rope.theta, "rope_scaling": stretch or None, "rope_parameters": parameters}


def read_rope(settings: Settings, keys: RopeKeys = RopeKeys()) -> dict[str, Any]:
    """The `model.rope` of a config.json; what megalite does not have becomes a problem of the settings.

    Args:
        settings: of the whole file.
        keys: of the class.
    """
    length = settings.take(Key("max_position_embeddings", int, None))
    original = settings.take(ORIGINAL)
    theta = settings.take(Key(keys.theta, float, DEFAULT_THETA))
    fraction = settings.take(Key(keys.fraction, float, keys.default_fraction, nullable=True))
    top = {"theta": theta, "fraction": keys.default_fraction if fraction is None else fraction, "scaling": None}
    _check_copy(settings, RopeKeys.theta, keys.theta, top["theta"])
    _check_copy(settings, RopeKeys.fraction, keys.fraction, top["fraction"])
    has_top = keys.theta in settings or keys.fraction in settings
    older = _read_group(settings.group("rope_scaling"), original, length)
    newer = _read_group(settings.group("rope_parameters"), original, length)
    forms = [{**top, **older}] if older or has_top else []
    forms += [{**top, **newer}] if newer else []
    is_split = any(older[key] != top[key] for key in ("theta", "fraction") if key in older)
    if is_split or any(form != forms[0] for form in forms):
        settings.problems.append(DISAGREE)
    return forms[-1] if forms else top


def _check_copy(settings: Settings, general: str, own: str, value: float | None) -> None:
    """What a class has a key of its own for, transformers 4 saves under the general name too, and reads it nowhere."""
    if own == general:
        return
    copied = settings.take(Key(general, float, None, nullable=True))
    if copied not in (None, value):
        settings.complain(general, f"found {copied!r}, but this class goes by {own}, which is {value!r}; delete it")


def _read_group(group: Settings | None, original: int | None, length: int | None) -> dict[str, Any]:
    """What rope_scaling or rope_parameters says, as fields of `model.rope`; nothing where there is none.

    Args:
        original: original_max_position_embeddings at the top of the file, which version 5 prefers to the group's.
        length: max_position_embeddings, which it takes where neither is given.
    """
    if group is None:
        return {}
    if group.holds_groups():
        group.problems.append("rope_parameters differ by kind of layer, megalite has one for all")
        return {"scaling": None}
    named = {"theta": Key("rope_theta", float, None), "fraction": Key("partial_rotary_factor", float, None)}
    form = {field: value for field, key in named.items() if (value := group.take(key)) is not None}
    kind, older_name = (group.take(Key(name, str, None)) for name in ("rope_type", "type"))
    if None not in (kind, older_name) and kind != older_name:
        group.complain("type", f"found {older_name!r} beside rope_type {kind!r}; delete the wrong one")
    form["scaling"] = _read_scaling(group, kind or older_name or "default", original, length)
    group.ignore(SCALING_KEYS)  # of another kind: transformers says so, and goes on without them
    group.refuse_unknown()
    return form


def _read_scaling(group: Settings, kind: str, original: int | None, length: int | None) -> dict[str, Any] | None:
    """The `model.rope.scaling` of a group."""
    if kind == "default":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": group.take(Key("factor", float))}
    if kind == "llama3":
        inner = group.take(ORIGINAL)
        if None not in (inner, original) and inner != original:
            group.complain(ORIGINAL.name, f"found {inner}, and {original} outside the group; delete the wrong one")
        factors = {key: group.take(Key(key, float)) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        return {"type": "llama3", **factors, "original_max_positions": original or inner or length}
    sentence = f"rope_type is {kind!r}, megalite has 'default', 'linear' and 'llama3'"
    if sentence not in group.problems:
        group.problems.append(sentence)
    return None
