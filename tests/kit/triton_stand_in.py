"""As much of Triton as the project's kernels take, on a CPU: each program of a grid runs in turn, on torch's tensors.

What it does not have, a kernel does not find. It knows nothing of what a GPU does at once, and rounds as torch does; so
it shows that the kernels' formulas, borders and addresses are right, and nothing about their speed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class Pointer:
    """Places in a tensor's memory."""

    def __init__(self, tensor: Tensor, places: Tensor | int = 0):
        self.memory = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        self.places, self._tensor = places, tensor
        self.first = tensor.storage_offset()
        self.dtype = self

    @property
    def element_ty(self) -> torch.dtype:
        """As Triton calls it."""
        return self._tensor.dtype

    def __add__(self, offset: Tensor | int) -> Pointer:
        return Pointer(self._tensor, self.places + offset)


class Language:
    """`triton.language`."""

    float32, int64, constexpr = torch.float32, torch.int64, object

    def __init__(self) -> None:
        self.program: tuple[int, ...] = ()
        self.grid: tuple[int, ...] = ()

    def program_id(self, axis: int) -> Tensor:
        return torch.tensor(self.program[axis])

    def num_programs(self, axis: int) -> Tensor:
        return torch.tensor(self.grid[axis])

    arange = staticmethod(torch.arange)
    exp, sigmoid, maximum, where = map(staticmethod, (torch.exp, torch.sigmoid, torch.maximum, torch.where))
    abs = staticmethod(torch.abs)

    @staticmethod
    def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype)

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    @staticmethod
    def max(x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    @staticmethod
    def sum(x: Tensor, axis: int) -> Tensor:
        return x.sum(axis)

    @staticmethod
    def load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
        """A place outside of the memory must be masked."""
        places, mask = torch.broadcast_tensors(torch.as_tensor(pointer.places), torch.as_tensor(mask))
        found = torch.full(places.shape, other, dtype=pointer.memory.dtype)
        found[mask] = pointer.memory[places[mask] + pointer.first]
        return found

    @staticmethod
    def store(pointer: Pointer, value: Tensor, mask: Any = True) -> None:
        places, mask = torch.broadcast_tensors(torch.as_tensor(pointer.places), torch.as_tensor(mask))
        pointer.memory[places[mask] + pointer.first] = value.to(pointer.memory.dtype).expand(places.shape)[mask]


class Kernel:
    """What `triton.jit` makes of a function: launched over a grid, or called by another."""

    def __init__(self, language: Language, function: Callable[..., Any]):
        self._language, self._function = language, function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            given = [Pointer(each) if isinstance(each, Tensor) else each for each in arguments]
            self._language.grid = grid
            for self._language.program in itertools.product(*map(range, grid)):
                self._function(*given, **constants)

        return launch


@contextmanager
def triton_on_a_cpu() -> Iterator[ModuleType]:
    """`megalite.layers.triton_kernels`, imported with this in Triton's place."""
    name = "megalite.layers.triton_kernels"
    triton, language = ModuleType("triton"), Language()
    of_language = ModuleType("triton.language")
    for key in dir(language):
        if not key.startswith("_"):
            setattr(of_language, key, getattr(language, key))
    triton.language = of_language  # type: ignore[attr-defined]
    triton.jit = lambda function: Kernel(language, function)  # type: ignore[attr-defined]
    triton.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    brought = {"triton": triton, "triton.language": of_language}
    before = {key: sys.modules.pop(key, None) for key in (*brought, name)}
    sys.modules.update(brought)
    try:
        import importlib

        yield importlib.import_module(name)
    finally:
        for key, module in before.items():
            sys.modules.pop(key, None)
            if module is not None:
                sys.modules[key] = module
