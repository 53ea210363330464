"""Tiny models in Hugging Face folders, of random weights, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN_SIZE, NUM_LAYERS, MAX_POSITIONS = 32, 2, 96

SPECIAL = ("[CLS]", "[SEP]")


def write_encoder(folder: Path, kind: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """A folder with a model that has never learnt anything.

    Args:
        folder: to make.
        kind: llama, whose tokenizer adds nothing, or bert, whose puts a token at each end.
        seed: of its weights.
        changes: of its config.
    """
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": MAX_POSITIONS,
        "vocab_size": 260,
        **changes,
    }
    model = BertModel(BertConfig(**sizes)) if kind == "bert" else LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(folder)
    byte_tokenizer(with_ends=kind == "bert").save_pretrained(folder)
    return folder


def byte_tokenizer(*, with_ends: bool) -> PreTrainedTokenizerFast:
    """One token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if with_ends:
        ends = [(name, number) for number, name in enumerate(SPECIAL)]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, cls_token=SPECIAL[0], sep_token=SPECIAL[1])
