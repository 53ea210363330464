"""Rotary settings in config.json, in two forms.

    transformers 4     rope_theta, rope_scaling: null or {rope_type, factor, ...}; NeoX: rotary_emb_base, rotary_pct
    transformers 5     rope_parameters: {rope_type, rope_theta, factor, ..., partial_rotary_factor}

Version 4 does not know the second form and version 5 mixes the two, so a folder where they disagree is two models.
"""

from __future__ import annotations

from typing import Any

from megalite.config.schema import RopeConfig

DEFAULT_THETA = 10000.0
"""Of every class; a folder without theta has this one."""

THETA_KEYS = ("rope_theta", "rotary_emb_base")
FRACTION_KEYS = ("rotary_pct", "partial_rotary_factor")


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


def read_rope(raw: dict[str, Any], problems: list[str], *, default_fraction: float = 1.0) -> dict[str, Any]:
    """The `model.rope` of a config.json.

    Args:
        raw: contents of config.json.
        problems: gets a sentence for each thing that megalite does not have.
        default_fraction: of the class, where the folder gives none.
    """
    default_length = raw.get("max_position_embeddings")
    old, new = _old_form(raw), _new_form(raw)
    for form in (old, new):
        if "scaling" in form:
            form["scaling"] = _read_scaling(form["scaling"], default_length, problems)
    if any(old[key] != new[key] for key in old.keys() & new.keys()):
        problems.append(
            "rope_parameters and the older keys (rope_theta, rope_scaling, rotary_pct) disagree, and versions of "
            "transformers follow different ones; delete the wrong ones"
        )
    return {"theta": DEFAULT_THETA, "fraction": default_fraction, "scaling": None, **old, **new}


def _old_form(raw: dict[str, Any]) -> dict[str, Any]:
    """What the keys of transformers 4 say; nothing when there are none."""
    form = {}
    for field, keys in (("theta", THETA_KEYS), ("fraction", FRACTION_KEYS)):
        given = [raw[key] for key in keys if raw.get(key) is not None]
        if given:
            form[field] = given[0]
    if form or raw.get("rope_scaling"):
        form["scaling"] = raw.get("rope_scaling")
    return form


def _new_form(raw: dict[str, Any]) -> dict[str, Any]:
    """What rope_parameters says; nothing when it is missing."""
    given = raw.get("rope_parameters")
    if not given:
        return {}
    renamed = {"theta": given.get("rope_theta"), "fraction": given.get("partial_rotary_factor")}
    return {"scaling": given} | {field: value for field, value in renamed.items() if value is not None}


def _read_scaling(given: dict[str, Any] | None, default_length: int | None, problems: list[str]) -> dict | None:
    """A group with a rope_type as `model.rope.scaling`."""
    given = given or {}
    if any(isinstance(value, dict) for value in given.values()):
        problems.append("rope_parameters differ by kind of layer, megalite has one for all")
        return None
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": given.get("factor")}
    if kind == "llama3":
        factors = {key: given.get(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        original = given.get("original_max_position_embeddings", default_length)
        return {"type": "llama3", **factors, "original_max_positions": original}
    sentence = f"rope_type is {kind!r}, megalite has 'default', 'linear' and 'llama3'"
    if sentence not in problems:
        problems.append(sentence)
    return None
