"""Seconds of an optimizer whose masters and state are in the host's memory: the update there, and the way there and
back.

The native engine sends the sums of a step's gradients there when they are whole, and rounded weights back when all are
updated: nothing hides either. FSDP2 keeps its rows of the weights there, too: they go to the device for each gather,
and gradients come back behind each backward pass, behind which others compute.
"""

from __future__ import annotations

from megalite.architecture.costs import ELEMENT_BYTES, FP32_BYTES
from megalite.config.schema import Config
from megalite.planner.machines import Machine

UPDATE_RATE = 0.5
"""Of an update on the host, over its memory's bandwidth: what one run on an H200 with 16 cores had (1.3B, a step of
1.71 s in place of 0.54, docs/benchmarks/gpu.md). No other has been measured."""


def is_offloaded(config: Config, machine: Machine) -> bool:
    """Whether the optimizer is in another memory than the weights, and the machine's file says how quick that is."""
    return config.optimizer.offload and machine.host_link is not None and machine.host_bandwidth is not None


def update_seconds(moved: float, machine: Machine) -> float:
    """Of an update that reads and writes so many bytes."""
    assert machine.host_bandwidth is not None
    return moved / (machine.host_bandwidth * UPDATE_RATE)


def there_and_back(config: Config, machine: Machine, updated: float) -> float:
    """Of the native engine's sums to the host, and weights from it: so many numbers."""
    return updated * (FP32_BYTES + ELEMENT_BYTES[config.precision.dtype]) / _rate(machine)


def with_gathers(machine: Machine, gathered: float, reduced: float) -> float:
    """Of FSDP2's rows to the device, and of their gradients to the host: so many numbers each."""
    return FP32_BYTES * (gathered + reduced) / _rate(machine)


def _rate(machine: Machine) -> float:
    assert machine.host_link is not None
    return machine.host_link * machine.constants.links
