"""Tensor-parallel products beside their messages: against the whole layer, and in what order things are done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.layers.gemm import PlainGemm
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.layers.overlapped import overlap
from megalite.layers.precision import linear_layers
from megalite.layers.weight_gradients import WeightGradient
from megalite.parallel import messages
from megalite.parallel.axes import Axis, connect
from megalite.parallel.mesh import Mesh
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config
from tests.layers.parity import NUM_TOKENS, Case, assert_equal_to_one_process, columns, complaints, rows, whole

WIDE, NARROW = 32, 20
KINDS = {"column": ColumnParallelLinear, "row": RowParallelLinear}


def take(parameter: nn.Parameter, gradient: WeightGradient) -> None:
    """As autograd would."""
    made = gradient.make()
    parameter.grad = made if parameter.grad is None else parameter.grad + made


def build(kind: str, bias: bool, axis: Axis, sequence_parallel: bool, *, is_symmetric: bool = False) -> nn.Module:
    sizes = (NARROW, WIDE // axis.size) if kind == "column" else (WIDE // axis.size, NARROW)
    layer = KINDS[kind](*sizes, tp=axis, bias=bias, sequence_parallel=sequence_parallel)
    layer.gemm = overlap(layer, PlainGemm(), take, is_symmetric=is_symmetric)
    return layer


def case(kind: str, num_tokens: int, *, is_symmetric: bool = False, **more: Any) -> Case:
    is_column = kind == "column"
    shapes = ((num_tokens, NARROW), (num_tokens, WIDE))
    cut = {"output_cut" if is_column else "input_cut": lambda sequence_parallel: columns}
    return Case(
        build=partial(build, kind, is_column, is_symmetric=is_symmetric),
        cuts={"weight": rows, "bias": rows} if is_column else {"weight": columns, "bias": whole},
        input_shape=shapes[0] if is_column else shapes[1],
        output_shape=shapes[1] if is_column else shapes[0],
        **cut,
        **more,
    )


def again(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def compiled(layer: nn.Module, x: Tensor) -> Tensor:
    """In a graph, of which the layer is the middle."""

    def between(x: Tensor) -> Tensor:
        return layer(x * 2.0) * 0.5

    torch._dynamo.reset()  # a limit on graphs of one function
    return torch.compile(between, fullgraph=True, backend="aot_eager", dynamic=False)(x)


CASES = {
    f"{kind}, {name}": case(kind, **options)
    for kind in KINDS
    for name, options in {
        "plain": {"num_tokens": NUM_TOKENS},
        "a row a rank": {"num_tokens": 4},
        "recomputed": {"num_tokens": NUM_TOKENS, "run": again},
        "compiled": {"num_tokens": NUM_TOKENS, "run": compiled},
        "shared memory": {"num_tokens": NUM_TOKENS, "is_symmetric": True},
        "shared memory, compiled": {"num_tokens": NUM_TOKENS, "is_symmetric": True, "run": compiled},
    }.items()
} | {f"{kind}, one row": case(kind, num_tokens=1, sequence_parallel=(False,)) for kind in KINDS}


def check() -> list[str]:
    with ops_of_shared_memory():
        return complaints(CASES)


@contextmanager
def ops_of_shared_memory() -> Iterator[None]:
    """Torch has these for GPUs alone; what it puts in their place in its own tests takes any device's tensors."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_to_one_process(world_size: int):
    """Output, and gradients of input, weight and bias, with and without sequence parallelism."""
    assert_equal_to_one_process(check, world_size)


def ways_of_a_model(**settings: bool) -> set[str]:
    """How the products of a model's blocks come by their messages, in the engine that trains it."""
    rank = start_rank(tiny_config(parallel={"tp": 2, **settings}))
    layers = (layer for block in rank.engine.stage.all_blocks() for _, layer in linear_layers(block))
    return {f"{type(layer).__name__}: {type(layer.gemm).__name__}" for layer in layers}


@pytest.mark.parametrize(
    ("settings", "column", "row"),
    [
        ({}, "_SummedInput", "_SummedOutput"),
        ({"sequence_parallel": True}, "_GatheredInput", "_ScatteredOutput"),
        ({"sequence_parallel": True, "async_tp": True}, "_SymmetricGatheredInput", "_SymmetricScatteredOutput"),
    ],
    ids=str,
)
def test_a_model_trains_with_it(settings: dict[str, bool], column: str, row: str):
    """Each tensor-parallel layer of every block."""
    expected = {f"ColumnParallelLinear: {column}", f"RowParallelLinear: {row}"}
    assert run_ranks(partial(ways_of_a_model, **settings), 2) == [expected] * 2


class Watched:
    """A message under way, of which it is seen when it is waited for."""

    def __init__(self, work: dist.Work, done: list[str]):
        self._work, self._done = work, done

    def wait(self) -> None:
        self._done.append("wait")
        self._work.wait()


class Log(PlainGemm):
    """Products as they are made."""

    def __init__(self, done: list[str]):
        self.done = done

    def multiply(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        self.done.append(f"{left.shape[0]} rows")
        return super().multiply(left, right, out)


def orders() -> dict[str, list[str]]:
    """What a rank of two does in a forward and a backward pass, by layer."""
    axis, found = connect(Mesh(tp=2), dist.get_rank()).tp, {}

    def logged(what: str, begin: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            done.append(f"begin {what}")
            begun = begin(*arguments, **options)
            if isinstance(begun, list):
                return [Watched(each, done) for each in begun]
            return begun and Watched(begun, done)  # there is none of what has ended already

        return call

    for kind in KINDS:
        for sequence_parallel in (False, True):
            done: list[str] = []
            layer = build(kind, False, axis, sequence_parallel)
            nn.init.normal_(layer.weight)
            layer.gemm._gemm = Log(done)
            layer.gemm.take = lambda parameter, gradient, done=done: done.append("dw")
            doors = {"all_reduce": "sum", "all_to_all_single": "exchange", "batch_isend_irecv": "exchange"}
            with (
                mock.patch.multiple(dist, **{name: logged(what, getattr(dist, name)) for name, what in doors.items()}),
                mock.patch.object(messages, "fill_all_gather", logged("gather", messages.fill_all_gather)),
            ):
                size = layer.weight.shape[1]
                x = torch.randn(8 if kind == "row" or not sequence_parallel else 4, size, requires_grad=True)
                y = layer(x)
                done.append("backward")
                y.backward(torch.ones_like(y))
            found[f"{kind}, {sequence_parallel}"] = done
    return found


def test_products_are_made_while_messages_travel():
    """Between the beginning of each message and the wait for its work stands a product, on every rank."""
    for found in run_ranks(orders, 2):
        assert found == {
            "column, False": ["8 rows", "backward", "8 rows", "begin sum", "dw", "wait"],
            "column, True": [
                *("begin gather", "4 rows", "wait", "4 rows", "backward"),
                *("8 rows", "begin exchange", "dw", "wait"),
            ],
            "row, False": [
                *("4 rows", "begin sum", "4 rows", "begin sum", "wait", "wait", "backward"),
                *("dw", "8 rows"),
            ],
            "row, True": [
                *("4 rows", "begin exchange", "4 rows", "wait", "wait", "backward"),
                *("begin gather", "4 rows", "wait", "4 rows", "dw"),
            ],
        }
