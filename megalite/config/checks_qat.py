"""What must hold between the settings of `precision.qat` and the rest of a config."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megalite.architecture.architecture import Architecture
from megalite.config.length import derive_steps
from megalite.config.rounded import rounded_weights
from megalite.config.schema import Config, QatConfig
from megalite.config.wording import divisors, or_

GROUP_SIZES = (32, 64, 128)


def check_qat(config: Config, model: Architecture) -> Iterator[str]:
    """Complaints about quantisation-aware training.

    Args:
        model: filled.
    """
    qat = config.precision.qat
    if qat is None:
        return
    if config.precision.fp8 is not None:
        yield "precision.qat: weights are rounded to integers or to FP8, not to both; use qat=null, or fp8=null"
    if config.precision.dtype == "fp16":
        yield (
            "precision.dtype: scales of small weights underflow in fp16, and precision.qat divides by them; use "
            "dtype=bf16 or fp32"
        )
    if model.lora is not None:
        yield (
            "precision.qat: with model.lora the rounded weights are frozen, and would learn nothing of it; use "
            "qat=null, or lora=null"
        )
        return
    yield from _learned(qat, model) if qat.learned_scales else ()
    kept = qat.keep_first_blocks + qat.keep_last_blocks
    if kept >= model.num_layers:
        end = "last" if qat.keep_last_blocks else "first"
        yield (
            f"precision.qat.keep_{end}_blocks: {qat.keep_first_blocks} blocks at the start and {qat.keep_last_blocks} "
            f"at the end leave none of num_layers={model.num_layers} to be rounded; keep fewer, or set "
            "precision.qat=null"
        )
        return
    steps = derive_steps(config)
    if qat.start_step > steps > 0:
        yield (
            f"precision.qat.start_step: {qat.start_step} is behind the last of {steps} steps, and nothing would be "
            f"rounded; use {steps} or less, or precision.qat=null"
        )
    yield from _groups(config, qat, model)


def _learned(qat: QatConfig, model: Architecture) -> Iterator[str]:
    """What scales that are trained cannot go with."""
    key = "precision.qat.learned_scales"
    if not qat.symmetric:
        yield f"{key}: scales are trained without zero points; use symmetric=true, or learned_scales=false"
    if qat.start_step > 1:
        yield (
            f"{key}: scales begin with the weights, and start_step={qat.start_step} would round with old ones; "
            "train without qat first, and go on with train.init_from in a new run, or use learned_scales=false"
        )
    if model.moe is not None:
        yield f"{key}: scales of experts are not trained; use a model without model.moe, or learned_scales=false"
    if model.mup is not None:
        yield (
            f"{key}: how rates of scales go with the width is not known here; use model.mup=null, or "
            "learned_scales=false"
        )


def _groups(config: Config, qat: QatConfig, model: Architecture) -> Iterator[str]:
    """Groups are those of whole rows: none is shorter than others, and none lies on two ranks."""
    size, tp, seen = qat.group_size, config.parallel.tp, set[tuple[str, int]]()
    for weight in rounded_weights(qat, model) if size is not None else ():
        width, parts = weight.shape[1], tp if weight.cut == 1 else 1
        kind = re.sub(r"\d+", "*", weight.name)
        if size is None or width % (parts * size) == 0 or (kind, width) in seen:
            continue
        seen.add((kind, width))
        over = f" / tp={tp}" if parts > 1 else ""
        sizes = [each for each in GROUP_SIZES if width % (parts * each) == 0]
        fitting = f"group_size={or_([*sizes, 'null'])}"
        layouts = [each for each in divisors(width // size) if each < tp] if parts > 1 and width % size == 0 else []
        layout = f", or tp={or_(layouts)}" if layouts else ""
        yield (
            f"precision.qat.group_size: {weight.name.removesuffix('.weight')} has rows of {width}{over} numbers, which "
            f"are no whole groups of {size}; use {fitting}{layout}"
        )
