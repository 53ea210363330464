"""The table of weights: one row for every tensor of a model, read by init, checkpoint, export and tests.

A row is a *canonical* weight: unfused, whole, without vocabulary padding. What a rank really holds differs in two
ways, both told by the table:

    canonical                 held by tp rank r, parameter `blocks.0.attention.qkv.weight`
    q [heads x d, hidden]     +------------------+
    k [kv x d, hidden]   ->   | q, r-th part     |   `cut`: the dim that tensor parallelism divides
    v [kv x d, hidden]        | k, r-th part     |   `parameter`: rows with the same one are fused, stacked on
                              | v, r-th part     |                dim 0 in the order of the table
                              +------------------+

So a projection is cut per head and per half before it is fused, and any tp is right. Each expert of a sparse block has
rows of its own; those of the experts that a rank holds are fused the same way. Pure arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

from megalite.architecture.architecture import Architecture, BlockSpec, ExpertsSpec, FeedForwardSpec
from megalite.architecture.norms import NORMS

Init = Literal["normal", "residual", "adapter", "scale", "ones", "zeros"]

VOCAB_MULTIPLE = 64
"""Each tensor-parallel rank holds a multiple of this many vocabulary rows: whole tiles for the matrix units."""


@dataclass(frozen=True)
class Rectangle:
    """A block of a canonical weight: `start` offsets and `shape`, one number a dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True)
class Weight:
    """One canonical weight."""

    name: str
    """Canonical name, `blocks.3.attention.q.weight`."""
    shape: tuple[int, ...]
    """Whole and true: not cut, not padded."""
    layer: str
    """The layer of the model's list that holds it: embedding, blocks.3, final_norm, head, mtp.0."""
    parameter: str
    """Full name of the module parameter that holds it, alone or fused with others."""
    cut: int | None = None
    """The dim divided over tp; None when every tp rank holds the whole."""
    init: Init = "normal"
    is_vocab: bool = False
    """Dim 0 is the vocabulary: padded so that every rank holds equally many rows."""
    decay: bool = True
    """Whether weight decay applies (matrices, not norms and biases)."""
    expert: tuple[int, int] | None = None
    """Which expert it is of, and of how many: held by one of the expert-parallel ranks, the first having the first
    experts. None for what all of them hold."""
    state: str | None = None
    """What it is called in checkpoints, where it is no weight that is trained; see `state_table`."""

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies, or is a table: two dims, and no scales."""
        return len(self.shape) == 2 and self.init != "scale"

    @property
    def is_inner(self) -> bool:
        """Whether it is inside of the network, not a table, the head or the norm before it."""
        return self.layer.startswith(("blocks.", "mtp."))

    def is_held(self, ep: int, ep_rank: int) -> bool:
        """Whether an expert-parallel rank holds it."""
        if self.expert is None:
            return True
        index, count = self.expert
        return index * ep // count == ep_rank

    def local(self, tp: int, tp_rank: int) -> Rectangle:
        """The part of this weight that a tensor-parallel rank holds; it may be empty for a padded vocabulary."""
        start, shape = [0] * len(self.shape), list(self.shape)
        if self.cut is not None:
            size = self.shape[self.cut]
            chunk = vocab_rows_per_rank(size, tp) if self.is_vocab else size // tp
            begin = min(chunk * tp_rank, size)
            start[self.cut] = begin
            shape[self.cut] = min(chunk, size - begin)
        return Rectangle(tuple(start), tuple(shape))

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of the part a rank allocates: like `local`, vocabulary padding included."""
        shape = list(self.shape)
        if self.cut is not None:
            size = self.shape[self.cut]
            shape[self.cut] = vocab_rows_per_rank(size, tp) if self.is_vocab else size // tp
        return tuple(shape)


def weight_table(model: Architecture, blocks: Container[int] | None = None) -> dict[str, Weight]:
    """All weights of a filled model by canonical name, in the order of the model's layers.

    A tied head has no row: the embedding's row serves both.

    Args:
        blocks: without those of other blocks than these; None for all.
    """
    rows = [*_embedding(model)]
    for index, block in enumerate(model.blocks):
        if blocks is None or index in blocks:
            rows += _with_scales(_with_adapters(_block(model, block, f"blocks.{index}"), model), model, index)
    rows += _norm(model.norm, model.hidden_size, "final_norm", "final_norm")
    if not model.tie_embeddings:
        vocab = (model.vocab_size, model.hidden_size)
        rows.append(Weight("head.weight", vocab, "head", "head.weight", cut=0, is_vocab=True))
    for depth in range(model.num_predictions):
        rows += _prediction(model, f"mtp.{depth}")
    return {row.name: row for row in rows}


ROUTER_BIAS = "router_bias"
"""The kind of tensors in checkpoints that are biases of routers."""


def state_table(model: Architecture) -> dict[str, Weight]:
    """What a filled model computes with besides weights, and training moves by other means: the biases by which routers
    choose (`model.moe.bias_rate`). fp32, whole on every rank."""
    if model.moe is None or model.moe.bias_rate is None:
        return {}
    rows, shape = list[Weight](), (model.moe.num_experts,)
    blocks = {f"blocks.{index}": f"blocks.{index}" for index, is_sparse in enumerate(model.sparse_blocks) if is_sparse}
    if model.sparse_blocks[-1]:
        blocks |= {f"mtp.{depth}.block": f"mtp.{depth}" for depth in range(model.num_predictions)}
    for block, layer in blocks.items():
        router = f"{block}.mlp.router"
        rows.append(
            Weight(f"{router}.balance", shape, layer, "", init="zeros", decay=False, state=f"{ROUTER_BIAS}/{router}")
        )
    return {row.name: row for row in rows}


def stored_table(model: Architecture) -> dict[str, Weight]:
    """All that a model is, where it is handed on: its weights, and what else it computes with."""
    return {**weight_table(model), **state_table(model)}


def is_of_model(tensor: str) -> bool:
    """Whether a tensor of a checkpoint is one that the model computes with: its weights, and the biases by which its
    routers choose; the rest is what training goes on from."""
    return tensor.split("/", 1)[0] in ("weight", ROUTER_BIAS)


def vocab_rows_per_rank(vocab_size: int, tp: int) -> int:
    """Rows of the padded vocabulary that one tensor-parallel rank holds."""
    return -(-vocab_size // (tp * VOCAB_MULTIPLE)) * VOCAB_MULTIPLE


def by_parameter(table: dict[str, Weight]) -> dict[str, list[Weight]]:
    """Group the rows by the module parameter that holds them, in fusing order."""
    groups: dict[str, list[Weight]] = {}
    for row in table.values():
        groups.setdefault(row.parameter, []).append(row)
    return groups


def norm_names(block: BlockSpec) -> list[str]:
    """The norms of a block, in the order in which the stream meets them."""
    before = ["attention_norm", "mlp_norm"] if block.norm_before else []
    after = ["attention_out_norm", "mlp_out_norm"] if block.norm_after else []
    return sorted(before + after, key=("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm").index)


def _embedding(model: Architecture) -> list[Weight]:
    hidden = model.hidden_size
    name = "embedding.weight"
    rows = [Weight(name, (model.vocab_size, hidden), "embedding", name, cut=0, is_vocab=True)]
    if model.positions == "learned":
        name = "embedding.positions"
        rows.append(Weight(name, (model.max_positions, hidden), "embedding", name))
    return rows


def _norm(kind: str, size: int, layer: str, prefix: str) -> list[Weight]:
    shape = (size,)
    norm = NORMS[kind]
    rows = [Weight(f"{prefix}.weight", shape, layer, f"{prefix}.weight", init=norm.init, decay=False)]
    if norm.has_bias:
        rows.append(Weight(f"{prefix}.bias", shape, layer, f"{prefix}.bias", init="zeros", decay=False))
    return rows


LORA_A, LORA_B = "lora_a", "lora_b"
"""Last parts of the names of adapters' weights: `blocks.3.attention.q.lora_a [rank, in]`, `lora_b [out, rank]`."""


def is_adapter(name: str) -> bool:
    """Whether a canonical weight is one of a low-rank adapter."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def adapters_of(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    """A and B beside a linear layer's weight. Each is cut as the side of the weight that it shares: A by inputs, B by
    outputs; what shares no cut side is whole on every tensor-parallel rank."""
    (rows, columns), stem = weight.shape, weight.name.removesuffix("weight")
    parameter = weight.parameter.removesuffix("weight")
    a = Weight(f"{stem}{LORA_A}", (rank, columns), weight.layer, f"{parameter}lora.a", init="adapter")
    b = Weight(f"{stem}{LORA_B}", (rows, rank), weight.layer, f"{parameter}lora.b", init="zeros")
    return (replace(a, cut=1), b) if weight.cut == 1 else (a, replace(b, cut=weight.cut))


def _with_adapters(rows: list[Weight], model: Architecture) -> list[Weight]:
    """A block's rows, each weight that is a target followed by its adapter."""
    lora, found = model.lora, list[Weight]()
    for row in rows:
        found.append(row)
        *_, part, kind = row.name.split(".")
        if lora is not None and kind == "weight" and part in lora.found_targets and row.expert is None:
            found += adapters_of(row, lora.rank)
    return found


SCALE = "weight_scale"
"""Last part of the name of scales that are trained: `blocks.3.attention.q.weight_scale [out, groups]`."""

CHOOSING = (".mlp.router.", ".mlp.shared_gate.")
"""Matrices of a block that are no linear layer's: they choose, and are a thousandth of its size."""


def is_linear(weight: Weight) -> bool:
    """Whether a weight is the matrix `[out, in]` of a linear layer or an expert inside the blocks."""
    return weight.layer.startswith("blocks.") and weight.is_matrix and not any(each in weight.name for each in CHOOSING)


def scale_of(weight: Weight, group_size: int | None) -> Weight:
    """The scales beside a linear layer's weight, one for each group of a row. They are cut as it is; where a row has
    one scale and lies on several ranks, it is whole on each."""
    (rows, columns), stem = weight.shape, weight.name.removesuffix("weight")
    return replace(
        weight,
        name=f"{stem}{SCALE}",
        shape=(rows, columns // (group_size or columns)),
        parameter=f"{weight.parameter.removesuffix('weight')}learned.scale",
        cut=None if weight.cut == 1 and group_size is None else weight.cut,
        init="scale",
        decay=False,
    )


def _with_scales(rows: list[Weight], model: Architecture, block: int) -> list[Weight]:
    """A block's rows, each weight that is rounded with trained scales followed by these."""
    scales, found = model.weight_scales, list[Weight]()
    if scales is None or not scales.first_block <= block <= scales.last_block:
        return rows
    for row in rows:
        found += [row, scale_of(row, scales.group_size)] if is_linear(row) else [row]
    return found


def _linear(
    layer: str, name: str, fused: str, shape: tuple[int, int], *, cut: int | None, bias: bool, init: Init = "normal"
) -> list[Weight]:
    """Rows of one projection. The bias follows the output dim: cut with it, or whole beside an input-cut weight."""
    rows = [Weight(f"{layer}.{name}.weight", shape, layer, f"{layer}.{fused}.weight", cut=cut, init=init)]
    if bias:
        bias_cut = 0 if cut == 0 else None
        bias_name, parameter = f"{layer}.{name}.bias", f"{layer}.{fused}.bias"
        rows.append(Weight(bias_name, shape[:1], layer, parameter, cut=bias_cut, init="zeros", decay=False))
    return rows


def _block(model: Architecture, block: BlockSpec, layer: str) -> list[Weight]:
    hidden, attention = model.hidden_size, block.attention
    residual: Init = "residual" if model.init_depth_scaling else "normal"

    norms = {name: _norm(block.norm, hidden, layer, f"{layer}.{name}") for name in norm_names(block)}
    rows = norms.pop("attention_norm", [])
    rows += _heads(hidden, block, layer) if attention.latent is None else _latent_heads(hidden, block, layer)
    if attention.sinks:
        name = f"{layer}.attention.sinks"
        rows.append(Weight(name, (attention.num_heads,), layer, name, cut=0, decay=False))
    shape = (hidden, attention.mixed_width)
    rows += _linear(layer, "attention.o", "attention.o", shape, cut=1, bias=attention.output_bias, init=residual)

    for name in [name for name in norms if name != "mlp_out_norm"]:
        rows += norms.pop(name)
    if isinstance(block.feed_forward, ExpertsSpec):
        rows += _experts(hidden, block.feed_forward, layer, residual)
    else:
        rows += _mlp(hidden, block.feed_forward, layer, "mlp", residual)
    return rows + norms.pop("mlp_out_norm", [])


def _heads(hidden: int, block: BlockSpec, layer: str) -> list[Weight]:
    """Queries, keys and values of the stream."""
    attention, rows = block.attention, list[Weight]()
    q, kv = attention.q_width, attention.kv_width
    for part, size in (("q", q), ("k", kv), ("v", kv)):
        rows += _linear(layer, f"attention.{part}", "attention.qkv", (size, hidden), cut=0, bias=attention.qkv_bias)
    if attention.qk_norm:
        is_whole, init = attention.qk_norm == "whole", NORMS[NORMS[block.norm].of_heads].init
        for part, size in (("q_norm", q), ("k_norm", kv)):
            name, size = f"{layer}.attention.{part}.weight", size if is_whole else attention.head_dim
            rows.append(Weight(name, (size,), layer, name, cut=0 if is_whole else None, init=init, decay=False))
    return rows


def _latent_heads(hidden: int, block: BlockSpec, layer: str) -> list[Weight]:
    """Those of multi-head latent attention. What leads to latents is whole on every tensor-parallel rank, what leads
    from them to heads is cut."""
    attention, mla = block.attention, block.attention.latent
    assert mla is not None
    rows = list[Weight]()
    if mla.q_lora_rank is None:
        rows += _linear(layer, "attention.q", "attention.q", (attention.q_width, hidden), cut=0, bias=False)
    else:
        rows += _linear(layer, "attention.q_a", "attention.a", (mla.q_lora_rank, hidden), cut=None, bias=False)
    for part, size in (("kv_a", mla.kv_lora_rank), ("k_rope", mla.qk_rope_head_dim)):
        rows += _linear(layer, f"attention.{part}", "attention.a", (size, hidden), cut=None, bias=False)
    of_heads = NORMS[block.norm].of_heads
    if mla.q_lora_rank is not None:
        rows += _norm(of_heads, mla.q_lora_rank, layer, f"{layer}.attention.q_a_norm")
        shape = (attention.q_width, mla.q_lora_rank)
        rows += _linear(layer, "attention.q_b", "attention.q_b", shape, cut=0, bias=False)
    rows += _norm(of_heads, mla.kv_lora_rank, layer, f"{layer}.attention.kv_a_norm")
    for part, width in (("k_b", mla.qk_nope_head_dim), ("v_b", mla.v_head_dim)):
        shape = (attention.num_heads * width, mla.kv_lora_rank)
        rows += _linear(layer, f"attention.{part}", "attention.kv_b", shape, cut=0, bias=False)
    return rows


def _prediction(model: Architecture, layer: str) -> list[Weight]:
    """A layer that predicts a token further ahead."""
    hidden = model.hidden_size
    rows = [
        row for name in ("embedding_norm", "hidden_norm") for row in _norm(model.norm, hidden, layer, f"{layer}.{name}")
    ]
    rows += _linear(layer, "projection", "projection", (hidden, 2 * hidden), cut=None, bias=False)
    rows += [replace(row, layer=layer) for row in _block(model, model.block(model.num_layers), f"{layer}.block")]
    return rows + _norm(model.norm, hidden, layer, f"{layer}.norm")


def _mlp(hidden: int, mlp: FeedForwardSpec, layer: str, name: str, residual: Init) -> list[Weight]:
    fused, rows = f"{name}.gate_up" if mlp.is_gated else f"{name}.up", list[Weight]()
    for part in ("gate", "up") if mlp.is_gated else ("up",):
        rows += _linear(layer, f"{name}.{part}", fused, (mlp.width, hidden), cut=0, bias=mlp.bias)
    return rows + _linear(
        layer, f"{name}.down", f"{name}.down", (hidden, mlp.width), cut=1, bias=mlp.bias, init=residual
    )


def _experts(hidden: int, experts: ExpertsSpec, layer: str, residual: Init) -> list[Weight]:
    """The router, each expert by itself, and what all tokens go through."""
    count, mlp = experts.settings.num_experts, experts.expert
    router = f"{layer}.mlp.router"
    rows = [Weight(f"{router}.weight", (count, hidden), layer, f"{router}.weight")]
    if experts.settings.logit_bias:
        rows.append(Weight(f"{router}.bias", (count,), layer, f"{router}.logit_bias", init="zeros", decay=False))
    for index in range(count):
        for row in _mlp(hidden, mlp, layer, f"mlp.experts.{index}", residual):
            *_, part, kind = row.name.split(".")
            stacked = "down" if part == "down" else "gate_up" if mlp.is_gated else "up"
            parameter = f"{layer}.mlp.experts.{stacked}{'_bias' if kind == 'bias' else ''}"
            rows.append(replace(row, parameter=parameter, expert=(index, count)))
    if experts.shared is not None:
        rows += _mlp(hidden, experts.shared, layer, "mlp.shared", residual)
    if experts.settings.shared_gate:
        name = f"{layer}.mlp.shared_gate.weight"
        rows.append(Weight(name, (1, hidden), layer, name))
    return rows
