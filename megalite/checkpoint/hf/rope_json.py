"""Rotary settings in config.json, in two forms.

    transformers 4     rope_theta, rope_scaling: null or {rope_type, factor, ...}; NeoX: rotary_emb_base, rotary_pct
    transformers 5     rope_parameters: {rope_type, rope_theta, factor, ..., partial_rotary_factor}

Version 4 does not know the second form and version 5 mixes the two, so a folder where they disagree is two models.
Version 5 also finds theta and the fraction inside rope_scaling, where version 4 does not look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megalite.checkpoint.hf.settings import Key, Settings
from megalite.config.schema import RopeConfig, RopeScaling

DEFAULT_THETA = 10000.0
"""Of most classes; a folder without theta has this one."""


@dataclass(frozen=True)
class RopeKeys:
    """What a class calls its rotary settings at the top of config.json, beside rope_scaling and rope_parameters."""

    theta: str = "rope_theta"
    fraction: str = "partial_rotary_factor"
    default_fraction: float = 1.0
    default_theta: float = DEFAULT_THETA


ROPE_KEYS = RopeKeys()
"""Of most classes."""

SCALING_KEYS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "short_factor",
    "truncate",
)
ORIGINAL = Key("original_max_position_embeddings", int, None)

DISAGREE = (
    "rope_parameters and the older keys (rope_theta, rope_scaling, rotary_pct) disagree, and versions of transformers "
    "follow different ones; delete the wrong ones"
)


def write_rope(rope: RopeConfig, max_positions: int, *, with_fraction: bool = False) -> dict[str, Any]:
    """Both forms: rope_theta, rope_scaling and rope_parameters; the latter with the fraction if the class has one."""
    stretch = {} if rope.scaling is None else write_scaling(rope.scaling, max_positions)
    parameters = {"rope_type": "default", **stretch, "rope_theta": rope.theta}
    if with_fraction:
        parameters["partial_rotary_factor"] = rope.fraction
    older = {"rope_theta": rope.theta, "rope_scaling": stretch or None}
    return {**older, "rope_parameters": parameters, **original_length(stretch)}


def original_length(stretch: dict[str, Any]) -> dict[str, Any]:
    """What version 4 looks for at the top of the file, of longrope alone."""
    return {ORIGINAL.name: stretch[ORIGINAL.name]} if stretch.get("rope_type") == "longrope" else {}


def write_scaling(scaling: RopeScaling, max_positions: int) -> dict[str, Any]:
    """The keys of a stretch. Version 4 makes longrope's attention_factor of max_positions, whatever `factor` says, so
    it is spelled out where that is another one."""
    stretch: dict[str, Any] = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type != "linear":
        stretch["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.type == "llama3":
        stretch |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.type == "yarn":
        stretch |= {name: getattr(scaling, name) for name in ("beta_fast", "beta_slow", "truncate")}
    if scaling.type == "longrope":
        stretch |= {name: list(getattr(scaling, name)) for name in ("short_factor", "long_factor")}
    is_other = scaling.type == "longrope" and scaling.factor * scaling.original_max_positions != max_positions
    if scaling.type in ("yarn", "longrope") and (is_other or scaling.attention_factor is not None):
        stretch["attention_factor"] = scaling.sharpness
    return stretch


def read_rope(settings: Settings, keys: RopeKeys = ROPE_KEYS, *, rotates_whole_heads: bool = True) -> dict[str, Any]:
    """The `model.rope` of a config.json; what megalite does not have becomes a problem of the settings.

    Args:
        settings: of the whole file.
        keys: of the class.
        rotates_whole_heads: the class has no other fraction.
    """
    length = settings.take(Key("max_position_embeddings", int, None))
    original = settings.take(ORIGINAL)
    theta = settings.take(Key(keys.theta, float, keys.default_theta))
    fraction = settings.take(Key(keys.fraction, float, keys.default_fraction, nullable=True))
    top = {"theta": theta, "fraction": keys.default_fraction if fraction is None else fraction, "scaling": None}
    _check_copy(settings, RopeKeys.theta, keys.theta, top["theta"])
    _check_copy(settings, RopeKeys.fraction, keys.fraction, top["fraction"])
    older = read_rope_group(settings.group("rope_scaling"), original, length)
    newer = read_rope_group(settings.group("rope_parameters"), original, length)
    has_own_fraction = keys.fraction in settings and newer.get("fraction") != top["fraction"]
    has_top = keys.theta in settings or has_own_fraction  # version 5 leaves Phi-3's there, beside its own form
    forms = [{**top, **older}] if older or has_top else []
    forms += [{**top, **newer}] if newer else []
    is_split = any(older[key] != top[key] for key in ("theta", "fraction") if key in older)
    if is_split or any(form != forms[0] for form in forms):
        settings.problems.append(DISAGREE)
    rope = forms[-1] if forms else top
    if rotates_whole_heads and rope["fraction"] != 1.0:
        settings.complain(keys.fraction, f"found {rope['fraction']!r}, this class rotates whole heads")
    return rope


def _check_copy(settings: Settings, general: str, own: str, value: float | None) -> None:
    """What a class has a key of its own for, transformers 4 saves under the general name too, and reads it nowhere."""
    if own == general:
        return
    copied = settings.take(Key(general, float, None, nullable=True))
    if copied not in (None, value):
        settings.complain(general, f"found {copied!r}, but this class goes by {own}, which is {value!r}; delete it")


def read_rope_group(group: Settings | None, original: int | None, length: int | None) -> dict[str, Any]:
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
    if kind not in ("llama3", "yarn", "longrope"):
        sentence = f"rope_type is {kind!r}, megalite has 'default', 'linear', 'llama3', 'yarn' and 'longrope'"
        if sentence not in group.problems:
            group.problems.append(sentence)
        return None
    inner = group.take(ORIGINAL)
    if kind == "longrope" and original is None and not group.is_at("rope_parameters"):
        group.complain(ORIGINAL.name, "missing at the top of the file, where transformers 4 looks for it")
    if None not in (inner, original) and inner != original:
        group.complain(ORIGINAL.name, f"found {inner}, and {original} outside the group; delete the wrong one")
    if kind == "yarn" and None not in (original, length) and (inner or length) != original:
        _complain_of_4(group, ORIGINAL.name, f"found {original} outside the group", str(inner or length))
    original = original or inner or length
    form: dict[str, Any] = {"type": kind, "original_max_positions": original}
    if kind == "llama3":
        return form | {key: group.take(Key(key, float)) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    factor = group.take(Key("factor", float, None, nullable=True))
    ratio = length / original if length is not None and original else None
    form |= {"factor": ratio if factor is None else factor}
    form |= {"attention_factor": group.take(Key("attention_factor", float, None, nullable=True))}
    if kind == "longrope" and form["factor"] != ratio and form["attention_factor"] is None:
        _complain_of_4(group, "factor", f"found {factor!r} and no attention_factor", f"{ratio} of the lengths")
    return form | (_read_yarn(group, form) if kind == "yarn" else _read_longrope(group))


def _complain_of_4(group: Settings, key: str, found: str, instead: str) -> None:
    """A problem with what version 5 reads and version 4, which knows the older form alone, does not."""
    if not group.is_at("rope_parameters"):
        group.complain(key, f"{found}, by which transformers 5 alone goes; 4 takes {instead}")


def _read_yarn(group: Settings, form: dict[str, Any]) -> dict[str, Any]:
    """What yarn alone has; `mscale` and `mscale_all_dim` stand for an attention_factor (DeepSeek)."""
    found = {
        "beta_fast": group.take(Key("beta_fast", float, 32.0, nullable=True)) or 32.0,
        "beta_slow": group.take(Key("beta_slow", float, 1.0, nullable=True)) or 1.0,
        "truncate": group.take(Key("truncate", bool, True)),
    }
    scales = [group.take(Key(name, float, None, nullable=True)) for name in ("mscale", "mscale_all_dim")]
    if form["attention_factor"] is None and all(scales) and form["factor"] and form["factor"] > 1.0:
        over, under = (0.1 * scale * math.log(form["factor"]) + 1.0 for scale in scales)
        if over <= 0.0 or under <= 0.0:
            group.complain("mscale", f"found {scales[0]} beside mscale_all_dim {scales[1]}, expected 0 or more")
        else:
            found["attention_factor"] = over / under
    return found


def _read_longrope(group: Settings) -> dict[str, Any]:
    """What longrope alone has."""
    return {name: tuple(group.take(Key(name, list)) or ()) for name in ("short_factor", "long_factor")}
