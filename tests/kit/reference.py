"""The independent truth: transformers' Llama, plain autograd, torch's AdamW and clip, one process.

Packed documents become a dense attention mask, which megalite never builds; accumulation, tensor parallelism and
sharding do not exist here. Only the initial weights are shared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megalite.architecture.weights import weight_table
from megalite.config.schema import Config, ModelConfig
from megalite.model.initialize import FreshWeights
from megalite.optim.schedules import learning_rate
from tests.kit import reference_deepseek, reference_gpt_oss
from tests.kit.batches import random_sequence

PROJECTIONS = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
OUTER = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def reference_name(name: str, names: dict[str, str] = PROJECTIONS) -> str:
    """transformers' name of a canonical weight, written down anew so that it checks the project's own table."""
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    layers, index, inner = stem.split(".", 2)
    if layers == "mtp" and not inner.startswith("block."):
        return f"mtp.{index}.{reference_deepseek.OF_PREDICTIONS[inner]}.{kind}"
    layer = f"model.layers.{index}" if layers == "blocks" else f"mtp.{index}.mtp_block"
    return f"{layer}.{names[inner.removeprefix('block.')]}.{kind}"


def reference_model(model: ModelConfig, seed: int) -> torch.nn.Module:
    """transformers' model with the weights that megalite starts from."""
    common = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope.theta},
        "tie_word_embeddings": model.tie_embeddings,
        "attn_implementation": "eager",
    }
    config, kind = _class_of(model)
    latent = {} if model.mla is None else reference_deepseek.settings(model)
    latent |= reference_gpt_oss.settings(model) if model.attention_sinks else {}
    reference = kind(config(**{**common, **_expert_settings(model), **latent}))
    if model.mtp is not None:
        reference.mtp = reference_deepseek.prediction_layers(reference.config, model.num_predictions)
    source = FreshWeights(model, seed)
    rows = weight_table(model).values()
    weights = {row.name: source.read(row, row.local(1, 0)) for row in rows if row.expert is None}
    adapters = {name: weights.pop(name) for name in list(weights) if name.rpartition(".")[2].startswith("lora_")}
    names, state = PROJECTIONS, {}
    if model.mla is not None:
        names, state = {**PROJECTIONS, **reference_deepseek.NAMES}, reference_deepseek.fused(weights, model)
        weights = {name: weight for name, weight in weights.items() if not reference_deepseek.is_fused(name)}
    names = {**names, **reference_gpt_oss.NAMES} if model.attention_sinks else names
    state = {reference_name(name, names): weight for name, weight in weights.items()} | state
    stack = reference_gpt_oss.experts if model.attention_sinks else _stacked_experts
    state |= stack({row.name: source.read(row, row.local(1, 0)) for row in rows if row.expert is not None})
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected
    assert {name for name in missing if not name.endswith("e_score_correction_bias")} <= (
        {"lm_head.weight"} if model.tie_embeddings else set()
    )
    reference.tie_weights()
    if model.lora is not None:
        adapt(reference, adapters, model.lora.alpha / model.lora.rank)
    return reference


class WithAdapter(torch.nn.Module):
    """`W + scale B A`, in place of W."""

    def __init__(self, a: Tensor, b: Tensor, scale: float):
        super().__init__()
        self.a, self.b, self.scale = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone()), scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.b @ self.a


def adapt(reference: torch.nn.Module, adapters: dict[str, Tensor], scale: float) -> None:
    """Freeze all but adapters, given by canonical name, which are added to the weights of their layers."""
    reference.requires_grad_(requires_grad=False)
    for name in [name for name in adapters if name.endswith(".lora_a")]:
        stem = name.removesuffix("lora_a")
        layer = reference.get_submodule(reference_name(f"{stem}weight").removesuffix(".weight"))
        adapter = WithAdapter(adapters[name], adapters[f"{stem}lora_b"], scale)
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", adapter)


def _class_of(model: ModelConfig) -> tuple[type, type]:
    if model.mla is not None:
        return DeepseekV3Config, DeepseekV3ForCausalLM
    if model.attention_sinks:
        return GptOssConfig, GptOssForCausalLM
    if model.moe is None:
        return (Qwen3Config, Qwen3ForCausalLM) if model.qk_norm else (LlamaConfig, LlamaForCausalLM)
    if model.moe.shared_gate:
        return Qwen2MoeConfig, Qwen2MoeForCausalLM
    return (Qwen3MoeConfig, Qwen3MoeForCausalLM) if model.qk_norm else (MixtralConfig, MixtralForCausalLM)


def _expert_settings(model: ModelConfig) -> dict[str, object]:
    moe = model.moe
    if moe is None:
        return {}
    return {
        # Mixtral's experts; nothing in the others, but for DeepSeek, which have no dense block
        "intermediate_size": model.ffn_hidden_size if model.mla is not None else moe.ffn_hidden_size,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "num_experts": moe.num_experts,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalize,
        "qkv_bias": False,
        "experts_implementation": "eager",
    }


def _stacked_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers 5 has them in memory: all of a layer in two tensors."""
    found: dict[str, list[Tensor]] = {}
    for name, weight in weights.items():
        layer, _, _, part, _ = name.rsplit(".", 4)
        layer = re.sub(r"^mtp\.(\d+)\.block", r"mtp.\1.mtp_block", layer.replace("blocks.", "model.layers."))
        found.setdefault(f"{layer}.experts.{part}", []).append(weight)
    stacked = {name: torch.stack(parts) for name, parts in found.items()}
    joined = {}
    for name in [name for name in stacked if name.endswith(".down")]:
        prefix = name.removesuffix("down")
        joined[f"{prefix}down_proj"] = stacked[name]
        joined[f"{prefix}gate_up_proj"] = torch.cat((stacked[f"{prefix}gate"], stacked[f"{prefix}up"]), dim=1)
    return joined


def dense_inputs(indices: range, *, seq_len: int, vocab_size: int) -> dict[str, Tensor]:
    """Sequences as transformers takes them: a 4-d additive mask that keeps documents apart."""
    rows = [random_sequence(index, seq_len=seq_len, vocab_size=vocab_size) for index in indices]
    documents = torch.stack(
        [torch.from_numpy(np.searchsorted(row["borders"], np.arange(seq_len), side="right")) for row in rows]
    )
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    seen = causal & (documents.unsqueeze(1) == documents.unsqueeze(2))
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min).unsqueeze(1)
    join = {key: torch.stack([torch.from_numpy(row[key]) for row in rows]) for key in rows[0] if key != "borders"}
    return {**join, "attention_mask": mask, "documents": documents}


def reference_training(
    config: Config,
    model: ModelConfig,
    steps: int,
    choices: list[list[Tensor]] | None = None,
    *,
    weigh: Callable[[Tensor, range], Tensor] | None = None,
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of plain training.

    Args:
        choices: gets each step's choices of each router, `[tokens, k]`.
        weigh: of the mask of some sequences and their numbers, the weight of each label.
    """
    balance = Balance(model, config.batch.seq_len)
    reference = reference_model(model, config.run.seed)
    is_matrix = {p: p.dim() > 1 and not name.endswith("_bias") for name, p in reference.named_parameters()}
    decayed = [p for p, is_one in is_matrix.items() if is_one]  # biases of experts are stacked, and none
    others = [p for p, is_one in is_matrix.items() if not is_one]
    groups = [
        {"params": decayed, "weight_decay": config.optimizer.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.optimizer.betas, eps=config.optimizer.eps)
    curve = []
    for step in range(steps):
        size = config.batch.global_batch_size
        data = dense_inputs(
            range(step * size, (step + 1) * size), seq_len=config.batch.seq_len, vocab_size=model.vocab_size
        )
        if weigh is not None:
            data["mask"] = weigh(data["mask"], range(step * size, (step + 1) * size))
        inputs = {"input_ids": data["tokens"], "position_ids": data["positions"]}
        with balance.watching(reference):
            mask = data["attention_mask"]
            mask = reference_gpt_oss.masks(mask, model) if model.attention_sinks else mask
            stream = reference.model(**inputs, attention_mask=mask).last_hidden_state
            nll = F.cross_entropy(reference.lm_head(stream).flatten(0, 1), data["labels"].flatten(), reduction="none")
            further = [] if model.mtp is None else reference_deepseek.losses_ahead(reference, stream, data)
        if choices is not None:
            choices.append(balance.choices())
        loss = (nll * data["mask"].flatten()).sum() / data["mask"].sum()
        masks = [data["mask"], *(counts for _, counts in further)]
        beside = balance.loss([each.float() for each in masks], config.batch.micro_batch_size)
        for each, _ in further:
            beside = beside + model.mtp.weight_at(step + 1) / len(further) * each / data["mask"].sum()
        optimizer.zero_grad()
        (loss + beside).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), config.optimizer.clip_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1, config.train.steps, config.optimizer, config.schedule)
        optimizer.step()
        balance.end_step(reference)
        curve.append((loss.item(), norm.item()))
    return curve


class Balance:
    """The losses of routers, by their formulas, from what routers of transformers put out."""

    def __init__(self, model: ModelConfig, seq_len: int):
        self.moe, self._seq_len, self._logits = model.moe, seq_len, list[Tensor]()
        self._chosen, self._loads = list[Tensor | None](), list[Tensor]()

    @contextmanager
    def watching(self, reference: torch.nn.Module) -> Iterator[None]:
        """Within it logits of routers are kept."""
        self._logits.clear()
        self._chosen.clear()
        gates = reference_deepseek.gates_of(reference)
        hooks = [gate.register_forward_hook(self._keep) for gate in gates]
        yield
        for hook in hooks:
            hook.remove()

    def _keep(self, gate: torch.nn.Module, _: object, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._logits.append(out[0])
        self._chosen.append(out[2] if hasattr(gate, "e_score_correction_bias") else None)
        if self.moe.capacity_factor is None:
            return out
        return out[0], out[1] * self._find_room(out[1], out[2]), *out[2:]

    def _find_room(self, weights: Tensor, chosen: Tensor) -> Tensor:
        """0 for each choice that others of its sequence and expert leave no room for, else 1: `[tokens, k]`."""
        moe, length = self.moe, self._seq_len
        room, found = math.ceil(moe.capacity_factor * length * moe.top_k / moe.num_experts), torch.zeros_like(weights)
        for first in range(0, weights.shape[0], length):
            for expert in range(moe.num_experts):
                places = (chosen[first : first + length] == expert).nonzero()
                best = sorted(places.tolist(), key=lambda place: -weights[first + place[0], place[1]].bfloat16())[:room]
                for token, slot in best:
                    found[first + token, slot] = 1.0
        return found

    def choices(self) -> list[Tensor]:
        """Of each router, as it says itself, or the largest logits: `[tokens, k]`."""
        pairs = zip(self._logits, self._chosen, strict=True)
        return [
            chosen if chosen is not None else logits.topk(self.moe.top_k, dim=-1).indices for logits, chosen in pairs
        ]

    def end_step(self, reference: torch.nn.Module) -> None:
        """Biases of routers move by what they have chosen."""
        if self.moe is not None and self.moe.bias_rate:
            reference_deepseek.move_biases(reference, self._loads, self.moe.bias_rate)

    def loss(self, masks: list[Tensor], micro_batch_size: int) -> Tensor | float:
        """Of the global batch; masks are `[sequences, tokens]`: of the model's routers, and of each that predicts
        further."""
        moe, total = self.moe, 0.0
        if moe is None or not (moe.aux_loss or moe.z_loss or moe.bias_rate):
            return total
        former, self._loads = self._loads, []
        num_inside = len(self._logits) - len(masks) + 1
        for layer, logits in enumerate(self._logits):
            mask = masks[max(0, layer - num_inside + 1)]
            logits = logits.view(*mask.shape, moe.num_experts)
            scores = logits.softmax(-1) if moe.scores == "softmax" else logits.sigmoid()
            best = self._chosen[layer]  # where a bias has a say in it, as transformers' own router says
            best = scores.topk(moe.top_k, dim=-1).indices if best is None else best.view(*mask.shape, -1)
            chosen = F.one_hot(best, moe.num_experts).sum(2) * (mask > 0).to(mask.dtype).unsqueeze(2)
            scores = scores / scores.sum(-1, keepdim=True)
            self._loads.append(chosen.sum((0, 1)))
            size = {"sequence": 1, "micro_batch": micro_batch_size, "global_batch": mask.shape[0]}[moe.aux_loss_over]
            for first in range(0, mask.shape[0], size):
                unit = slice(first, first + size)
                counts = chosen[unit].sum((0, 1))
                if moe.aux_loss_over == "global_batch":
                    counts = former[layer] if former else torch.ones_like(counts)
                share = counts / counts.sum().clamp(min=1)  # no token of it counts: nothing is weighed by it
                means = (scores[unit] * mask[unit].unsqueeze(2)).sum((0, 1))
                total = total + moe.aux_loss * moe.num_experts * (share * means).sum()
            total = total + moe.z_loss * (mask * logits.logsumexp(-1).square()).sum()
        return total / masks[0].sum()
