"""The section `engine`: a door to DeepSpeed."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from megalite.section import Section

DEEPSPEED_OWNED_KEYS = {
    "train_batch_size": "set batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "set batch.micro_batch_size",
    "gradient_accumulation_steps": "it follows from the sizes in batch and from dp",
    "gradient_clipping": "set optimizer.clip_grad_norm",
    "zero_optimization": "set parallel.zero_stage",
    "zero_allow_untested_optimizer": "leave it out",
    "bf16": "set precision.dtype",
    "fp16": "set precision.dtype and precision.loss_scale",
    "data_types": "set precision.dtype",
    "communication_data_type": "set precision.reduce_dtype",
    "pipeline": "set parallel.pp",
    "optimizer": "use the section optimizer",
    "scheduler": "use the section schedule",
    "steps_per_print": "set monitor.log_every",
    "timers": "see tokens_per_second in metrics.jsonl; DeepSpeed's timers wait for the device",
    "activation_checkpointing": "set train.recompute",
}
"""Keys of DeepSpeed's JSON that megalite generates, and what to do instead of setting them."""


class EngineConfig(Section):
    """A door to DeepSpeed for what megalite does not set itself."""

    deepspeed_extra: dict[str, Any] = {}  # noqa: RUF012
    """Keys merged into DeepSpeed's JSON. Keys that megalite generates are refused."""

    @field_validator("deepspeed_extra")
    @classmethod
    def _refuse_owned_keys(cls, extra: dict[str, Any]) -> dict[str, Any]:
        owned = [key for key in extra if key in DEEPSPEED_OWNED_KEYS]
        if owned:
            instead = "; ".join(f"{key}: {DEEPSPEED_OWNED_KEYS[key]}" for key in owned)
            raise ValueError(f"megalite generates {', '.join(owned)}, so it cannot be set here ({instead})")
        return extra
