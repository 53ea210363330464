"""What a model costs: parameters, floating-point operations, bytes of activations and of what tp ranks send.

Everything follows from the table of weights and the descriptions of the blocks, and everybody who counts asks here:
MFU, the balance of pipeline stages, the planner and `config check`.

Legend: a bytes of an element, t tokens of a micro-batch, h hidden size, q and kv widths of all query and of all key
heads, f feed-forward width; q, kv and f divided by tp.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from megalite.architecture.activations import ACTIVATIONS
from megalite.architecture.architecture import Architecture, AttentionSpec, BlockSpec, ExpertsSpec, FeedForwardSpec
from megalite.architecture.attention_costs import (
    FP32_BYTES,
    LinearSize,
    entering_bytes,
    mixing_bytes,
    mixing_multiply_adds,
    projections,
    seen_kv_width,
    sharing_ranks,
    softmax_sums,
)
from megalite.architecture.norms import NORMS
from megalite.architecture.trained import ALL_GRADIENTS, BlockGradients, TrainedParts, everything
from megalite.architecture.weights import Weight, is_adapter, weight_table

FP8_BYTES = 1
INT64_BYTES = 8
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class BlockCut:
    """How ranks divide a block."""

    tp: int = 1
    sequence_parallel: bool = False
    seen: int = 1
    """Tokens whose keys and values a rank keeps for each of its own, where they are made of latents."""


NOT_CUT = BlockCut()


MOST_KEPT = 64
"""Models that are remembered: a search asks for the same again and again, and one of thousands of experts is long to
count."""


@lru_cache(maxsize=MOST_KEPT)
def count_parameters(model: Architecture) -> int:
    """Parameters of a model, tied weights counted once."""
    return sum(sum_by_layer(model, lambda weight: prod(weight.shape)).values())


def count_adapters(model: Architecture) -> int:
    """Those of low-rank adapters."""
    return sum(sum_by_layer(model, lambda weight: prod(weight.shape) if is_adapter(weight.name) else 0).values())


def count_active_parameters(model: Architecture) -> int:
    """Those that one token meets: of the experts of a block the ones that it goes to."""
    top_k = 0 if model.moe is None else model.moe.top_k

    def met(weight: Weight) -> int:
        return prod(weight.shape) if weight.expert is None or weight.expert[0] < top_k else 0

    return sum(sum_by_layer(model, met).values())


@lru_cache(maxsize=MOST_KEPT)
def flops_per_token(model: Architecture, seq_len: int, trained: TrainedParts | None = None) -> float:
    """Forward and backward FLOPs of one token: 6 a matrix weight, and causal attention over the mean span it sees.

    The convention of PaLM (Chowdhery et al. 2022, appendix B) with attention counted causal, i.e. half. Of what is not
    trained there are no gradients: 4 a weight, and 2 where no gradient goes back to, neither.

    Args:
        trained: what of the model is; None for all of it.
    """
    trained, head = trained or everything(model), model.vocab_size * model.hidden_size
    of_head = head * (4.0 + 2.0 * trained.trains_head)
    total = of_head * (1 + model.num_predictions) + (0.0 if model.lora is None else 6.0 * count_adapters(model))
    of_blocks = _multiply_adds(model, seq_len)
    for index, share in enumerate(trained.shares):
        linear, mixing = of_blocks[min(index, model.num_layers - 1)]
        if index >= model.num_layers:
            linear += 2 * model.hidden_size**2  # the matrix that joins two streams
        total += (4.0 + 2.0 * share) * linear + 6.0 * mixing if trained.is_passed(index) else 2.0 * (linear + mixing)
    return total


def prediction_multiply_adds(model: Architecture, seq_len: int) -> float:
    """Those of one token's forward pass through a layer that predicts further ahead, without the head."""
    block = model.block(model.num_layers)
    return 2 * model.hidden_size**2 + block_multiply_adds(block, model.hidden_size, seq_len)


@lru_cache(maxsize=MOST_KEPT)
def multiply_adds_by_block(model: Architecture, seq_len: int) -> tuple[float, ...]:
    """Those of one token's forward pass through each block."""
    return tuple(map(sum, _multiply_adds(model, seq_len)))


def _multiply_adds(model: Architecture, seq_len: int) -> list[tuple[float, float]]:
    """Of each block those of its matrices and of attention."""
    kinds = model.kinds()
    blocks = {kind: model.block_of(kind) for kind in set(kinds)}
    known = {
        kind: (linear_multiply_adds(block, model.hidden_size), mixing_multiply_adds(block.attention, seq_len))
        for kind, block in blocks.items()
    }
    return [known[kind] for kind in kinds]


def block_multiply_adds(block: BlockSpec, hidden_size: int, seq_len: int) -> float:
    """Multiply-adds of one token's forward pass through one block."""
    return linear_multiply_adds(block, hidden_size) + mixing_multiply_adds(block.attention, seq_len)


def linear_multiply_adds(block: BlockSpec, hidden_size: int) -> float:
    """Those of a block's matrices."""
    of_attention = sum(each.inputs * each.outputs for each in projections(block.attention, hidden_size))
    return of_attention + feed_forward_multiply_adds(block.feed_forward, hidden_size)


def linear_weights(block: BlockSpec, hidden_size: int, ep: int = 1) -> float:
    """Numbers of the matrices that a rank reads for them: of all experts that it has, not of a token's own alone."""
    found, mlp = linear_multiply_adds(block, hidden_size), block.feed_forward
    if isinstance(mlp, FeedForwardSpec):
        return found
    others = mlp.settings.num_experts / ep - mlp.settings.top_k
    return found + others * feed_forward_multiply_adds(mlp.expert, hidden_size)


def linear_numbers(block: BlockSpec, hidden_size: int, tp: int) -> int:
    """Numbers of one token that these products are given and put out, on one rank."""
    mlp = block.feed_forward
    of_attention = sum(each.inputs + each.outputs for each in projections(block.attention, hidden_size, tp))
    return of_attention + _mlp_inputs(mlp, hidden_size, tp) + _mlp_results(mlp, hidden_size, tp)


def feed_forward_multiply_adds(mlp: FeedForwardSpec | ExpertsSpec, hidden_size: int) -> float:
    """Those of the layers that a token goes through; of experts the chosen ones, and their router."""
    if isinstance(mlp, FeedForwardSpec):
        return (mlp.num_expanding + 1) * hidden_size * mlp.width
    router = (mlp.settings.num_experts + mlp.settings.shared_gate) * hidden_size
    return router + sum(feed_forward_multiply_adds(each, hidden_size) for each in mlp.active)


def sum_by_layer(model: Architecture, measure: Callable[[Weight], int], *, by_name: bool = False) -> dict[str, int]:
    """Sums over the weights of each layer of the list. Of blocks that are alike one is measured: a model with thousands
    of experts has few kinds of blocks.

    Args:
        by_name: what is measured depends on names, and alike blocks differ in it.
    """
    kinds: list[Hashable] = list(range(model.num_layers)) if by_name else list(model.kinds())
    first = {kind: kinds.index(kind) for kind in kinds}
    sizes: dict[str, int] = {}
    for weight in weight_table(model, blocks=set(first.values())).values():
        sizes[weight.layer] = sizes.get(weight.layer, 0) + measure(weight)
    return sizes | {f"blocks.{index}": sizes[f"blocks.{first[kind]}"] for index, kind in enumerate(kinds)}


def block_activation_bytes(
    block: BlockSpec,
    hidden_size: int,
    *,
    element_bytes: int,
    cut: BlockCut = NOT_CUT,
    recompute: str = "none",
    keeps_fp8_inputs: bool = False,
    has_dropout: bool = False,
    gradients: BlockGradients = ALL_GRADIENTS,
) -> int:
    """Bytes of one token that a block keeps between its forward and its backward pass, on one rank.

    Korthikanti et al. 2022, table 2, for the blocks of this project: RMSNorm computed in fp32, fused projections,
    attention kernels that keep only their inputs, their output and a sum a head.

    Args:
        recompute: none, selective or full; or compiled, which is selective without what is added to the stream alone,
            since no gradient asks for it: what the last product puts out, and of parallel blocks attention's.
        gradients: which weights have one: products of the others keep no input, but for experts', which always do.
        keeps_fp8_inputs: selective recomputation keeps each product's input in FP8 (`layers.kept_products`).
    """
    tp, seen = cut.tp, cut.seen
    attention, mlp = block.attention, block.feed_forward
    a, h = element_bytes, hidden_size
    stream = hidden_size // (tp if cut.sequence_parallel else 1)
    products = projections(attention, h, tp)
    if recompute == "full":
        return a * stream
    if recompute in ("selective", "compiled"):  # the block's input, and the results of its products and of attention
        inputs = sum(each.inputs for each in products if not each.makes_latents) + _mlp_inputs(mlp, h, tp)
        results = _results(attention, products, streams=stream / h, seen=seen) + _mlp_results(mlp, h, tp)
        if recompute == "compiled" and isinstance(mlp, FeedForwardSpec) and not block.norm_after:
            results -= 2 * h if block.is_parallel else h
        shared = 2 * seen_kv_width(attention, tp) if sharing_ranks(attention, tp) > 1 else 0
        kept = a * (stream + results + shared + attention.mixed_width // tp) + softmax_sums(attention, tp)
        return round(kept + (inputs * FP8_BYTES if keeps_fp8_inputs else 0) + _logits_bytes(mlp))

    norm = NORMS[block.norm]
    wide = FP32_BYTES * stream if norm.keeps_wide else 0  # a norm's input in fp32
    normalised = FP32_BYTES if norm.multiplies_wide else a
    if norm.keeps_wide and not gradients.norms:
        normalised = 0  # nothing but a weight's gradient asks for it
    taken = _taken(attention, h, stream) if gradients.entering else 0
    widened = h if gradients.expanding or isinstance(mlp, ExpertsSpec) else 0
    norms = a * (taken + widened)  # what the first products take
    norms += 2 * (normalised * stream + wide) if block.norm_before else 0
    norms += 2 * (normalised * stream + wide) if block.norm_after else 0
    if block.is_parallel and block.norm_before:  # both norms have the same input, and keep it where it is no copy
        norms -= a * stream if not norm.keeps_wide else wide if a == FP32_BYTES else 0
    mixing = mixing_bytes(block, element_bytes=a, tp=tp, streams=stream / h, seen=seen)
    expanded = mlp_bytes(mlp, element_bytes=a, tp=tp) + dispatch_bytes(mlp, h, element_bytes=a)
    if isinstance(mlp, FeedForwardSpec) and not gradients.contracting and ACTIVATIONS[mlp.activation].num_kept > 1:
        expanded -= a * (mlp.width // tp)  # the activation's result, which no other asks for
    dropout = 2 * stream if has_dropout else 0  # masks, a byte an element
    return round(norms + mixing + expanded + dropout)


def _taken(attention: AttentionSpec, hidden_size: int, stream: int) -> int:
    """Numbers that attention's first products take: the stream of all tokens, or for latents of a rank's own."""
    if attention.latent is None or stream == hidden_size:
        return hidden_size
    return stream + (hidden_size if attention.latent.q_lora_rank is None else 0)


def _results(attention: AttentionSpec, products: list[LinearSize], *, streams: float, seen: int) -> float:
    """Numbers that attention's products put out: latents of a rank's own tokens, heads of all that are seen."""
    if attention.latent is None:
        return sum(each.outputs for each in products)
    latents, queries, of_heads, back = (each.outputs for each in products)
    return streams * latents + queries + seen * of_heads + back


def mlp_bytes(mlp: FeedForwardSpec | ExpertsSpec, *, element_bytes: int, tp: int = 1) -> int:
    """Bytes of one token inside an MLP, or the experts that it goes to, on one rank: products, the activation, what the
    row layer multiplies."""
    layers = (mlp,) if isinstance(mlp, FeedForwardSpec) else mlp.active
    return sum(element_bytes * ACTIVATIONS[each.activation].num_kept * (each.width // tp) for each in layers)


def mlp_gradient_bytes(
    mlp: FeedForwardSpec | ExpertsSpec, *, element_bytes: int, tp: int = 1, of_result: int = 1
) -> int:
    """Bytes of one token that the backward pass of an MLP's activation has beside what the MLP keeps: gradients of its
    result and of what it was made from, while the result itself is needed no more.

    Args:
        of_result: how many gradients of the result come, before they are added up.
    """
    layers = (mlp,) if isinstance(mlp, FeedForwardSpec) else mlp.active
    return sum(element_bytes * max(each.num_expanding, of_result) * (each.width // tp) for each in layers)


def dispatch_bytes(mlp: FeedForwardSpec | ExpertsSpec, hidden_size: int, *, element_bytes: int) -> int:
    """Bytes of one token around its experts, beside an MLP's: a copy of it for each, what each puts out, and what the
    router keeps, in whose format the token is too. In its own it is kept for the shared MLP alone."""
    if isinstance(mlp, FeedForwardSpec):
        return 0
    a, h, top_k = element_bytes, hidden_size, mlp.settings.top_k
    found = 2 * a * top_k * h + _router_bytes(mlp) + a * top_k  # weights, as what they are multiplied with
    if a != FP32_BYTES:
        found += FP32_BYTES * h - (a * h if mlp.shared is None else 0)
    return found + (a * (h + 1) if mlp.settings.shared_gate else 0)


def _router_bytes(mlp: ExpertsSpec) -> int:
    """Of one token: scores, once more for each loss beside; of the chosen ones numbers and two orders, and weights
    before and after they are normalised; where experts have biases, the expert of each row for either."""
    moe = mlp.settings
    scores = FP32_BYTES * moe.num_experts * (1 + (moe.aux_loss > 0.0) + (moe.z_loss > 0.0))
    of_choices = 3 * INT64_BYTES + (FP32_BYTES if moe.normalize else 0) + (2 * INT64_BYTES if mlp.expert.bias else 0)
    return scores + of_choices * moe.top_k


def _logits_bytes(mlp: FeedForwardSpec | ExpertsSpec) -> int:
    """Of one token: what the router's product puts out."""
    return 0 if isinstance(mlp, FeedForwardSpec) else FP32_BYTES * mlp.settings.num_experts


def _mlp_inputs(mlp: FeedForwardSpec | ExpertsSpec, hidden_size: int, tp: int) -> int:
    """Numbers of one token that the products of an MLP, or of the experts that it goes to, are given."""
    layers = (mlp,) if isinstance(mlp, FeedForwardSpec) else mlp.active
    return sum(hidden_size + each.width // tp for each in layers)


def _mlp_results(mlp: FeedForwardSpec | ExpertsSpec, hidden_size: int, tp: int) -> int:
    """Numbers that these products put out."""
    layers = (mlp,) if isinstance(mlp, FeedForwardSpec) else mlp.active
    return sum(each.num_expanding * (each.width // tp) + hidden_size for each in layers)


def block_held_bytes(
    block: BlockSpec,
    hidden_size: int,
    *,
    element_bytes: int,
    tp: int = 1,
    gradients: BlockGradients = ALL_GRADIENTS,
) -> int:
    """Bytes of one token that a block holds between the two halves of a split backward pass, on one rank.

    What its weights' gradients are made of: the four products' inputs, and the gradients of their outputs.
    """
    mlp, (*entering, leaving) = block.feed_forward, projections(block.attention, hidden_size, tp)
    held = sum(each.inputs + each.outputs for each in entering) if gradients.entering else 0
    held += leaving.inputs + leaving.outputs if gradients.leaving else 0
    if isinstance(mlp, ExpertsSpec):
        return element_bytes * (held + _mlp_inputs(mlp, hidden_size, tp) + _mlp_results(mlp, hidden_size, tp))
    width = mlp.width // tp
    held += hidden_size + mlp.num_expanding * width if gradients.expanding else 0
    return element_bytes * (held + (width + hidden_size if gradients.contracting else 0))


def block_sent_bytes(
    block: BlockSpec,
    hidden_size: int,
    *,
    element_bytes: int,
    tp: int,
    sequence_parallel: bool = False,
    recompute: str = "none",
    last_chunk: float | None = None,
) -> float:
    """Bytes of one token that a rank sends over tp for a block, forward and backward.

    The stream goes round once behind attention and once behind the MLP, and its gradient once before each: an
    all-reduce, or with sequence parallelism the gather and scatter that do the same (Korthikanti et al. 2022, 4.2.2).
    Recomputation stops before what nothing waits for: the MLP's last message, unless a norm stands behind it.

    Args:
        last_chunk: where an MLP works in chunks, the share of the tokens in its last one. Each is gathered once more,
            and a block that is redone sends the results of all chunks again but the last one's.
    """
    stream = round_trip(element_bytes * hidden_size, tp)
    entering = round_trip(entering_bytes(block.attention, hidden_size, element_bytes=element_bytes), tp)
    squares = 2 * round_trip(FP32_BYTES, tp) if block.attention.qk_norm == "whole" else 0.0  # of queries, and of keys
    sharing = sharing_ranks(block.attention, tp)
    shared_heads = round_trip(element_bytes * 2 * block.attention.head_dim, sharing) / 2  # gathered, or scattered
    both = 3 * stream + entering + 2 * (squares + shared_heads)  # forward and backward
    once = 2 * stream + squares + shared_heads
    if sequence_parallel:
        once += (entering - stream) / 2
    again = 0.0 if last_chunk is None or not sequence_parallel else stream / 2
    if recompute != "full":
        return both + again
    last = 0.0 if block.norm_after else stream / 2 if sequence_parallel else stream
    return both + once + again - last * (1.0 if last_chunk is None else last_chunk)


def dispatch_sent_bytes(
    mlp: FeedForwardSpec | ExpertsSpec, hidden_size: int, *, element_bytes: int, ep: int, recompute: str = "none"
) -> float:
    """Bytes that a rank sends over ep for each token of a block, forward and backward: all experts chosen as often.

    A copy for each of the token's experts goes there, what they put out comes back, and gradients go the same ways.
    Recomputation sends both once more.
    """
    if isinstance(mlp, FeedForwardSpec):
        return 0.0
    ways = 4 if recompute == "none" else 6
    return ways * mlp.settings.top_k * (ep - 1) / ep * element_bytes * hidden_size


def embedding_sent_bytes(hidden_size: int, *, element_bytes: int, tp: int) -> float:
    """The same for the embedding table: the rows that each rank has found, added up."""
    return round_trip(element_bytes * hidden_size, tp)


def head_sent_bytes(hidden_size: int, *, element_bytes: int, tp: int) -> float:
    """The same for the head: the gradient of its input; for softmax a maximum, a sum and the target's logit."""
    return round_trip(element_bytes * hidden_size + 3 * FP32_BYTES, tp)


def round_trip(num_bytes: int, tp: int) -> float:
    """What a rank sends when a ring of them adds up so many bytes."""
    return 2 * (tp - 1) / tp * num_bytes
