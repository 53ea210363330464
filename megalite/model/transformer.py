"""The transformer as one list of layers, and the stage: what one rank holds of that list.

    embedding, blocks.0, blocks.1, ..., blocks.n-1, final_norm, head, mtp.0, ...

Without a pipeline the only stage is the whole list; with one, a stage is a run of it, or several: its *chunks*.
Parameter names are those of `model.weights`, whatever the stage: block 5 is `blocks.5` on every layout.

Legend: t tokens of the micro-batch's stream, h hidden size; with sequence parallelism the stream between layers is
`[t/tp, h]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from megalite.architecture.architecture import Architecture
from megalite.architecture.mup import embedding_scale, output_scale
from megalite.architecture.weights import state_table
from megalite.layers.cross_entropy import Head, HeadSpec
from megalite.layers.documents import Ahead, Documents, Targets
from megalite.layers.embedding import VocabParallelEmbedding
from megalite.layers.experts import Experts
from megalite.layers.gemm import Gemm
from megalite.layers.linear import ReplicatedLinear
from megalite.layers.low_rank import LowRank
from megalite.layers.overlapped import overlap
from megalite.layers.precision import ONE_FORMAT, linear_layers
from megalite.layers.rope import Frequencies, frequencies, rotation
from megalite.layers.routers import Routers
from megalite.layers.scale import scaled_by
from megalite.layers.weight_gradients import SummedLinear, TakeGradient
from megalite.model.block import Block, Dropout
from megalite.model.initialize import FreshWeights, WeightSource, fill, mark
from megalite.model.lora import add_adapters
from megalite.model.offload import HostStore
from megalite.model.prediction import Further, PredictionLayer
from megalite.model.recompute import compile_blocks, run_by_kind
from megalite.model.scales import add_scales
from megalite.model.spec import StageSpec
from megalite.parallel.axes import TensorParallel


class Stage(nn.Module):
    """Some runs of the model's layers.

    The first chunk takes tokens, the others a hidden stream; the last one ends in the final norm and has the head.
    Layers that predict further stand behind it, with an embedding: a copy where the model's is on another stage. A tied
    head shares the embedding's parameter when there is one on this stage, and is a copy of it otherwise. The pipeline
    engine keeps copies equal.

    Args:
        weights: where its weights come from; None draws them from `spec.seed`, equal in every layout.
        is_filled: False leaves parameters unset, memory that nobody has touched, for who divides them first.
    """

    def __init__(self, spec: StageSpec, weights: WeightSource | None = None, *, is_filled: bool = True):
        super().__init__()
        model, tp = spec.model, spec.tp
        self.spec = spec
        shared: TensorParallel = {"tp": tp, "sequence_parallel": spec.sequence_parallel}
        self.embedding: VocabParallelEmbedding | None = None
        if spec.looks_up:
            num_positions = model.max_positions if model.positions == "learned" else None
            self.embedding = VocabParallelEmbedding(
                model.vocab_size, model.hidden_size, num_positions=num_positions, **shared
            )
            self.embedding_dropout = Dropout(model.dropout, seed=spec.seed, site="embedding", **shared)
        self.blocks = nn.ModuleDict()
        for chunk in spec.chunks:
            for index in range(*chunk.blocks):
                self.blocks[str(index)] = Block(spec, index)
        if model.lora is not None:
            add_adapters(self.blocks, model, model.lora)
        if model.weight_scales is not None:
            add_scales(self.blocks, model, model.weight_scales)
        self.mtp = nn.ModuleDict()
        self.final_norm: nn.Module | None = None
        self.head: Head | None = None
        if spec.has_head:
            self.final_norm = spec.parts.norm(model.hidden_size, model.norm_eps, **shared)
            tied_to = self.embedding.weight if model.tie_embeddings and self.embedding is not None else None
            self.head = Head(
                model.vocab_size,
                model.hidden_size,
                tied_to=tied_to,
                gemm=spec.parts.gemm,
                spec=HeadSpec(spec.parts.loss_chunk_tokens, model.z_loss, model.logit_soft_cap, spec.parts.token_loss),
                **shared,
            )
            for depth in range(model.num_predictions):
                self.mtp[str(depth)] = PredictionLayer(spec, depth)
        self.further = Further(self._prediction_layers(), 0.0 if model.mtp is None else model.mtp.loss_weight)
        self.scale_embedding, self.scale_output = scaled_by(embedding_scale(model)), scaled_by(output_scale(model))
        if spec.parts.take_gradient is not None:
            self._hand_over_gradients(spec.parts.take_gradient)
        self.precision = spec.parts.precision
        self.precision.attach(self.blocks)
        self.routers = Routers({"blocks": self.blocks, "mtp": self.mtp})
        self._kept = HostStore() if spec.offload else None
        self.run_block = run_by_kind(self.all_blocks(), self.precision.context, self._kept)
        self.before_layer: Callable[[str], None] = _go_on
        """Told the name of each layer that comes next, whose weights must be there when it returns."""
        self._frequencies: dict[str, Frequencies] = {}
        self.rotate_as(model)
        source = FreshWeights(model, spec.seed) if weights is None else weights
        if is_filled:
            fill(self, source)
        else:
            mark(self)
        for name, row in state_table(model).items():
            if (router := name.removesuffix(".balance")) in self.routers.by_name:
                self.routers.begin_with(router, source.read(row, row.local(1, 0)).clone())

    def forward(self, x: Tensor, documents: Documents, targets: Targets | None = None, chunk: int = 0) -> Tensor:
        """Run a chunk of the stage.

        Args:
            x: tokens `[t]` in the first chunk, the stream `[t, h]` in the others.
            documents: borders and positions of the stream.
            targets: in the last chunk; with them the result is the loss.
            chunk: which of `spec.chunks`.

        Returns:
            The stream `[t, h]`, or the fp32 scalar loss (see `Head.forward`) when targets are given.
        """
        for name, rates in self._frequencies.items():
            if getattr(documents, name) is None:
                rates = self._frequencies[name] = rates.to(documents.positions.device)
                reach = documents.reach_of_tokens if rates.long is not None else None
                setattr(documents, name, rotation(documents.positions, rates, reach))
        if targets is not None and documents.loss_weights is None:
            documents.loss_weights = targets.weights
        run = self.spec.chunks[chunk]
        if self._kept is not None:
            self._kept.begin_pass()
        if run.is_first and self.embedding is not None:
            self.before_layer("embedding")
            x = self.embedding_dropout(self.scale_embedding(self.embedding(x, documents)), documents)
        with self.precision.context(documents):
            for index in range(*run.blocks):
                self.before_layer(f"blocks.{index}")
                x = self.run_block(cast("Block", self.blocks[str(index)]), x, documents)
        if run.is_last and self.final_norm is not None:
            self.before_layer("final_norm")
            x = self.scale_output(self.final_norm(x))
        if targets is None:
            return x
        loss = self._own_head()(x, targets)
        return self._look_further(loss, x, documents, targets) if self.training and targets.ahead else loss

    def logits(self, tokens: Tensor, documents: Documents, last: int | None = None) -> Tensor:
        """This rank's true columns of the logits, `[t, v]`, for evaluation on a whole model.

        Args:
            last: of this many tokens at the end only; None for all.
        """
        stream = self(tokens, documents)
        return self._own_head().logits(stream if last is None else stream[-last:])

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Within it the stage computes what it would without its low-rank adapters."""
        adapters = [module for module in self.modules() if isinstance(module, LowRank)]
        for each in adapters:
            each.is_on = False
        try:
            yield
        finally:
            for each in adapters:
                each.is_on = True

    def rotate_as(self, model: Architecture) -> None:
        """Turn queries and keys from here on as a model of the same shape does."""
        self._frequencies = {}
        if model.positions == "rope":
            self._frequencies["rotation"] = frequencies(model.rope, model.turned_dim)
        if model.positions == "rope" and model.sliding_rope is not None:
            self._frequencies["sliding_rotation"] = frequencies(model.sliding_rope, model.turned_dim)

    def all_blocks(self) -> list[Block]:
        """The blocks of this stage, those that predict further ahead among them."""
        return [*self.blocks_by_index().values(), *(layer.block for layer in self._prediction_layers())]

    def _prediction_layers(self) -> list[PredictionLayer]:
        return [each for each in self.mtp.values() if isinstance(each, PredictionLayer)]

    def blocks_by_index(self) -> dict[int, Block]:
        """The blocks of this stage, by their place in the model."""
        return {int(name): block for name, block in self.blocks.items() if isinstance(block, Block)}

    def _hand_over_gradients(self, take: TakeGradient) -> None:
        """Let somebody else have the gradients of the weights that products make."""
        for block in self.all_blocks():
            is_redone = block.recompute == "full" or self.spec.parts.mlp_chunk_tokens is not None
            for _, layer in linear_layers(block):
                gemm, has_more = cast("Gemm", layer.gemm), layer.lora is not None or layer.learned is not None
                if self.spec.parts.precision is ONE_FORMAT and not has_more:
                    layer.gemm = overlap(layer, gemm, take, is_redone=is_redone, is_symmetric=self.spec.async_tp)
                else:
                    layer.gemm = SummedLinear(layer.weight, gemm, take, is_redone=is_redone)
        for module in (*self.blocks.modules(), *self.mtp.modules()):
            if isinstance(module, Experts):
                module.hand_over_gradients(take)
            if isinstance(module, ReplicatedLinear) and not module.makes_partial_gradients:
                module.gemm = SummedLinear(module.weight, cast("Gemm", module.gemm), take)
        for table in (self.embedding, self.head):
            if table is not None:
                table.take_gradient = take

    def _look_further(self, loss: Tensor, stream: Tensor, documents: Documents, targets: Targets) -> Tensor:
        """The loss, beside which further predictions are trained."""
        embedding = self.embedding
        assert embedding is not None, "it is where further predictions are"

        def run(layer: PredictionLayer, stream: Tensor, ahead: Ahead) -> Tensor:
            self.before_layer(f"mtp.{layer.depth}")
            embedded = self.scale_embedding(embedding(ahead.tokens, documents))
            return self.scale_output(layer(stream, embedded, documents.counting(ahead.weights), self.run_block))

        self.before_layer("embedding")
        return self.further.beside(loss, stream, targets.ahead, run, self._loss_of)

    def _loss_of(self, stream: Tensor, ahead: Ahead) -> Tensor:
        return self._own_head()(stream, Targets(ahead.labels, ahead.weights))

    def _own_head(self) -> Head:
        assert self.head is not None, "only the last stage has a head"
        self.before_layer("head")
        return self.head

    def compile_blocks(self) -> None:
        """Compile each block: one graph that all share."""
        self.run_block = compile_blocks(self.all_blocks(), self.precision.context, self._kept)


def _go_on(layer: str) -> None:
    """All weights are there."""


def documents_of(sequences: Tensor) -> Documents:
    """Documents of a batch of whole sequences, one document each: `[b, s]` tokens -> a stream of b*s, which is
    `sequences.flatten()`.

    For evaluation and tests; training takes its documents from the data.
    """
    num, length = sequences.shape
    positions = torch.arange(length, device=sequences.device).repeat(num)
    borders = torch.arange(0, (num + 1) * length, length, dtype=torch.int32, device=sequences.device)
    keys = torch.arange(num * length, device=sequences.device)
    return Documents(positions, borders, length, keys)
