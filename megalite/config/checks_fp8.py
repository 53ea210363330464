"""What must hold between the settings of `precision.fp8` and the rest of a config."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.architecture.architecture import Architecture
from megalite.config.schema import Config, Fp8Config
from megalite.config.stream import FP8_MULTIPLE
from megalite.config.wording import near, or_, unused

RECIPES_OF = {
    "te": ("current", "block", "mxfp8", "nvfp4"),
    "scaled_mm": ("current", "delayed", "rowwise"),
    "emulate": ("current", "delayed", "rowwise", "block", "mxfp8"),
}
"""What each backend can do. Transformer Engine has delayed scaling too, but keeps its history to itself, pickled: no
other layout could take it up. `scaled_mm` has it with a history of ours."""


def check_fp8(config: Config, model: Architecture) -> Iterator[str]:
    """Complaints about FP8.

    Args:
        model: filled.
    """
    fp8 = config.precision.fp8
    if fp8 is None:
        return
    yield from _backend(config, fp8)
    yield from _recipe(fp8)
    kept = fp8.bf16_first_blocks + fp8.bf16_last_blocks
    if kept >= model.num_layers:
        yield (
            f"precision.fp8.bf16_last_blocks: {fp8.bf16_first_blocks} blocks at the start and {fp8.bf16_last_blocks} "
            f"at the end leave none of num_layers={model.num_layers} for FP8; keep fewer, or set precision.fp8=null"
        )
    if fp8.backend != "emulate":
        yield from _sizes(config, model, FP8_MULTIPLE[fp8.recipe])


def _backend(config: Config, fp8: Fp8Config) -> Iterator[str]:
    dtype, where = config.precision.dtype, f"precision.fp8.backend: {fp8.backend}"
    if fp8.backend == "te" and config.train.device == "cpu":
        yield f"{where} runs on GPUs only, and train.device=cpu; use backend=emulate, or precision.fp8=null"
    if dtype == "fp16":
        yield "precision.dtype: fp16 with FP8 would need its loss scale in every FP8 scale; use dtype=bf16"
    elif fp8.backend == "te" and dtype != "bf16":
        yield f"{where} takes weights and activations in bf16, and dtype={dtype}; use dtype=bf16, or backend=emulate"
    elif fp8.backend == "scaled_mm" and fp8.recipe == "rowwise" and dtype != "bf16":
        yield f"{where} with recipe=rowwise gives results in bf16, and dtype={dtype}; use dtype=bf16"
    if fp8.backend == "te" and config.parallel.zero_stage == 3:
        yield (
            "parallel.zero_stage: found 3 with precision.fp8.backend=te, which keeps weights of its own between "
            "forward and backward pass; use zero_stage=1 or 2, or backend=scaled_mm"
        )


def _recipe(fp8: Fp8Config) -> Iterator[str]:
    if fp8.recipe not in RECIPES_OF[fp8.backend]:
        others = [backend for backend, recipes in RECIPES_OF.items() if fp8.recipe in recipes]
        yield (
            f"precision.fp8.recipe: backend={fp8.backend} has no {fp8.recipe}; use recipe="
            f"{or_(RECIPES_OF[fp8.backend])}, or backend={or_(others)}"
        )
    if fp8.recipe not in ("current", "delayed") and fp8.format == "hybrid":
        yield f"precision.fp8.format: recipe={fp8.recipe} is e4m3 throughout; use format=null, or recipe=current"
    if fp8.recipe != "delayed":
        keys = ("amax_history_len", "amax_compute", "margin")
        yield from unused(fp8, keys, "precision.fp8", f"recipe={fp8.recipe}")
    if fp8.watch_every is None:
        yield from unused(fp8, ("fallback_error",), "precision.fp8", "watch_every=null")
    if fp8.recipe == "nvfp4":
        yield from unused(fp8, ("format",), "precision.fp8", "recipe=nvfp4")


def _sizes(config: Config, model: Architecture, multiple: int) -> Iterator[str]:
    """Widths as one rank holds them."""
    tp = config.parallel.tp
    widths = {
        "hidden_size": (model.hidden_size, 1),
        "num_heads x head_dim": (model.num_heads * model.head_dim, tp),
        "num_kv_heads x head_dim": (model.num_kv_heads * model.head_dim, tp),
        "ffn_hidden_size": (model.ffn_hidden_size, tp),
    }
    if model.moe is not None:
        widths["moe.ffn_hidden_size"] = (model.moe.ffn_hidden_size or 0, tp)
        widths["moe.shared_ffn_hidden_size"] = (model.moe.shared_ffn_hidden_size, tp)
    for name, (width, parts) in widths.items():
        if width % (parts * multiple):
            over = f" / tp={tp}" if parts > 1 else ""
            yield (
                f"precision.fp8: {name}={width}{over} is not a multiple of {multiple}, as FP8 on a GPU wants; use "
                f"{or_(near(width, parts * multiple))}, or backend=emulate"
            )
