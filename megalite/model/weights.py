"""The table of weights: one row for every tensor of a model, read by init, checkpoint, export and tests.

A row is a *canonical* weight: unfused, whole, without vocabulary padding. What a rank really holds differs in two
ways, both told by the table:

    canonical                 held by tp rank r, parameter `blocks.0.attention.qkv.weight`
    q [heads x d, hidden]     +------------------+
    k [kv x d, hidden]   ->   | q, r-th part     |   `cut`: the dim that tensor parallelism divides
    v [kv x d, hidden]        | k, r-th part     |   `parameter`: rows with the same one are fused, stacked on
                              | v, r-th part     |                dim 0 in the order of the table
                              +------------------+

So a projection is cut per head and per half before it is fused, and any tp is right. Pure arithmetic, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalite.config.plan import vocab_rows_per_rank
from megalite.config.schema import ModelConfig

Init = Literal["normal", "residual", "ones", "zeros"]


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
    """The layer of the model's list that holds it: embedding, blocks.3, final_norm, head."""
    parameter: str
    """Full name of the module parameter that holds it, alone or fused with others."""
    cut: int | None = None
    """The dim divided over tp; None when every tp rank holds the whole."""
    init: Init = "normal"
    is_vocab: bool = False
    """Dim 0 is the vocabulary: padded so that every rank holds equally many rows."""
    decay: bool = True
    """Whether weight decay applies (matrices, not norms and biases)."""

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


def weight_table(model: ModelConfig) -> dict[str, Weight]:
    """All weights of a filled model by canonical name, in the order of the model's layers.

    A tied head has no row: the embedding's row serves both.
    """
    rows = [*_embedding(model)]
    for index in range(model.num_layers):
        rows += _block(model, f"blocks.{index}")
    rows += _norm(model, "final_norm", "final_norm")
    if not model.tie_embeddings:
        vocab = (model.vocab_size, model.hidden_size)
        rows.append(Weight("head.weight", vocab, "head", "head.weight", cut=0, is_vocab=True))
    return {row.name: row for row in rows}


def by_parameter(table: dict[str, Weight]) -> dict[str, list[Weight]]:
    """Group the rows by the module parameter that holds them, in fusing order."""
    groups: dict[str, list[Weight]] = {}
    for row in table.values():
        groups.setdefault(row.parameter, []).append(row)
    return groups


def _embedding(model: ModelConfig) -> list[Weight]:
    hidden = model.hidden_size
    name = "embedding.weight"
    rows = [Weight(name, (model.vocab_size, hidden), "embedding", name, cut=0, is_vocab=True)]
    if model.positions == "learned":
        name = "embedding.positions"
        rows.append(Weight(name, (model.max_positions, hidden), "embedding", name))
    return rows


def _norm(model: ModelConfig, layer: str, prefix: str) -> list[Weight]:
    shape = (model.hidden_size,)
    rows = [Weight(f"{prefix}.weight", shape, layer, f"{prefix}.weight", init="ones", decay=False)]
    if model.norm == "layernorm":
        rows.append(Weight(f"{prefix}.bias", shape, layer, f"{prefix}.bias", init="zeros", decay=False))
    return rows


def _linear(
    layer: str, name: str, fused: str, shape: tuple[int, int], *, cut: int, bias: bool, init: Init = "normal"
) -> list[Weight]:
    """Rows of one projection. The bias follows the output dim: cut with it, or whole beside an input-cut weight."""
    rows = [Weight(f"{layer}.{name}.weight", shape, layer, f"{layer}.{fused}.weight", cut=cut, init=init)]
    if bias:
        bias_cut = 0 if cut == 0 else None
        bias_name, parameter = f"{layer}.{name}.bias", f"{layer}.{fused}.bias"
        rows.append(Weight(bias_name, shape[:1], layer, parameter, cut=bias_cut, init="zeros", decay=False))
    return rows


def _block(model: ModelConfig, layer: str) -> list[Weight]:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    residual: Init = "residual" if model.init_depth_scaling else "normal"

    rows = _norm(model, layer, f"{layer}.attention_norm")
    for part, size in (("q", q), ("k", kv), ("v", kv)):
        rows += _linear(layer, f"attention.{part}", "attention.qkv", (size, hidden), cut=0, bias=model.has_qkv_bias)
    if model.qk_norm:
        for part in ("q_norm", "k_norm"):
            name = f"{layer}.attention.{part}.weight"
            rows.append(Weight(name, (model.head_dim,), layer, name, init="ones", decay=False))
    output = {"cut": 1, "bias": model.has_output_bias, "init": residual}
    rows += _linear(layer, "attention.o", "attention.o", (hidden, q), **output)

    rows += _norm(model, layer, f"{layer}.mlp_norm")
    fused = "mlp.gate_up" if model.activation == "swiglu" else "mlp.up"
    for part in ("gate", "up") if model.activation == "swiglu" else ("up",):
        rows += _linear(layer, f"mlp.{part}", fused, (ffn, hidden), cut=0, bias=model.has_mlp_bias)
    rows += _linear(layer, "mlp.down", "mlp.down", (hidden, ffn), cut=1, bias=model.has_mlp_bias, init=residual)
    return rows
