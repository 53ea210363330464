"""Conflicts of `precision.fp8`: each is found, with the nearest legal choice."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.plan import default_world_size
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError


def config(fp8: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """A config that is valid but for the given settings."""
    precision = {"fp8": fp8, **sections.pop("precision", {})}
    model = {"ffn_hidden_size": 704, **sections.pop("model", {})}
    return Config(**{"train": {"steps": 100}, "precision": precision, "model": model, **sections})


CONFLICTS = {
    "te on a CPU": (
        config({"backend": "te"}, train={"steps": 1, "device": "cpu"}),
        "precision.fp8.backend: te runs on GPUs only, and train.device=cpu; use backend=emulate, or precision.fp8=null",
    ),
    "te in fp32": (
        config({"backend": "te"}, precision={"dtype": "fp32"}),
        "precision.fp8.backend: te takes weights and activations in bf16, and dtype=fp32; use dtype=bf16, or "
        "backend=emulate",
    ),
    "fp16": (
        config({"backend": "emulate"}, precision={"dtype": "fp16"}),
        "precision.dtype: fp16 with FP8 would need its loss scale in every FP8 scale; use dtype=bf16",
    ),
    "te with ZeRO-3": (
        config({"backend": "te"}, parallel={"zero_stage": 3}),
        "parallel.zero_stage: found 3 with precision.fp8.backend=te, which keeps weights of its own between forward "
        "and backward pass; use zero_stage=1 or 2, or backend=scaled_mm",
    ),
    "rowwise products in fp32": (
        config({"backend": "scaled_mm", "recipe": "rowwise"}, precision={"dtype": "fp32"}),
        "precision.fp8.backend: scaled_mm with recipe=rowwise gives results in bf16, and dtype=fp32; use dtype=bf16",
    ),
    "delayed by te": (
        config({"backend": "te", "recipe": "delayed"}),
        "precision.fp8.recipe: backend=te has no delayed; use recipe=current, block, mxfp8 or nvfp4, or "
        "backend=scaled_mm or emulate",
    ),
    "nvfp4 emulated": (
        config({"backend": "emulate", "recipe": "nvfp4"}),
        "precision.fp8.recipe: backend=emulate has no nvfp4; use recipe=current, delayed, rowwise, block or mxfp8, or "
        "backend=te",
    ),
    "hybrid blocks": (
        config({"backend": "emulate", "recipe": "block", "format": "hybrid"}),
        "precision.fp8.format: recipe=block is e4m3 throughout; use format=null, or recipe=current",
    ),
    "a margin without history": (
        config({"backend": "emulate", "margin": 2}),
        "precision.fp8.margin: found 2, but it has no effect with recipe=current; leave it at 0",
    ),
    "a fallback that nobody asks for": (
        config({"backend": "emulate", "watch_every": None, "fallback_error": 0.2}),
        "precision.fp8.fallback_error: found 0.2, but it has no effect with watch_every=null; leave it at null",
    ),
    "no block left": (
        config({"backend": "emulate", "bf16_first_blocks": 2, "bf16_last_blocks": 2}),
        "precision.fp8.bf16_last_blocks: 2 blocks at the start and 2 at the end leave none of num_layers=4 for FP8; "
        "keep fewer, or set precision.fp8=null",
    ),
    "a width that tensor cores refuse": (
        config({"backend": "te"}, model={"ffn_hidden_size": 680}),
        "precision.fp8: ffn_hidden_size=680 is not a multiple of 16, as FP8 on a GPU wants; use 672 or 688, or "
        "backend=emulate",
    ),
    "a share of a width": (
        config({"backend": "scaled_mm"}, model={"ffn_hidden_size": 720}, parallel={"tp": 2}),
        "precision.fp8: ffn_hidden_size=720 / tp=2 is not a multiple of 16, as FP8 on a GPU wants; use 704 or 736, or "
        "backend=emulate",
    ),
    "chunks": (
        config({"backend": "emulate"}, train={"steps": 10, "mlp_chunk_tokens": 8}),
        "train.mlp_chunk_tokens: FP8 scales are of whole matrices, not of chunks; use precision.fp8=null, or null",
    ),
    "tokens that tensor cores refuse": (
        config({"backend": "te"}, batch={"seq_len": 200}),
        "batch.seq_len: micro_batch_size x seq_len = 200 tokens are not divisible by 16, as FP8 on a GPU wants; use "
        "seq_len=192 or 208, or parallel.pad_tokens=true",
    ),
}


@pytest.mark.parametrize(("checked", "complaint"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict(checked: Config, complaint: str):
    """Each conflict alone gives this one sentence."""
    with pytest.raises(ConfigError) as caught:
        validate(checked, default_world_size(checked))
    assert caught.value.problems == (complaint,)


ALLOWED = {
    "te": config({"backend": "te"}),
    "te with blocks, a pipeline and tp": config(
        {"backend": "te", "recipe": "block"}, parallel={"pp": 2, "tp": 2, "sequence_parallel": True}
    ),
    "torch's products under ZeRO-3": config({"backend": "scaled_mm"}, parallel={"zero_stage": 3}),
    "delayed with all its settings": config(
        {
            "backend": "scaled_mm",
            "recipe": "delayed",
            "amax_history_len": 16,
            "amax_compute": "most_recent",
            "margin": 1,
        }
    ),
    "emulation of odd sizes in fp32": config(
        {"backend": "emulate", "recipe": "mxfp8"},
        precision={"dtype": "fp32"},
        model={"ffn_hidden_size": 30},
        batch={"seq_len": 7},
        train={"steps": 1, "device": "cpu"},
    ),
    "the ends of the model in bf16": config({"backend": "te", "bf16_first_blocks": 1, "bf16_last_blocks": 2}),
}


@pytest.mark.parametrize("checked", ALLOWED.values(), ids=ALLOWED)
def test_allowed(checked: Config):
    """What can run is not refused."""
    validate(checked, default_world_size(checked))
