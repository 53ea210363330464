"""What must hold between the settings of `precision.fp4` and the rest of a config."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import lcm

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Weight, weight_table
from megalite.config.rounded import is_in_fp4
from megalite.config.schema import Config, Fp4Config
from megalite.config.wording import divisors, or_, unused

BLOCKS = {"nvfp4": 16, "mxfp4": 32}
"""Numbers that share a scale."""

TRANSFORMS = (16, 32, 64, 128)
"""Numbers that may be transformed together."""


def check_fp4(config: Config, model: Architecture) -> Iterator[str]:
    """Complaints about emulated FP4.

    Args:
        model: filled.
    """
    fp4 = config.precision.fp4
    if fp4 is None:
        return
    yield from _beside(config, model)
    yield from _settings(fp4)
    if model.lora is not None:
        return
    last = fp4.last_kept(model.num_layers)
    if fp4.keep_first_blocks + last >= model.num_layers:
        yield (
            f"precision.fp4.keep_last_blocks: {fp4.keep_first_blocks} blocks at the start and {last} at the end leave "
            f"none of num_layers={model.num_layers} for FP4; keep fewer, or set precision.fp4=null"
        )
        return
    yield from _sizes(config, fp4, model)


def _beside(config: Config, model: Architecture) -> Iterator[str]:
    precision, train = config.precision, config.train
    for name in ("fp8", "qat"):
        if getattr(precision, name) is not None:
            yield (
                f"precision.fp4: products are rounded to FP4 or by precision.{name}, not by both; use fp4=null, or "
                f"{name}=null"
            )
    if precision.dtype == "fp16":
        yield "precision.dtype: fp16's loss scale would be in every FP4 scale; use dtype=bf16 or fp32"
    if model.lora is not None:
        yield "precision.fp4: adapters (model.lora) learn beside exact products alone; use fp4=null, or lora=null"
    if model.moe is not None:
        yield "precision.fp4: products of experts are not known in FP4 yet; use precision.fp8 or qat, or fp4=null"
    if config.parallel.cp > 1 and model.mla is not None:
        yield "precision.fp4: latents of all context-parallel ranks have no keys of tokens here; use cp=1, or fp4=null"
    if train.compile == "on":
        yield "train.compile: emulated FP4 ends the graph at each product; use compile=auto, or precision.fp4=null"
    if train.mlp_chunk_tokens is not None:
        yield "train.mlp_chunk_tokens: FP4 scales are of whole matrices, not of chunks; use precision.fp4=null, or null"


def _settings(fp4: Fp4Config) -> Iterator[str]:
    full = fp4.filled
    if full.hadamard == "none":
        yield from unused(fp4, ("hadamard_size",), "precision.fp4", "hadamard=none")
    if full.hadamard == "backward" and full.square_weights:
        yield (
            "precision.fp4.square_weights: hadamard=backward transforms weights before they are rounded, so that none "
            "of their numbers serves both passes; use false, or hadamard=weight_gradient"
        )


def _sizes(config: Config, fp4: Fp4Config, model: Architecture) -> Iterator[str]:
    """No block lies on two ranks, or in two of the weights that are fused."""
    full, tp, seen = fp4.filled, config.parallel.tp, set[str]()
    block = BLOCKS[fp4.format]
    transformed = (full.hadamard_size or 1) if full.hadamard == "backward" else 1
    for weight in weight_table(model, fp4.rounded_blocks(model.num_layers)).values():
        kind = re.sub(r"\d+", "*", weight.name)
        if not is_in_fp4(weight, fp4, model.num_layers) or kind in seen:
            continue
        for dim, multiple in ((0, lcm(block, transformed)), (1, block)):
            parts = tp if weight.cut == dim else 1
            if weight.shape[dim] % (parts * multiple) and kind not in seen:
                seen.add(kind)
                yield _odd_size(weight, dim, parts, multiple, block)


def _odd_size(weight: Weight, dim: int, parts: int, multiple: int, block: int) -> str:
    """A complaint about one dim of a weight, of whose local size `multiple` should be a divisor."""
    size, what = weight.shape[dim], ("rows", "columns")[dim]
    over = f" / tp={parts}" if parts > 1 else ""
    smaller = [each for each in TRANSFORMS if each < multiple and size % (parts * max(each, block)) == 0]
    fitting = divisors(size // multiple) if size % multiple == 0 else []
    use = [f"hadamard_size={or_(smaller)}"] if smaller else []
    use += [f"tp={or_(fitting)}"] if fitting else []
    return (
        f"precision.fp4: {weight.name.removesuffix('.weight')} has {size}{over} {what}, which are no whole blocks of "
        f"{multiple}; use {', or '.join([*use, f'widths of which {parts * multiple} is a divisor'])}"
    )
