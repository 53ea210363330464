"""The four conjugate collectives against one process that holds every rank's tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.axes import SINGLE, Axis, connect
from megalite.parallel.collectives import all_reduce, from_all, keep, own_rows, replicated
from megalite.parallel.mesh import Mesh
from tests.kit.spawn import run_ranks

TOLERANCE = 1e-10
"""float64: only the order of the sum over ranks differs."""

SHAPES = ((8, 3), (4,), (12, 2, 5))
"""Of the whole tensor: a matrix, a vector, and a stream with heads; dim 0 divides by 2 and 4."""

OPS = ("copy_to", "reduce_from", "gather_rows", "scatter_rows")


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cut(whole: Tensor, axis: Axis) -> Tensor:
    return whole.chunk(axis.size)[axis.rank]


def inputs_and_outputs(op: str, shape: tuple[int, ...], size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Every rank's input of an op and the gradient of every rank's output; replicated ones are equal."""
    part = (shape[0] // size, *shape[1:])
    in_shape, in_seeds = {
        "copy_to": (shape, [0] * size),
        "reduce_from": (shape, range(size)),
        "gather_rows": (part, range(size)),
        "scatter_rows": (shape, range(size)),
    }[op]
    out_shape, out_seeds = {
        "copy_to": (shape, range(size)),
        "reduce_from": (shape, [0] * size),
        "gather_rows": (shape, range(size)),
        "scatter_rows": (part, range(size)),
    }[op]
    return [draw(in_shape, seed) for seed in in_seeds], [draw(out_shape, 100 + seed) for seed in out_seeds]


def truth(op: str, inputs: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and input gradients of every rank, computed in one process from all inputs by plain autograd.

    A replicated tensor is one variable: as the input of `copy_to` its gradient is that of all its uses, and as the
    output of `reduce_from` the loss that hangs on it counts once.
    """
    size = len(inputs)
    variables = [x.clone().requires_grad_() for x in inputs]
    if op == "copy_to":
        variables = [variables[0]] * size
        outputs = variables
        loss = sum((g * y).sum() for g, y in zip(grads, outputs, strict=True))
    elif op == "reduce_from":
        outputs = [sum(variables)] * size
        loss = (grads[0] * outputs[0]).sum()
    elif op == "gather_rows":
        outputs = [torch.cat(variables)] * size
        loss = sum((g * y).sum() for g, y in zip(grads, outputs, strict=True))
    else:
        outputs = list(sum(variables).chunk(size))
        loss = sum((g * y).sum() for g, y in zip(grads, outputs, strict=True))
    loss.backward()
    return [y.detach() for y in outputs], [x.grad for x in variables]


def run_op(op: Callable[[Tensor, Axis], Tensor], x: Tensor, grad: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    variable = x.requires_grad_()
    y = op(variable, axis)
    y.backward(grad)
    return y.detach(), variable.grad


def compare_ops() -> dict[str, float]:
    """Largest error of each op on this rank, and 1.0 under `changed` when an op changed a tensor it was given."""
    size = dist.get_world_size()
    axis = connect(Mesh(tp=size), dist.get_rank()).tp
    errors: dict[str, float] = {}
    for op in OPS:
        for shape in SHAPES:
            inputs, grads = inputs_and_outputs(op, shape, size)
            outputs, input_grads = truth(op, inputs, grads)
            x, grad = inputs[axis.rank].clone(), grads[axis.rank].clone()
            y, x_grad = run_op(getattr(collectives, op), x, grad, axis)
            assert y.shape == outputs[axis.rank].shape
            errors[f"{op} {shape} forward"] = (y - outputs[axis.rank]).abs().max().item()
            errors[f"{op} {shape} gradient"] = (x_grad - input_grads[axis.rank]).abs().max().item()
            same = torch.equal(x, inputs[axis.rank]) and torch.equal(grad, grads[axis.rank])
            errors[f"{op} {shape} changed"] = float(not same)
    return errors


def compare_strided() -> float:
    """Largest error of the ops on transposed inputs and gradients, which no backend takes as they are."""
    axis = connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp
    worst = 0.0
    for op in OPS:
        inputs, grads = inputs_and_outputs(op, (4, 6), axis.size)
        outputs, input_grads = truth(op, inputs, grads)
        x = inputs[axis.rank].t().contiguous().t()
        y, x_grad = run_op(getattr(collectives, op), x, grads[axis.rank].t().contiguous().t(), axis)
        errors = ((y - outputs[axis.rank]).abs().max(), (x_grad - input_grads[axis.rank]).abs().max())
        worst = max(worst, *(error.item() for error in errors))
    return worst


def warn_of_ops() -> list[str]:
    """Warnings that the ops give on this rank."""
    axis = connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for op in OPS:
            inputs, grads = inputs_and_outputs(op, (4, 6), axis.size)
            run_op(getattr(collectives, op), inputs[axis.rank], grads[axis.rank], axis)
    return [str(warning.message) for warning in caught]


def compare_pairs() -> bool:
    """Whether gather undoes a cut, the in-place all-reduce works with sums and maxima, and words come in order."""
    axis = connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp
    whole = draw((8, 3), 7)
    mine = own_rows(whole, axis)
    joined = collectives.gather_rows(mine, axis)
    total, largest = torch.tensor([1.0 + axis.rank]), torch.tensor([1.0 + axis.rank])
    assert all_reduce(total, axis) is total
    all_reduce(largest, axis, dist.ReduceOp.MAX)
    assert total.item() == axis.size * (axis.size + 1) / 2
    assert largest.item() == axis.size
    assert from_all(f"rank {axis.rank}", axis) == [f"rank {rank}" for rank in range(axis.size)]
    return torch.equal(mine, cut(whole, axis)) and torch.equal(joined, whole)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ops_equal_one_process(world_size):
    """Each op's output and input gradient are those of one process holding all ranks' tensors, and neither the input
    nor the incoming gradient is changed, which recomputation relies on."""
    for rank, errors in enumerate(run_ranks(compare_ops, world_size, backend="gloo")):
        wrong = {name: error for name, error in errors.items() if error > TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("world_size", [2, 4])
def test_ops_take_any_strides(world_size):
    """Transposed inputs and gradients give the same results as contiguous ones."""
    assert max(run_ranks(compare_strided, world_size, backend="gloo")) <= TOLERANCE


def test_ops_do_not_warn():
    """No op uses a name that torch calls deprecated: the warning would stand in every rank's log."""
    assert run_ranks(warn_of_ops, 2, backend="gloo") == [[], []]


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_and_in_place_reduction(world_size):
    """own_rows is this rank's part in order of rank and gather_rows joins it again; all_reduce works in place; from_all
    gives every rank what all have to say."""
    assert all(run_ranks(compare_pairs, world_size, backend="gloo"))


@pytest.mark.parametrize("op", OPS)
def test_an_axis_of_one_is_the_identity(op):
    """Over an axis of size 1 every op returns the very tensor it was given, without torch.distributed."""
    x = draw((4, 3), 0).requires_grad_()
    assert getattr(collectives, op)(x, SINGLE) is x
    assert keep(x, SINGLE) is x
    assert all_reduce(x, SINGLE) is x
    assert from_all(x, SINGLE) == [x]
    assert torch.equal(own_rows(x, SINGLE), x)


def test_replicated_weights_add_up_only_under_sequence_parallelism():
    """A whole weight's gradient is a partial sum exactly when the ranks see other tokens."""
    assert replicated(True) is collectives.copy_to
    assert replicated(False) is keep
