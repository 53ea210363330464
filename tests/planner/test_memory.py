"""The planner's bytes: by hand, and against a real block's saved tensors."""

from __future__ import annotations

import gc

import pytest
import torch

from megalite.architecture.costs import ELEMENT_BYTES
from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config, ModelConfig
from megalite.config.validate import validate
from megalite.engine.deepspeed import footprint
from megalite.engine.deepspeed.config import deepspeed_config
from megalite.layers.parts import choose_parts
from megalite.layers.rope import frequencies, rotation
from megalite.model.block import Block
from megalite.model.recompute import choose_recompute
from megalite.model.spec import StageSpec
from megalite.model.transformer import documents_of
from megalite.planner.block_memory import block_activations, rotation_bytes
from megalite.planner.holdings import parameters_by_stage
from megalite.planner.memory import memory_by_stage
from megalite.planner.practice import Practice

SMALL = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "ffn_hidden_size": 192, "vocab_size": 128}


PRECISIONS = {
    **{dtype: {"dtype": dtype} for dtype in ("fp32", "bf16", "fp16")},
    "bf16 masters": {"dtype": "bf16", "master_dtype": "bf16"},
}


def planned(world_size: int = 1, **sections: dict):
    """Config and plan of a small model."""
    model = {**SMALL, **sections.pop("model", {})}
    config = Config(**{"train": {"steps": 1}, "model": model, **sections})
    return config, make_plan(config, world_size)


def _gradients_in_mlp(config: Config, plan: RunPlan) -> int:
    """Bytes of a token: of what an MLP's activation is made from, twice its width."""
    return ELEMENT_BYTES[config.precision.dtype] * 2 * plan.model.blocks[0].feed_forward.width


class TestByHand:
    def test_parameters(self):
        """Two stages at tp 2: blocks of 4 x 64^2 + 3 x 64 x 192 halved, whole norms, 64 rows of the vocabulary."""
        _, plan = planned(4, parallel={"tp": 2, "pp": 2}, model={"num_layers": 3})
        block = (4 * 64 * 64 + 3 * 64 * 192) // 2 + 2 * 64
        assert parameters_by_stage(plan) == (64 * 64 + 2 * block, block + 64 + 64 * 64)

    def test_tied_head_is_a_copy_on_the_last_stage(self):
        """Without a pipeline the head is the embedding itself."""
        _, piped = planned(2, parallel={"pp": 2}, model={"tie_embeddings": True})
        _, whole = planned(1, model={"tie_embeddings": True})
        assert sum(parameters_by_stage(piped)) == parameters_by_stage(whole)[0] + 128 * 64

    def test_further_predictions_bring_the_embedding_along(self):
        """Their stage has a copy of it, whether the head is one or not."""
        for tied in (False, True):
            model = {"tie_embeddings": tied, "mtp": {"num_layers": 1}}
            _, piped = planned(2, parallel={"pp": 2}, model=model)
            _, whole = planned(1, model=model)
            assert sum(parameters_by_stage(piped)) == parameters_by_stage(whole)[0] + 128 * 64

    @pytest.mark.parametrize(
        ("dtype", "stage", "dp", "expected"),
        [
            ("fp32", 0, 4, (4, 4, 8)),
            ("fp32", 1, 4, (4, 4, 2)),
            ("fp32", 2, 4, (4, 1, 3)),
            ("fp32", 3, 4, (1, 1, 3)),
            ("bf16", 1, 1, (2, 4, 12)),
            ("bf16", 1, 4, (2, 4, 3)),
            ("bf16", 2, 4, (2, 1, 3)),
            ("bf16", 3, 4, (0.5, 1, 3)),
            ("fp16", 2, 4, (2, 0.5, 3)),
            ("bf16 masters", 2, 4, (2, 1, 2.5)),
            ("bf16 masters", 3, 4, (0.5, 1, 2)),
        ],
    )
    def test_model_state(self, dtype: str, stage: int, dp: int, expected: tuple):
        """Bytes a parameter of weights, gradients and optimizer, ours and DeepSpeed's."""
        engine = "native" if stage < 2 else "deepspeed"
        config, plan = planned(dp, precision=PRECISIONS[dtype], parallel={"zero_stage": stage, "engine": engine})
        (found,) = memory_by_stage(config, plan)
        parts = (found.weights, found.gradients, found.optimizer)
        assert tuple(part / found.num_parameters for part in parts) == pytest.approx(expected, rel=1e-4)

    def test_block(self):
        """bf16 with h = q = kv = 64 and f = 192, tensor by tensor."""
        config, plan = planned(precision={"dtype": "bf16"})
        norms = 2 * (4 * 64 + 2 * 64 + 2 * 64)  # fp32 input, normalised, scaled
        attention = 2 * (3 * 64 + 64)  # rotated q and k, v, result
        mlp = 2 * (2 * 192 + 192 + 192)  # gate and up, silu, product
        assert block_activations(config, plan, (0,), "none")[0] == norms + attention + mlp + 16
        assert block_activations(config, plan, (0,), "selective")[0] == 2 * (64 + 3 * 64 + 64 + 64 + 2 * 192 + 64) + 16
        assert block_activations(config, plan, (0,), "full")[0] == 2 * 64
        config, plan = planned(precision={"dtype": "bf16", "fp8": {"backend": "te"}})
        inputs = 3 * 64 + 192  # of the four products, in FP8
        assert block_activations(config, plan, (0,), "selective")[0] == 2 * (7 * 64 + 2 * 192) + 16 + inputs

    def test_tensor_and_sequence_parallelism(self):
        """tp divides what lies inside the layers; sequence parallelism also the stream and the norms."""
        config, plan = planned(4, parallel={"tp": 4}, precision={"dtype": "fp32"})
        inside = 4 * (4 * 64 + 4 * 192) // 4 + 4
        assert block_activations(config, plan, (0,), "none")[0] == 2 * 12 * 64 + inside
        config, plan = planned(4, parallel={"tp": 4, "sequence_parallel": True}, precision={"dtype": "fp32"})
        assert block_activations(config, plan, (0,), "none")[0] == 2 * (2 * 64 + 4 * 64) + inside

    def test_micro_batches_in_flight(self):
        """1F1B: stage s of pp holds pp - s micro-batches, but never more than there are."""
        batch = {"micro_batch_size": 1, "global_batch_size": 8, "seq_len": 32}
        config, plan = planned(4, parallel={"pp": 4}, batch=batch)
        one = 32 * (block_activations(config, plan, (0,), "none")[0] + rotation_bytes(plan))
        gradients = 32 * _gradients_in_mlp(config, plan)
        found = [stage.activations - gradients for stage in memory_by_stage(config, plan)]
        assert found == [4 * one, 3 * one, 2 * one, one]
        config, plan = planned(4, parallel={"pp": 4}, batch={**batch, "global_batch_size": 2})
        found = [stage.activations - gradients for stage in memory_by_stage(config, plan)]
        assert found == [2 * one, 2 * one, 2 * one, one]

    def test_full_recomputation_brings_one_block_back(self):
        config, plan = planned(train={"steps": 1, "recompute": "full"}, batch={"seq_len": 32})
        kept, whole = (block_activations(config, plan, (0,), kind)[0] for kind in ("full", "none"))
        (found,) = memory_by_stage(config, plan)
        beside = 2 * 64 + rotation_bytes(plan)  # what the block was given, which its norm has a copy of
        assert found.activations == 32 * (4 * kept + whole - kept + beside + _gradients_in_mlp(config, plan))

    def test_head(self):
        """fp32: the norm's two [t, h] and two gradients of that shape; the matrix' gradient, and logits or, where it is
        not ours that adds it to a sum, its scaled copy."""
        config, plan = planned(precision={"dtype": "fp32"}, batch={"seq_len": 32})
        (found,) = memory_by_stage(config, plan)
        assert found.head == 32 * (8 * 64 + 8 * 64) + 4 * 128 * 64 + 32 * 128 * 4
        fsdp2 = {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}
        (found,) = memory_by_stage(*planned(2, parallel=fsdp2, precision={"dtype": "fp32"}, batch={"seq_len": 32}))
        assert found.head == 32 * (8 * 64 + 8 * 64) + 4 * 128 * 64 + 4 * 128 * 64

    def test_head_holds_one_chunk_of_logits(self):
        """Doubling the tokens of a large vocabulary adds no logits."""
        heads = []
        for seq_len in (4096, 8192):
            config, plan = planned(model={"vocab_size": 128_000}, batch={"seq_len": seq_len})
            heads.append(memory_by_stage(config, plan)[0].head)
        assert heads[1] - heads[0] == 4096 * (6 * 64 + 2 * 2 * 64)

    def test_only_the_last_stage_has_a_head(self):
        config, plan = planned(2, parallel={"pp": 2})
        first, last = memory_by_stage(config, plan)
        assert first.head == 0 < last.head

    def test_total_and_json(self):
        config, plan = planned()
        found = memory_by_stage(config, plan)[0].to_dict()
        parts = ("weights", "gradients", "optimizer", "activations", "head", "buffers")
        assert found["total"] == sum(found[part] for part in parts) - found["apart"]

    def test_the_head_and_a_block_at_work_are_never_there_together(self):
        """The smaller of the two is left out: a block comes back under full recomputation, and the gradients of its MLP
        are at work, when of the head the stream's gradient is left."""
        sections = {"batch": {"seq_len": 32}, "precision": {"dtype": "fp32"}}
        for vocab_size, recompute, larger in ((16, "full", "block"), (4096, "full", "head"), (128, "none", "head")):
            model = {"vocab_size": vocab_size}
            config, plan = planned(train={"steps": 1, "recompute": recompute}, model=model, **sections)
            kept, whole = (block_activations(config, plan, (0,), kind)[0] for kind in (recompute, "none"))
            block, stream = 32 * (whole - kept + _gradients_in_mlp(config, plan)), 32 * 64 * 4
            (found,) = memory_by_stage(config, plan)
            assert (larger == "block") == (stream + block > found.head)
            assert found.apart == (found.head - stream if larger == "block" else block)

    def test_what_the_end_of_the_backward_pass_needs_finds_no_activations(self):
        """Without ZeRO the gradients are copied to be sent when all are there."""
        found, own = (
            [
                memory_by_stage(*planned(2, parallel={"zero_stage": 0, "engine": engine}, batch=batch))[0]
                for batch in ({"seq_len": 8, "global_batch_size": 2}, {"seq_len": 1024, "global_batch_size": 2})
            ]
            for engine in ("deepspeed", "native")
        )
        sent = 4 * found[0].num_parameters
        assert found[0].buffers == found[1].buffers == sent
        few, many = (each.apart - other.apart for each, other in zip(found, own, strict=True))
        assert few < sent == many

    def test_chunks_hold_one_of_them(self):
        """Nothing inside an MLP is kept, but a chunk's worth is there while one works, and of its gradients; under full
        recomputation the block that comes back has no more of it either."""
        settings = {"precision": {"dtype": "bf16"}, "batch": {"seq_len": 32}, "parallel": {"zero_stage": 0}}
        settings["precision"] = {"dtype": "fp32"}
        inside, gradients = 4 * (2 * 192 + 192 + 192), 4 * (2 * 192)
        for recompute in ("none", "full"):
            found = [
                memory_by_stage(*planned(train={"steps": 1, "recompute": recompute, **chunks}, **settings))[
                    0
                ].activations
                for chunks in ({}, {"mlp_chunk_tokens": 8})
            ]
            blocks = 4 if recompute == "none" else 1
            assert found[0] - found[1] == blocks * 32 * inside - 8 * inside + (32 - 8) * gradients

    def test_offloaded_inputs_are_the_hosts(self):
        """Of all blocks' inputs two are on the device at most; on a CPU nothing moves."""
        train = {"steps": 1, "recompute": "full", "offload_activations": True}
        settings = {"precision": {"dtype": "bf16"}, "batch": {"seq_len": 32}}
        away, here = (
            memory_by_stage(*planned(train={**train, "device": device}, **settings))[0] for device in ("cuda", "cpu")
        )
        one = 32 * 2 * 64
        assert (away.host, here.host) == (4 * one, 0)
        assert here.activations - away.activations == 4 * one - 2 * one + 32 * 4 * 16  # and tables of the rotation

    def test_a_million_tokens_fit_64_gpus(self):
        """1.3B parameters, the row that docs/long-context.md shows."""
        config = Config(
            model={"preset": "llama-1b3", "max_positions": 2**20, "vocab_size": 32000},
            batch={"seq_len": 2**20, "micro_batch_size": 1, "global_batch_size": 4},
            parallel={"cp": 64},
            train={"steps": 10, "recompute": "full", "mlp_chunk_tokens": 8192, "offload_activations": True},
        )
        validate(config, 64)
        (found,) = memory_by_stage(config, make_plan(config, 64))
        assert 30 * 2**30 < found.total < 40 * 2**30

    def test_llama_70b_fits_80_gb(self):
        """The layout of configs/llama-70b.yaml, with room for what the planner leaves out."""
        config = Config(
            model={"preset": "llama-70b"},
            parallel={"tp": 8, "pp": 4, "sequence_parallel": True},
            batch={"seq_len": 8192, "global_batch_size": 1024},
            train={"steps": 1, "recompute": "selective"},
        )
        stages = memory_by_stage(config, make_plan(config, 512))
        assert 40 * 2**30 < max(stage.total for stage in stages) < 65 * 2**30


LATENTS = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}

EXPERTS = {"num_experts": 6, "top_k": 2, "ffn_hidden_size": 40}
BLOCKS = {
    "llama": {},
    "grouped": {"num_kv_heads": 2},
    "qk_norm": {"qk_norm": True},
    "gpt": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": "all"},
    "neox": {"norm": "layernorm", "activation": "gelu", "rope": {"fraction": 0.5}, "bias": "all"},
    "dropout": {"dropout": 0.1},
    "pythia": {"norm": "layernorm", "activation": "gelu", "bias": "all", "parallel_residual": True},
    "parallel": {"parallel_residual": True, "norm_placement": "both"},
    "olmo": {"norm_placement": "after", "qk_norm": "whole"},
    "post-norm": {"norm_placement": "post"},
    "original": {"norm_placement": "post", "norm": "layernorm", "activation": "relu", "bias": "all", "dropout": 0.1},
    "gemma": {
        "norm": "zero_centered_rmsnorm",
        "norm_placement": "both",
        "activation": "geglu_tanh",
        "qk_norm": True,
    },
    "relu2": {"activation": "relu2"},
    "relu": {"activation": "relu"},
    "reglu": {"activation": "reglu"},
    "clamped": {"activation": "swiglu_clamped"},
    "sinks": {"attention_sinks": True, "num_kv_heads": 2},
    "experts": {"moe": EXPERTS},
    "experts, balanced": {"moe": {**EXPERTS, "aux_loss": 0.01, "z_loss": 0.01, "scores": "sigmoid"}},
    "experts, not normalised": {"moe": {**EXPERTS, "normalize": False, "shared_ffn_hidden_size": 24}},
    "experts, gated": {"moe": {**EXPERTS, "shared_ffn_hidden_size": 24, "shared_gate": True}},
    "experts with biases": {"moe": {**EXPERTS, "logit_bias": True}, "bias": "all", "activation": "swiglu_clamped"},
    "latents": {"mla": LATENTS},
    "latents of queries": {"mla": {**LATENTS, "q_lora_rank": 24, "v_head_dim": 20}},
    "latents, gemma's norms": {"mla": {**LATENTS, "q_lora_rank": 24}, "norm": "zero_centered_rmsnorm"},
}

STATISTICS_BYTES = 4 * (2 * 4 + 2 * 8)
"""Left out by the formulas: fp32 means and deviations a token, two of each of four norms and of 8 head norms, or what a
router keeps one of a token."""


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_block_keeps_what_is_planned(name: str, dtype: str):
    """The storages that autograd saves in one block, beside its weights, are the planned bytes."""
    num_tokens = 32
    config, plan = planned(model=BLOCKS[name], precision={"dtype": dtype}, batch={"seq_len": num_tokens})
    block, x, documents, shared = _block(plan.model, dtype, num_tokens)
    documents.loss_weights = torch.ones(num_tokens)
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x, documents)
    router = EXPERTS["num_experts"] * plan.model.hidden_size  # its weight is widened, whatever the number of tokens
    of_tokens = (t for where, t in saved.items() if where not in shared and num_tokens <= t.numel() != router)
    measured = sum(t.untyped_storage().nbytes() for t in of_tokens) / num_tokens
    assert 0 <= measured - block_activations(config, plan, (0,), "none")[0] <= STATISTICS_BYTES


RECOMPUTED = {"grouped": {"num_kv_heads": 2}, "latents": {"mla": LATENTS}, "experts": {"moe": EXPERTS}}


@pytest.mark.parametrize("model", RECOMPUTED.values(), ids=RECOMPUTED)
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputation_keeps_what_is_planned(model: dict, recompute: str, dtype: str):
    """What a block leaves behind in memory, its output standing for the next block's input."""
    num_tokens = 32
    config, plan = planned(model=model, precision={"dtype": dtype}, batch={"seq_len": num_tokens})
    block, x, documents, _ = _block(plan.model, dtype, num_tokens)
    x = x * 1  # what the block before would hand over
    before = living_storages()
    y = choose_recompute(recompute)(block, x, documents)
    left = {where: size for where, size in living_storages().items() if where not in before}
    assert y.requires_grad
    assert sum(left.values()) / num_tokens == block_activations(config, plan, (0,), recompute)[0]


def _block(model: ModelConfig, dtype: str, num_tokens: int):
    """A block with its input and documents, and the storages that are not its activations."""
    torch.manual_seed(0)
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    parts = choose_parts(model, "cpu", torch_dtype)
    block = Block(StageSpec(model, parts=parts), 0).to(torch_dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    documents = documents_of(torch.zeros(1, num_tokens, dtype=torch.int64))
    shared = list(block.parameters())
    if model.positions == "rope":
        documents.rotation = rotation(documents.positions, frequencies(model.rope, model.turned_dim))
        shared += documents.rotation
    x = torch.randn(num_tokens, model.hidden_size, dtype=torch_dtype, requires_grad=True)
    return block, x, documents, {tensor.untyped_storage().data_ptr() for tensor in shared}


def living_storages() -> dict[int, int]:
    """Bytes of every living tensor's storage, gradients included."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


class TestConstants:
    def test_deepspeed_defaults(self):
        """What DeepSpeed does when its JSON leaves it open."""
        from megalite.engine.deepspeed.start import prepare_deepspeed

        prepare_deepspeed("cpu")
        from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE

        assert MEMORY_OPT_ALLREDUCE_SIZE == footprint.ALLREDUCE_ELEMENTS


def test_buffers_follow_the_json():
    """ZeRO-2's bucket, and its tensors once more, are as DeepSpeed is told; one rank without ZeRO sends nothing."""
    config, plan = planned(2, parallel={"zero_stage": 2}, precision={"dtype": "bf16"})
    bucket = deepspeed_config(config, plan)["zero_optimization"]["reduce_bucket_size"]
    assert memory_by_stage(config, plan)[0].buffers == 2 * bucket + 2 * bucket
    config, plan = planned(1, parallel={"zero_stage": 0}, precision={"dtype": "fp32"})
    assert memory_by_stage(config, plan)[0].buffers == 0


def test_scores_that_are_written():
    """Software whose attention is not fused keeps the softmax's result of each head, token and token before, 2 bytes,
    and with dropout a mask and what it leaves; made again, they are there for a block at a time."""
    written, redone = (Practice(fused_attention=False, redoes_attention=is_redone) for is_redone in (False, True))

    def bytes_more(practice: Practice, recompute: str, **model: float) -> int:
        settings = {"batch": {"seq_len": 512}, "train": {"steps": 1, "recompute": recompute, "compile": "off"}}
        config, plan = planned(model=model, **settings)
        (plain,), (found,) = memory_by_stage(config, plan), memory_by_stage(config, plan, practice)
        return found.activations - plain.activations

    scores, of_mlp = 2 * 4 * 512 * 512, 2 * 3 * 192 * 512
    beside = scores - 2 * of_mlp  # a gradient, when what the MLP kept and its gradients are gone
    for settings, kept in (({}, scores), ({"dropout": 0.1}, scores * 5 // 2)):
        for practice in (written, redone):
            assert bytes_more(practice, "none", **settings) == 4 * kept + beside
            assert bytes_more(practice, "full", **settings) == kept + beside
        assert bytes_more(written, "selective", **settings) == 4 * kept + beside
        assert bytes_more(redone, "selective", **settings) == kept + beside
