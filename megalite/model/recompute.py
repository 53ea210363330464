"""Activation recomputation: what a block keeps for its backward pass.

    none       everything
    selective  results of matrix products, attention and collectives; norms, activations and rotations are redone
               (products that are not torch's: `layers.kept_products`)
    full       the block's input only; the forward pass runs twice (Chen et al. 2016); the input may wait in the host's
               memory (`model.offload`)

Dropout needs no saved random state: its masks are functions of the token (`parallel.random`). What is done again runs
inside the stage's precision context, as it did at first.

Blocks may differ in it: each says what it makes again (`Block.recompute`), and a stage has one way to run them all.

A compiled block multiplies into buffers of its own, which torch's selective checkpointing refuses ("Tensor cached
during selective activation checkpoint has been mutated"). There the compiler does the choosing, by its memory budget.
With a budget of nothing it keeps the block's input and makes the rest again in the graph of the backward pass, but for
what no gradient asks for: the block's last product, a quarter of Llama's, and its message. A block that is several
graphs would keep the input of each, so it is run twice as an eager one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megalite.layers.documents import Documents
from megalite.layers.kept_products import Keeper
from megalite.model.block import Block
from megalite.model.offload import HostStore, run_offloaded

RunBlock = Callable[[torch.nn.Module, Tensor, Documents], Tensor]
Context = Callable[[Documents], AbstractContextManager]

COMPILED_BUDGET = 0.9
"""Share of the activations that a compiled block may keep. From 0.95 down to 0.6 the compiler redoes everything but
products: 0.64 of eager's bytes (0.80 at 1), in no more time, because what is redone is fused into what needs it. At 0.5
it redoes products too."""

VARIANTS = 64
"""Graphs of one block's code: kinds of blocks, lengths of sequences, with gradients and without. Torch gives up after 8
by itself and runs the rest eagerly, and then a block that is recomputed in its graph would keep all that is in it."""

PRODUCTS = ("linear", "mm", "matmul", "einsum", "conv", "product")
"""In the names of operations that multiply matrices, ours too."""


def choose_recompute(kind: str, context: Context = nullcontext, store: HostStore | None = None) -> RunBlock:
    """How to run a block under `train.recompute`; `context` is entered around what runs again, by its documents.

    Args:
        store: for what full recomputation keeps; None to keep it where it is.
    """
    if store is not None:
        assert kind == "full", kind
        return partial(run_offloaded, store, context)
    runs: dict[str, RunBlock] = {
        "none": _run,
        "selective": partial(_run_selective, context),
        "full": partial(_run_full, context),
    }
    return runs[kind]


def run_by_kind(
    blocks: Sequence[Block], context: Context = nullcontext, store: HostStore | None = None
) -> Callable[[Block, Tensor, Documents], Tensor]:
    """How to run blocks, each as it says."""
    runs = {kind: choose_recompute(kind, context, store) for kind in {block.recompute for block in blocks}}

    def run(block: Block, x: Tensor, documents: Documents) -> Tensor:
        return runs[block.recompute](block, x, documents)

    return run


def compile_blocks(
    blocks: Sequence[Block], context: Context = nullcontext, store: HostStore | None = None
) -> Callable[[Block, Tensor, Documents], Tensor]:
    """Compile blocks in place and return how to run them, each as it says.

    The compiler itself decides what to keep, so `none` is as frugal as `selective`. Shapes are compiled in, but for the
    number of documents, which differs from batch to batch. Torch may make `VARIANTS` of any function from then on.
    """
    run_once, run_twice = choose_recompute("none"), choose_recompute("full", context, store)

    def is_redone_in_graph(block: Block) -> bool:
        return block.recompute == "full" and block.is_one_graph and store is None

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    for block in blocks:
        block.compile(dynamic=False, backend=_keep_inputs if is_redone_in_graph(block) else _compile_within_budget)

    def run_compiled(block: Block, x: Tensor, documents: Documents) -> Tensor:
        pieces = () if documents.share is None else (documents.share.pieces,)
        for table in (documents.cu_seqlens, documents.span_table, *pieces):
            torch._dynamo.maybe_mark_dynamic(table, 0)
        run = run_twice if block.recompute == "full" and not is_redone_in_graph(block) else run_once
        return run(block, x, documents)

    return run_compiled


def _compile_within_budget(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return _compile(graph, inputs, _budget_of(graph))


def _keep_inputs(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return _compile(graph, inputs, 0.0)


def _compile(graph: torch.fx.GraphModule, inputs: list[Any], budget: float) -> Callable[..., Any]:
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(activation_memory_budget=budget):
        compiled = compile_fx(graph, inputs)
    assert callable(compiled), "files are made only for those who ask"
    return compiled


def _budget_of(graph: torch.fx.GraphModule) -> float:
    """Share of its activations that a graph keeps.

    Where a library's products end graphs, as Transformer Engine's do, attention stands in one without any. There a
    budget leaves nothing to redo but attention, and it ran twice (3 % of a step on a H200).
    """
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    calls = ("call_function", "call_method")
    names = {str(node.target) for part in parts for node in part.graph.nodes if node.op in calls}
    attention = {name for name in names if "attention" in name or "attn" in name}
    multiplies = any(word in name for name in names - attention for word in PRODUCTS)
    return COMPILED_BUDGET if multiplies or not attention else 1.0


def _run(block: torch.nn.Module, x: Tensor, documents: Documents) -> Tensor:
    return block(x, documents)


def _run_full(context: Context, block: torch.nn.Module, x: Tensor, documents: Documents) -> Tensor:
    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), context(documents)

    return checkpoint(block, x, documents, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _run_selective(context: Context, block: torch.nn.Module, x: Tensor, documents: Documents) -> Tensor:
    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        first, again = create_selective_checkpoint_contexts(_keep_products)
        keeper = Keeper()
        return _all(first, keeper.keeping()), _all(context(documents), again, keeper.handing_out())

    return checkpoint(block, x, documents, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


@contextmanager
def _all(*contexts: AbstractContextManager) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


_KEPT_NAMESPACES = ("_c10d_functional", "megalite_gloo")
"""Our collectives. Not `c10d`: those are in place, so a kept result would be wrong."""

_KEPT_WORDS = ("mm", "product", "attention", "varlen_attn")


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is dear to make: products (mm, addmm, bmm, our own op's), attention kernels, and our collectives.

    Not what is added to something else's result, as adapters' products are: they are narrow, and that is kept.
    """
    namespace, _, name = op.name().partition("::")
    dear = namespace in _KEPT_NAMESPACES or any(word in name for word in _KEPT_WORDS)
    return CheckpointPolicy.MUST_SAVE if dear and not op._schema.is_mutable else CheckpointPolicy.PREFER_RECOMPUTE
