"""Whether what a run folder holds has the types that it is written with: what has not is told, and left out.

Keys may be missing: older versions did not write all of them.
"""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]

LARGEST = 2**53
"""Whole numbers that JSON's readers agree on."""

PLAN_NUMBERS = ("num_parameters", "world_size", "pp", "dp", "cp", "tp")
CONFIG_SECTIONS = ("parallel", "batch", "precision", "data")


def are_layer_stats(record: Record) -> bool:
    """A step, and numbers by the name of a statistic, of each layer."""
    layers = record.get("layers")
    if not _is_step(record.get("step")) or not isinstance(layers, dict):
        return False
    return all(isinstance(each, dict) and all(map(_is_measure, each.values())) for each in layers.values())


def are_loads(record: Record) -> bool:
    """A step, and numbers of experts by block."""
    loads = record.get("loads")
    if not _is_step(record.get("step")) or not isinstance(loads, dict):
        return False
    return all(isinstance(each, list) and all(type(n) in (int, float) for n in each) for each in loads.values())


def is_plan(plan: Record) -> bool:
    """What `plan.json` tells in numbers, and a model of the same."""
    model = plan.get("model") or {}
    if not isinstance(model, dict) or not _is_count(model.get("vocab_size")):
        return False
    return _is_count(plan.get("total_steps")) and all(_is_step(plan.get(key, 0)) for key in PLAN_NUMBERS)


def is_config(config: Record) -> bool:
    """Sections, and sources of data in lists."""
    sections = [config.get(key) or {} for key in CONFIG_SECTIONS]
    if not all(isinstance(each, dict) for each in sections):
        return False
    _, batch, precision, data = sections
    if not all(isinstance(precision.get(name) or "", str) for name in ("dtype", "products")):
        return False
    if not _is_count(batch.get("seq_len")):
        return False
    sources = [data.get(part) or [] for part in ("train", "valid")]
    return all(isinstance(part, list) and all(map(_is_source, part)) for part in sources)


def _is_source(source: object) -> bool:
    if not isinstance(source, dict):
        return False
    return type(source.get("weight", 1.0)) in (int, float) and isinstance(source.get("name") or "", str)


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _is_count(value: object) -> bool:
    return value is None or _is_step(value)


def _is_measure(value: object) -> bool:
    return value is None or type(value) is float or (type(value) is int and abs(value) < LARGEST)
