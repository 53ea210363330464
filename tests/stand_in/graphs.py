"""CUDA graphs on the stand-in device: ops are recorded, left without effect, and done again on the same memory.

So a number of the host's that went into an op stays what it was, memory that is no longer a tensor's is written to all
the same, and a host that would have to wait is refused, as a GPU does it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Kernel = Callable[..., Any]


class Graphs:
    """`torch.cuda.CUDAGraph` and `torch.cuda.graph` of a device."""

    def __init__(self, device: ctypes.CDLL, note: Callable[[str], None]):
        self._device, self._note = device, note
        device.stand_in_is_recorded.restype = ctypes.c_bool
        self._kernels = list[Any]()  # what C calls must live as long as the graph

    def new_graph(self, keep_graph: bool = False) -> Graph:
        """`torch.cuda.CUDAGraph()`."""
        return Graph(self._device, self._note)

    def capture(
        self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Capture:
        """`torch.cuda.graph(...)`."""
        assert capture_error_mode in ("global", "thread_local", "relaxed"), capture_error_mode
        self._note("sync: device")
        return Capture(self._device, graph)

    def recorded(self, kernel: Kernel) -> Kernel:
        """A kernel in Python, which graphs have as one op."""

        @functools.wraps(kernel)
        def call(*given: Any, **options: Any) -> Any:
            if not self._device.stand_in_is_recorded():
                return kernel(*given, **options)
            import torch

            if "out" in options:
                torch.ops.stand_in.written(options["out"])
            given, options = tree_map_only(Tensor, Tensor.detach, (given, options))
            made = self._aside(kernel, *given, **options)
            kept = [x.detach() for x in tree_leaves(made)]

            def again() -> None:
                with torch.no_grad():
                    anew = tree_leaves(kernel(*given, **options))
                    for old, new in zip(kept, anew, strict=True):
                        if old.data_ptr() != new.data_ptr():
                            old.copy_(new)

            self._kernels.append(ctypes.CFUNCTYPE(None)(again))
            self._device.stand_in_record(self._kernels[-1])
            return made

        return call

    def _aside(self, kernel: Kernel, *given: Any, **options: Any) -> Any:
        self._device.stand_in_aside(True)
        try:
            return kernel(*given, **options)
        finally:
            self._device.stand_in_aside(False)


class Graph:
    """What was recorded."""

    def __init__(self, device: ctypes.CDLL, note: Callable[[str], None]):
        self._device, self._note = device, note
        self.number: int | None = None

    def replay(self) -> None:
        """Do it again."""
        assert self.number is not None, "nothing was recorded"
        self._note("graph replayed")
        self._device.stand_in_replay(self.number)

    def pool(self) -> tuple[int, int]:
        """Of its memory."""
        return (0, 1)

    def reset(self) -> None:
        """Forget it."""
        if self.number is not None:
            self._device.stand_in_forget(self.number)
            self.number = None


class Capture:
    """Within it ops are recorded."""

    def __init__(self, device: ctypes.CDLL, graph: Graph):
        self._device, self._graph = device, graph

    def __enter__(self) -> None:
        self._graph.number = self._device.stand_in_begin_graph()

    def __exit__(self, *error: object) -> None:
        self._device.stand_in_end_graph()
