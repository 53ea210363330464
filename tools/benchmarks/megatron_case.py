"""Megatron-core's model with tensor parallelism on a CPU, as a peer in `cases.py`. Needs `pip install megatron-core`.

Megatron-core asks CUDA which device it is on and for its random state; where there is none, the CPU answers in its
place. Its model, layers and loss are as shipped, with the choices that a CPU leaves: no Transformer Engine, no fused
CUDA kernels. Rank-local clipping is torch's; it counts replicated norms twice, which costs nothing in time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def megatron_model(job: object, world_size: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The model of a job, cut over all ranks; call it with tokens and labels for the mean loss."""
    _answer_for_cuda()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    random.initialize_rng_tracker(force_reset=True)
    random.model_parallel_cuda_manual_seed(1)
    shape = job.shape
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=world_size,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=shape.vocab,
        max_sequence_length=shape.seq_len,
        parallel_output=True,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    mask = torch.triu(torch.ones(shape.seq_len, shape.seq_len, dtype=torch.bool), 1)[None, None]

    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
            return self.model(tokens, positions, mask, labels=labels).mean()

    return WithLoss()


def _answer_for_cuda() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed
