"""Whom megalite is timed beside on a GPU: training steps of the same model by others, each with its best lines."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from plain_llama import Llama, Shape
from torch import Tensor, nn


def trained(model: nn.Module, device: torch.device, loss_of: Callable[[], Tensor]) -> Callable[[int], None]:
    """A training step: bf16 autocast over fp32 weights, gradients clipped, torch's fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(_: int) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_step(shape: Shape, micro: int, device: torch.device) -> Callable[[int], None]:
    """Plain PyTorch with compile and autocast to bf16 over fp32 weights."""
    model = Llama(shape).to(device)
    run = torch.compile(model)
    stream = torch.randint(0, shape.vocab, (micro, shape.seq_len + 1), device=device)

    return trained(model, device, lambda: run(stream[:, :-1], stream[:, 1:]))


def blockwise_step(shape: Shape, micro: int, device: torch.device) -> Callable[[int], None]:
    """torchtitan's recipe on one GPU: the plain model with each block, and the loss, compiled by itself."""
    model = Llama(shape).to(device)
    for block in model.blocks:
        block.compile(fullgraph=True)

    @torch.compile
    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    stream = torch.randint(0, shape.vocab, (micro, shape.seq_len + 1), device=device)

    return trained(model, device, lambda: loss_of(model.logits(stream[:, :-1]), stream[:, 1:]))


def hugging_face_step(shape: Shape, micro: int, device: torch.device) -> Callable[[int], None]:
    """transformers' Llama in bf16 with compile, its own fused attention, and torch's fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.seq_len,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    run = torch.compile(model)
    tokens = torch.randint(0, shape.vocab, (micro, shape.seq_len), device=device)

    return trained(model, device, lambda: run(input_ids=tokens, labels=tokens).loss)


PEERS = {"plain": plain_step, "blockwise": blockwise_step, "hugging-face": hugging_face_step}
"""All compiled."""
