"""transformers' gpt-oss as the independent truth: its settings, and its experts, which are one tensor a block."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.config.schema import ModelConfig

NAMES = {"attention": "self_attn", "mlp.router": "mlp.router"}


def settings(model: ModelConfig) -> dict[str, object]:
    """What GptOssConfig is told besides what all are."""
    kinds = model.layer_types or ("sliding_attention" if model.sliding_window else "full_attention",) * model.num_layers
    return {"sliding_window": model.sliding_window, "layer_types": list(kinds), "attention_bias": True}


def experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All experts of a block: matrices `[in, out]`, gate and up in turns."""
    parts: dict[str, list[Tensor]] = {}
    for name, weight in weights.items():
        layer, _, _, part, kind = name.rsplit(".", 4)
        parts.setdefault(f"{layer.replace('blocks.', 'model.layers.')}.experts.{part}.{kind}", []).append(weight)
    stacked = {name: torch.stack(each) for name, each in parts.items()}
    found = {}
    for name in [name for name in stacked if ".gate." in name]:
        kind, prefix = name.rsplit(".", 1)[1], name.split("gate.")[0]
        both = torch.stack((stacked[name], stacked[name.replace(".gate.", ".up.")]), dim=2).flatten(1, 2)
        down = stacked[name.replace(".gate.", ".down.")]
        ending = "" if kind == "weight" else "_bias"
        found[f"{prefix}gate_up_proj{ending}"] = both.transpose(1, -1) if kind == "weight" else both
        found[f"{prefix}down_proj{ending}"] = down.transpose(1, -1) if kind == "weight" else down
    return found


def masks(mask: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """Of each kind of layer, given the additive one without a window."""
    length = mask.shape[-1]
    ahead = torch.arange(length).unsqueeze(1) - torch.arange(length)
    outside = ahead >= (model.sliding_window or length)
    windowed = mask.masked_fill(outside, torch.finfo(mask.dtype).min)
    return {"full_attention": mask, "sliding_attention": windowed}
