"""StarCoder 2 (Lozhkov et al. 2024): LayerNorm, GELU and biases as GPT, grouped heads and rotation as Llama."""

from typing import Any

from megalite import extend
from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import GPT_NEEDS, LLAMA_NAMES, gelu_name, llama_keys, read_gelu
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.rope_json import read_rope, write_rope
from megalite.checkpoint.hf.settings import Key, Settings

NEEDS = {name: GPT_NEEDS[name] for name in ("norm", "activation", "bias", "qk_norm", "head_dim", "sliding_window")}
NAMES = {**LLAMA_NAMES["inner"], "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}


def read(settings: Settings) -> dict[str, Any]:
    settings.expect("use_bias", True, True)
    settings.expect("sliding_window", None, None)
    return {**read_gelu(settings, "hidden_act", "gelu_pytorch_tanh"), "positions": "rope", "rope": read_rope(settings)}


def write(model: Architecture) -> dict[str, Any]:
    rope = write_rope(model.rope, model.max_positions)
    dropout = {"attention_dropout": 0.0, "embedding_dropout": model.dropout, "residual_dropout": model.dropout}
    return {"use_bias": True, "sliding_window": None, "hidden_act": gelu_name(model), **dropout, **rope}


extend.family(
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        needs={**NEEDS, "positions": ("rope",), "rope.fraction": (1.0,)},
        keys={
            **{field: key for field, key in llama_keys().items() if field != "head_dim"},
            "norm_eps": Key("norm_epsilon", float, 1e-5),
            "tie_embeddings": Key("tie_word_embeddings", bool, True),
        },
        read=read,
        write=write,
        outer={**LLAMA_NAMES["outer"], "final_norm.bias": "model.norm.bias"},
        blocks="model.layers",
        inner=NAMES,
        harmless=frozenset({"embedding_dropout", "residual_dropout"}),
    )
)
