"""Compare a layer cut over tensor-parallel ranks with the whole layer in one process: output and every gradient.

A case says how to build the layer and how each of its tensors is cut, written down by hand and not read from the
project's table of weights, so that the layers are checked on their own.

    whole:     the same on every rank
    rows       dim 0 cut over the ranks (tokens, or a weight's outputs)
    columns    dim 1 cut over the ranks (channels, or a weight's inputs)
    stream     rows under sequence parallelism, else whole
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.parallel.axes import SINGLE, Axis, connect
from megalite.parallel.mesh import Mesh
from tests.kit.spawn import run_ranks

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference, relative to the largest entry where that exceeds 1: sums in another order, nothing else."""

NUM_TOKENS = 24
"""Divides by 4, for sequence parallelism."""

Cut = Callable[[Tensor, Axis], Tensor]


def whole(x: Tensor, axis: Axis) -> Tensor:
    return x


def rows(x: Tensor, axis: Axis) -> Tensor:
    return x.chunk(axis.size, dim=0)[axis.rank]


def columns(x: Tensor, axis: Axis) -> Tensor:
    return x.chunk(axis.size, dim=1)[axis.rank]


def fused_rows(*sizes: int) -> Cut:
    """A cut of each part of a fused weight on dim 0 before they are stacked again."""

    def cut(x: Tensor, axis: Axis) -> Tensor:
        return torch.cat([rows(part, axis) for part in x.split(sizes)])

    return cut


def stream(sequence_parallel: bool) -> Cut:
    return rows if sequence_parallel else whole


@dataclass(frozen=True)
class Case:
    """A layer, its weights' cuts, and how it is called."""

    build: Callable[[Axis, bool], nn.Module]
    """From the axis and whether sequence parallel."""
    cuts: dict[str, Cut]
    """Of every parameter by name."""
    input_shape: tuple[int, ...]
    """Whole shape; tokens first."""
    output_shape: tuple[int, ...]
    input_cut: Callable[[bool], Cut] = stream
    """From whether sequence parallel."""
    output_cut: Callable[[bool], Cut] = stream
    run: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)
    """Call the layer; `x` is this rank's input, in which `x.grad` is looked for afterwards."""
    has_input_grad: bool = True
    sequence_parallel: tuple[bool, ...] = (False, True)
    """Which of both are tried."""
    dtypes: tuple[torch.dtype, ...] = field(default=(torch.float64, torch.float32))


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fill_randomly(layer: nn.Module) -> None:
    """Set every parameter to normal numbers, matrices narrow enough that the layer keeps its scale."""
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            scale = parameter.shape[1] ** -0.5 if parameter.dim() > 1 else 1.0
            parameter.copy_(draw(tuple(parameter.shape), parameter.dtype, 1000 + number) * scale)


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected entry where that exceeds 1."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.dtype == expected.dtype
    if not expected.numel():
        return 0.0
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1.0)).item()


def run_layer(case: Case, layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Output, and gradients of the input and of every parameter by name."""
    if case.has_input_grad:
        x = x.clone().requires_grad_()
    y = case.run(layer, x)
    y.backward(grad)
    result = {"output": y.detach(), **{name: parameter.grad for name, parameter in layer.named_parameters()}}
    return {**result, "input": x.grad} if case.has_input_grad else result


def compare(case: Case, axis: Axis, dtype: torch.dtype, sequence_parallel: bool) -> dict[str, float]:
    """Difference of each tensor between this rank's part of the layer and the same part of the whole one."""
    one = case.build(SINGLE, False).to(dtype)
    fill_randomly(one)
    seed_x, seed_grad = 1, 2
    x, grad = draw(case.input_shape, dtype, seed_x), draw(case.output_shape, dtype, seed_grad)
    truth = run_layer(case, one, x, grad)

    cuts = {**case.cuts, "input": case.input_cut(sequence_parallel), "output": case.output_cut(sequence_parallel)}
    part = case.build(axis, sequence_parallel).to(dtype)
    whole_parameters = dict(one.named_parameters())
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(cuts[name](whole_parameters[name], axis))
    found = run_layer(case, part, cuts["input"](x, axis), cuts["output"](grad, axis))
    assert set(found) == set(truth)
    return {name: difference(tensor, cuts[name](truth[name], axis)) for name, tensor in found.items()}


def complaints(cases: dict[str, Case]) -> list[str]:
    """Every tensor of every case that differs by more than its format's tolerance, on the ranks of this world."""
    axis = connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp
    wrong = []
    for name, case in cases.items():
        for dtype in case.dtypes:
            for sequence_parallel in case.sequence_parallel:
                differences = compare(case, axis, dtype, sequence_parallel)
                where = f"{name}, {dtype}, sequence_parallel={sequence_parallel}, rank {axis.rank}"
                bad = {key: value for key, value in differences.items() if not value <= TOLERANCES[dtype]}
                wrong += [f"{where}: {key} differs by {value:.1e}" for key, value in bad.items()]
    return wrong


def assert_equal_to_one_process(check: Callable[[], list[str]], world_size: int) -> None:
    """Run `check`, a module's function that returns `complaints` of its cases, on all ranks."""
    wrong = [line for lines in run_ranks(check, world_size) for line in lines]
    assert not wrong, "\n".join(wrong)
