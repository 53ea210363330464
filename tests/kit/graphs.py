"""Compiled blocks without kernels, which take most of the time of compiling, for tests of all the rest."""

from __future__ import annotations

from typing import Any


def make_no_kernels() -> list[Any]:
    """From now on, in this process, blocks that are compiled run op by op, as graphs that are made, differentiated and
    divided between forward and backward pass as those of kernels are.

    Returns:
        Where each graph goes that is made.
    """
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition
    from torch._inductor import compile_fx

    graphs: list[Any] = []

    def compile_eagerly(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return aot_eager_decomp_partition(graph, inputs)

    compile_fx.compile_fx = compile_eagerly
    return graphs
