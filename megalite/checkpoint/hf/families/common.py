"""What families have in common: keys that change nothing, sizes, and the parts of those that are like Llama or GPT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.architecture.settings import MOST_LAYERS
from megalite.checkpoint.hf.family import ALL_HEADS, EVEN_HEADS
from megalite.checkpoint.hf.rope_json import ROPE_KEYS, RopeKeys, read_rope, write_rope
from megalite.checkpoint.hf.settings import Key, Settings

ABOUT_THE_FILE = (
    "_name_or_path",
    "architectures",
    "dtype",
    "max_sequence_length",
    "model_type",
    "name_or_path",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
)
ABOUT_OTHER_TASKS = (
    "classifier_dropout",
    "finetuning_task",
    "id2label",
    "label2id",
    "num_labels",
    "prefix",
    "problem_type",
    "task_specific_params",
)
ABOUT_TRAINING = ("attention_dropout", "gradient_checkpointing")
ABOUT_OUTPUTS = (
    "_attn_implementation_autoset",
    "attn_implementation",
    "chunk_size_feed_forward",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "torchscript",
    "use_cache",
)
SPECIAL_TOKENS = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id")
GENERATION = (
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "tf_legacy_loss",
    "top_k",
    "top_p",
    "typical_p",
)
HARMLESS = frozenset(
    (*ABOUT_THE_FILE, *ABOUT_OTHER_TASKS, *ABOUT_TRAINING, *ABOUT_OUTPUTS, *SPECIAL_TOKENS, *GENERATION)
)
"""Keys that no class here computes anything from, whatever their value."""

SIZES = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "ffn_hidden_size": Key("intermediate_size"),
    "num_layers": Key("num_hidden_layers"),
    "num_heads": Key("num_attention_heads"),
    "max_positions": Key("max_position_embeddings"),
    "init_std": Key("initializer_range", float, 0.02),
    "tie_embeddings": Key("tie_word_embeddings", bool, False),
}

LLAMA_NEEDS = {"norm": ("rmsnorm",), "activation": ("swiglu",), "positions": ("rope",), "rope.fraction": (1.0,)}
LLAMA_NAMES: dict[str, Any] = {
    "outer": {
        "embedding.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
    "blocks": "model.layers",
    "inner": {
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
}

GPT_NEEDS = {
    "norm": ("layernorm",),
    "activation": ("gelu", "gelu_tanh"),
    "bias": ("all",),
    "qk_norm": (False,),
    "num_kv_heads": (ALL_HEADS,),
    "head_dim": (EVEN_HEADS,),
    "sliding_window": (None,),
}
GELU_NAMES = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
"""Their activation -> ours; the first of ours is what is written."""

QWEN_WINDOW = 4096
QWEN_FIRST_WINDOWED_LAYER = 28
FULL, SLIDING = "full_attention", "sliding_attention"


HEAD_DIM = Key("head_dim", int, None)
"""Of the classes whose code takes null for a number: left out, it is hidden_size / num_attention_heads."""
NULLABLE_HEAD_DIM = Key("head_dim", int, None, nullable=True)
"""Of the others, where null means the same as left out."""


def llama_keys(*, num_kv_heads: Key | None = None, head_dim: Key = HEAD_DIM) -> dict[str, Key]:
    """The sizes of a class like Llama, some with another default."""
    return {
        **SIZES,
        "num_kv_heads": num_kv_heads or Key("num_key_value_heads", int, None, nullable=True),
        "head_dim": head_dim,
        "norm_eps": Key("rms_norm_eps", float, 1e-6),
    }


def read_llama(settings: Settings, keys: RopeKeys = ROPE_KEYS, *, rotates_whole_heads: bool = True) -> dict[str, Any]:
    """The fields that all classes like Llama share."""
    settings.expect("hidden_act", "silu", "silu", "swish")
    rope = read_rope(settings, keys, rotates_whole_heads=rotates_whole_heads)
    return {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "rope": rope}


def write_llama(model: Architecture) -> dict[str, Any]:
    """The keys that all classes like Llama share."""
    return {
        "hidden_act": "silu",
        "attention_dropout": model.attention_dropout,
        **write_rope(model.rope, model.max_positions),
    }


def read_gelu(settings: Settings, key: str, default: str) -> dict[str, Any]:
    """The fields that the classes like GPT share, with the activation."""
    activation = GELU_NAMES.get(str(settings.expect(key, default, *GELU_NAMES)))
    return {"norm": "layernorm", "bias": "all", "activation": activation}


def gelu_name(model: Architecture) -> str:
    """What transformers calls the activation of a model like GPT."""
    return next(theirs for theirs, ours in GELU_NAMES.items() if ours == model.activation)


def take_num_layers(settings: Settings) -> int:
    """How many layers there are, for a list of them; 0, and at times a problem, where that is no number of layers."""
    key = Key(SIZES["num_layers"].name, int, 0)
    found = settings.take(key) or 0
    if found > MOST_LAYERS:
        settings.complain(key.name, f"found {found}, expected at most {MOST_LAYERS}")
    return found if 0 < found <= MOST_LAYERS else 0


def read_layer_types(settings: Settings, derived: Sequence[str]) -> tuple[str, ...] | None:
    """The kind of each layer.

    Args:
        derived: what the class takes where nothing is said.
    """
    given = settings.take(Key("layer_types", list, None, nullable=True))
    types = tuple(map(str, derived if given is None else given))
    num_layers = take_num_layers(settings)
    if num_layers and len(types) != num_layers:
        settings.complain("layer_types", f"found {len(types)} of {num_layers} layers")
    if unknown := set(types) - {FULL, SLIDING}:
        settings.complain("layer_types", f"found {sorted(unknown)[0]}, megalite has {FULL} and {SLIDING}")
        return None
    return types


def write_layer_types(model: Architecture) -> list[str]:
    """The kind of each layer of a filled model."""
    return [FULL if block.attention.window is None else SLIDING for block in model.blocks]


def read_qwen_window(settings: Settings) -> int | None:
    """The window of all layers; a problem when only some have one."""
    is_used = settings.take(Key("use_sliding_window", bool, False))
    window = settings.take(Key("sliding_window", int, QWEN_WINDOW, nullable=True))
    window = window if is_used else None
    first = settings.take(Key("max_window_layers", int, QWEN_FIRST_WINDOWED_LAYER))
    num_layers = take_num_layers(settings)
    derived = [SLIDING if window is not None and index >= (first or 0) else FULL for index in range(num_layers)]
    given = settings.take(Key("layer_types", list, None, nullable=True))
    kinds = set(map(str, derived if given is None else given))
    if given is not None and num_layers and len(given) != num_layers:
        settings.complain("layer_types", f"found {len(given)} of {num_layers} layers")
    if len(kinds) > 1:
        settings.complain("layer_types", f"mixes {' and '.join(sorted(kinds))}, megalite has one kind for all layers")
    elif kinds == {SLIDING} and window is None:
        settings.complain("layer_types", f"found {SLIDING}, but there is no window: use_sliding_window is not set")
    elif not kinds <= {FULL, SLIDING}:
        settings.complain("layer_types", f"found {kinds.pop()}, megalite has {FULL} and {SLIDING}")
    return window if kinds == {SLIDING} else None


def write_qwen_window(model: Architecture) -> dict[str, Any]:
    """The window of all layers, said in each of the ways that are read."""
    is_windowed = model.sliding_window is not None
    return {
        "use_sliding_window": is_windowed,
        "sliding_window": model.sliding_window,
        "max_window_layers": 0 if is_windowed else model.num_layers,
        "layer_types": [SLIDING if is_windowed else FULL] * model.num_layers,
    }
