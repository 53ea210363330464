"""What families with experts have in common."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.architecture.settings import MoeConfig
from megalite.checkpoint.hf.families.common import LLAMA_NAMES, take_num_layers
from megalite.checkpoint.hf.settings import Key, Settings

MOE_NEEDS: dict[str, tuple] = {"moe": (True,), "moe.normalize": (True, False)}
"""Softmax, nothing shared, one group: `PLAIN` has the rest."""

ABOUT_BALANCE = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
"""Keys of a loss, and of noise, that only transformers' own training has."""

EXPERT_NAMES: dict[str, Any] = {
    **LLAMA_NAMES,
    "inner": {
        **LLAMA_NAMES["inner"],
        "mlp.router": "mlp.gate",
        "mlp.experts.*.gate": "mlp.experts.*.gate_proj",
        "mlp.experts.*.up": "mlp.experts.*.up_proj",
        "mlp.experts.*.down": "mlp.experts.*.down_proj",
        "mlp.shared.gate": "mlp.shared_expert.gate_proj",
        "mlp.shared.up": "mlp.shared_expert.up_proj",
        "mlp.shared.down": "mlp.shared_expert.down_proj",
        "mlp.shared_gate": "mlp.shared_expert_gate",
    },
}


def filled_moe(model: Architecture) -> MoeConfig:
    """The experts of a model that has some."""
    assert model.moe is not None
    return model.moe


def write_balance(model: Architecture) -> dict[str, Any]:
    """The loss that keeps experts in balance, as transformers counts it: each of a token's choices by itself."""
    moe = filled_moe(model)
    return {"output_router_logits": False, "router_aux_loss_coef": moe.aux_loss / moe.top_k}


def take_num_experts(settings: Settings, default: int) -> int | None:
    """Experts of a block, which versions 4 and 5 of transformers may keep under other keys."""
    found = {settings.take(Key(name, int, None)) for name in ("num_experts", "num_local_experts")} - {None}
    if len(found) > 1:
        settings.complain("num_experts", f"found {min(found)} and {max(found)}, the other as num_local_experts")
    return found.pop() if found else default


def read_qwen_experts(settings: Settings, *, top_k: int, width: int, num_experts: int) -> dict[str, Any]:
    """The experts of a class like Qwen's, given its defaults."""
    found = {
        "num_experts": take_num_experts(settings, num_experts),
        "top_k": settings.take(Key("num_experts_per_tok", int, top_k)),
        "ffn_hidden_size": settings.take(Key("moe_intermediate_size", int, width)),
        "normalize": settings.take(Key("norm_topk_prob", bool, False)),
    }
    return {**found, **_read_sparse_blocks(settings)}


def write_qwen_experts(model: Architecture) -> dict[str, Any]:
    """The same back."""
    moe = filled_moe(model)
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "norm_topk_prob": moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, is_sparse in enumerate(model.sparse_blocks) if not is_sparse],
        **write_balance(model),
    }


def _read_sparse_blocks(settings: Settings) -> dict[str, int]:
    """Which blocks have experts, in the two numbers that say it here; a problem where they cannot."""
    step = settings.take(Key("decoder_sparse_step", int, 1)) or 0
    dense = settings.take(Key("mlp_only_layers", list, None, nullable=True)) or []
    num_layers = take_num_layers(settings)
    if wrong := [index for index in dense if not isinstance(index, int) or isinstance(index, bool)]:
        settings.complain("mlp_only_layers", f"found {str(wrong[0])[:60]!r}, expected numbers of layers")
        return {}
    if step < 1:
        settings.complain("decoder_sparse_step", f"found {step}, expected 1 or more")
        return {}
    sparse = [(index + 1) % step == 0 and index not in dense for index in range(num_layers)]
    first = sparse.index(True) if True in sparse else 0
    for every in range(1, first + 2):  # the last of each run is sparse
        begin = first - every + 1
        if sparse == [index >= first and (index - begin) % every == every - 1 for index in range(num_layers)]:
            return {"first_dense": begin, "every": every}
    settings.complain(
        "mlp_only_layers" if dense else "decoder_sparse_step",
        "leaves blocks with experts at uneven distances, megalite has each so-manieth from one on",
    )
    return {}
