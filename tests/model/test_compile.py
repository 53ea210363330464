"""Compiled blocks compute what eager ones do, under every kind of recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megalite.layers import attention_blocks
from megalite.layers.rope import rotate
from megalite.layers.weight_gradients import SummedLinear
from megalite.model.recompute import COMPILED_BUDGET, _budget_of, _compile_within_budget
from megalite.parallel.axes import SINGLE
from tests.kit.graphs import make_no_kernels
from tests.kit.spawn import run_ranks
from tests.layers.parity import difference
from tests.model.stages import LATENTS, gradients, make_batch, make_stage, run_stage, tensor_axis, tiny_model

TOLERANCE = 1e-5
"""fp32, relative to the largest entry where that exceeds 1: fused kernels add up in another order."""

SETTINGS = {"num_kv_heads": 2, "qk_norm": True, "dropout": 0.1}


EXPERTS = {"num_experts": 5, "top_k": 2, "ffn_hidden_size": 16, "aux_loss": 0.1, "z_loss": 0.1, "normalize": False}
EXPERTS |= {"aux_loss_over": "sequence", "shared_ffn_hidden_size": 8, "shared_gate": True, "capacity_factor": 0.9}


def train_stage(
    compiled: bool, batches: int, settings: dict[str, Any] = SETTINGS, **spec: Any
) -> tuple[dict[str, Tensor], int]:
    """Loss and gradients over some micro-batches, and the bytes that the last one saved for its backward pass."""
    stage = make_stage(tiny_model(**settings), dtype=torch.float32, **spec)
    if compiled:
        stage.compile_blocks()
    saved: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for number in range(batches):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            loss = run_stage(stage, make_batch(first=2 * number))
        loss.backward()
    return {"loss": loss.detach(), **gradients(stage)}, sum(saved.values())


def compare_compiled(kinds: tuple[str, ...]) -> tuple[list[str], dict[str, int]]:
    """Tensors that differ from the eager ones, and the bytes saved under each kind of recomputation."""
    tp = tensor_axis() if dist.get_world_size() > 1 else SINGLE
    torch._dynamo.config.error_on_recompile = tp.size == 1  # others are compiled a layer at a time, of several shapes
    wrong, saved = [], {}
    for kind in kinds:
        torch._dynamo.reset()
        spec = {"tp": tp, "sequence_parallel": tp.size > 1, "recompute": kind}
        eager, saved[f"{kind}, eager"] = train_stage(False, 2, **spec)
        found, saved[kind] = train_stage(True, 2, **spec)
        bad = {key: difference(found[key], eager[key]) for key in eager}
        wrong += [f"{kind}, rank {tp.rank}: {key} {error:.1e}" for key, error in bad.items() if error > TOLERANCE]
    return wrong, saved


def test_compiled_blocks_equal_eager_ones():
    """Loss and all gradients of two accumulated micro-batches are those of eager blocks for every kind of
    recomputation, with dropout on; the second block and batch find the graphs of the first. The compiler redoes by
    itself what selective recomputation does, whatever was asked for; full recomputation saves less than that."""
    ((wrong, saved),) = run_ranks(compare_compiled, 1, ("none", "selective", "full"))
    assert not wrong, "\n".join(wrong)
    assert saved["full"] < saved["selective"] == saved["none"] < 0.75 * saved["none, eager"], saved


def compare_kinds_of_blocks() -> list[str]:
    torch._dynamo.config.error_on_recompile = True
    wrong = []
    sparse = {**SETTINGS, "moe": EXPERTS}
    cases = [("none", sparse, True), ("none", LATENTS, True), ("full", sparse, False)]
    for kind, settings, makes_kernels in cases:
        if not makes_kernels:
            make_no_kernels()
        eager, _ = train_stage(False, 2, settings, recompute=kind)
        found, _ = train_stage(True, 2, settings, recompute=kind)
        bad = {key: difference(found[key], eager[key]) for key in eager}
        wrong += [f"{kind}: {key} {error:.1e}" for key, error in bad.items() if error > TOLERANCE]
        torch._dynamo.reset()
    return wrong


def test_compiled_blocks_with_experts_or_latents():
    """Routers, their losses and counts, and products in groups are part of the graph, which is compiled once; so are
    latents, and values that are narrower than keys. Full recomputation has the same kernels: its graphs alone are made.
    """
    (wrong,) = run_ranks(compare_kinds_of_blocks, 1)
    assert not wrong, "\n".join(wrong)


def test_compiled_blocks_with_collectives():
    """The same for tp 2 with sequence parallelism."""
    for wrong, _ in run_ranks(compare_compiled, 2, ("selective",)):
        assert not wrong, "\n".join(wrong)


def count_graphs() -> list[tuple[int, int, list[str]]]:
    """Graphs and breaks of the blocks of a stage at tp 2 whose weight gradients are handed over, as in training,
    without and with sequence parallelism, and with latents; and each pass of attention there and back. Graphs are made
    and divided as for kernels, which would take most of the time and are not."""
    make_no_kernels()
    found, passes = [], []
    for name in ("_attend", "_gradients"):
        setattr(attention_blocks, name, noting(passes, name, getattr(attention_blocks, name)))
    for sequence_parallel, settings in ((False, SETTINGS), (True, SETTINGS), (True, LATENTS)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        spec = {"tp": tensor_axis(), "sequence_parallel": sequence_parallel, "recompute": "none"}
        spec["take_gradient"] = lambda parameter, gradient: gradient.make()
        stage = make_stage(tiny_model(**settings), dtype=torch.float32, **spec)
        stage.compile_blocks()
        passes.clear()
        run_stage(stage, make_batch()).backward()
        counters = torch._dynamo.utils.counters
        breaks = sum(counters["graph_break"].values())
        found.append((counters["stats"]["unique_graphs"], breaks, sorted(passes)))
    return found


def count_products() -> dict[str, tuple[int, int, int]]:
    """Of a stage whose two blocks are made again, how often a block multiplies by a weight, and attends, in a step's
    passes; and breaks of its graphs."""
    make_no_kernels()
    found, passes = {}, list[str]()
    attend, multiply = attention_blocks._attend, SummedLinear.product
    attention_blocks._attend = noting(passes, "attend", attend)
    SummedLinear.product = noting(passes, "multiply", multiply)  # type: ignore[method-assign]
    kinds: dict[str, dict[str, Any]] = {
        "one graph": {},
        "mixed": {"recompute": ("full", "none")},
        "spelled out": {"attention_dropout": 0.1},
    }
    for name, settings in kinds.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        spec = {"recompute": settings.pop("recompute", "full"), "take_gradient": lambda _, gradient: gradient.make()}
        stage = make_stage(tiny_model(**SETTINGS, **settings), dtype=torch.float32, **spec)
        stage.compile_blocks()
        passes.clear()
        run_stage(stage, make_batch()).backward()
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        found[name] = (passes.count("multiply"), passes.count("attend"), breaks)
    return found


def test_full_recomputation_in_a_graph_leaves_out_the_last_product():
    """Four products of each of two blocks, and again but for the one whose result is added to the stream alone; a block
    whose attention ends graphs is run twice, as it was."""
    (found,) = run_ranks(count_products, 1)
    spelled_out, _, breaks = found.pop("spelled out")
    assert found == {"one graph": (8 + 6, 4, 0), "mixed": (8 + 3, 3, 0)}
    assert spelled_out > 8 + 6
    assert breaks > 0


def count_sizes() -> int:
    """Graphs that blocks are compiled to which see micro-batches of nine sizes."""
    make_no_kernels()
    stage = make_stage(tiny_model(**SETTINGS, num_layers=1), dtype=torch.float32, recompute="full")
    stage.compile_blocks()
    for count in range(1, 10):
        run_stage(stage, make_batch(count=count)).backward()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_blocks_of_many_sizes_are_compiled():
    """Torch stops at eight, without a word to whoever trains."""
    assert run_ranks(count_sizes, 1) == [9]


def noting(passes: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which notes its name when it is called."""

    def call(*arguments: Any, **options: Any) -> Any:
        passes.append(name)
        return function(*arguments, **options)

    return call


def test_a_block_is_one_graph():
    """With its collectives and its attention, which is not made again; and all blocks share it."""
    once = (1, 0, ["_attend", "_attend", "_gradients", "_gradients"])
    assert run_ranks(count_graphs, 2) == [[once] * 3] * 2


def attention_passes() -> list[int]:
    """How often attention runs forward and backward where it is compiled without the products around it."""
    from torch.profiler import profile

    make_no_kernels()
    cos, sin = torch.randn(2, 1, 32, 1, 4).unbind()

    def piece(qkv: Tensor) -> Tensor:
        q, k, v = qkv.view(2, 32, 3, 2, 8).unbind(2)
        q, k = (rotate(each, (cos, sin)) for each in (q, k))
        mixed = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    run = torch.compile(piece, dynamic=False, backend=_compile_within_budget)
    x = torch.randn(2, 32, 48, requires_grad=True)
    run(x).sum().backward()
    with profile() as found:
        run(x).sum().backward()
    names = [event.key for event in found.key_averages() for _ in range(event.count) if "attention" in event.key]
    return [sum("backward" not in name for name in names), sum("backward" in name for name in names)]


@pytest.mark.parametrize(
    ("makes", "share"),
    [
        (lambda comm: F.scaled_dot_product_attention(comm, comm, comm), 1.0),
        (lambda x: F.scaled_dot_product_attention(x, x, x) @ x.mT, COMPILED_BUDGET),
        (lambda attention_weight: attention_weight.exp(), COMPILED_BUDGET),
    ],
)
def test_what_a_graph_may_keep_follows_from_what_it_computes(makes, share):
    """Not from what its inputs are called."""
    assert _budget_of(torch.fx.symbolic_trace(makes)) == share


def test_attention_between_a_librarys_products_runs_once():
    """As between Transformer Engine's, which end graphs: it is not made again in the backward pass."""
    assert run_ranks(attention_passes, 1) == [[1, 1]]
