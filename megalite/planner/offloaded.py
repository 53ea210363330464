"""Seconds of an optimizer whose masters and state are in the host's memory: the update there, and the way there and
back.

The native engine sends the sums of a step's gradients there when they are whole, and rounded weights back when all are
updated: nothing hides either. FSDP2 keeps its rows of the weights there, too: they go to the device for each gather.
Gradients of a step's first micro-batch come back behind its backward pass; those of all others the host waits for,
since it adds them up (torch 2.13, `_fsdp_collectives.foreach_reduce`).
"""

from __future__ import annotations

from megalite.architecture.costs import ELEMENT_BYTES, FP32_BYTES
from megalite.config.schema import Config
from megalite.planner.machines import Machine

UPDATE_RATE = 0.5
"""Of an update on the host, over the bandwidth that a machine's file says: with an eighth of a DGX H200's, one run on
an H200 with 16 cores is met (1.3B, a step of 1.71 s in place of 0.52, docs/benchmarks/gpu.md). No other has been
measured, nor one whose bandwidth is what `calibrate` has measured."""
ADDED_BYTES = 3 * FP32_BYTES
"""Of a number that the host adds up: the sum and what has come read, the sum written."""


def is_offloaded(config: Config, machine: Machine) -> bool:
    """Whether the optimizer is in another memory than the weights, and the machine's file says how quick that is."""
    is_known = machine.host_link is not None and machine.host_bandwidth is not None
    return config.optimizer.offload and machine.device_type != "cpu" and is_known


def update_seconds(moved: float, machine: Machine) -> float:
    """Of an update that reads and writes so many bytes."""
    assert machine.host_bandwidth is not None
    return moved / (machine.host_bandwidth * UPDATE_RATE)


def there_and_back(config: Config, machine: Machine, updated: float) -> float:
    """Of the native engine's sums to the host, and weights from it: so many numbers."""
    return updated * (FP32_BYTES + ELEMENT_BYTES[config.precision.dtype]) / _rate(machine)


def to_the_device(machine: Machine, gathered: float) -> float:
    """Of FSDP2's rows: so many numbers."""
    return FP32_BYTES * gathered / _rate(machine)


def to_the_host(machine: Machine, reduced: float) -> float:
    """Of the gradients of such rows."""
    return FP32_BYTES * reduced / _rate(machine)


def added_up(machine: Machine, reduced: float) -> float:
    """Of gradients that have come, to those of former micro-batches."""
    return update_seconds(ADDED_BYTES * reduced, machine)


def _rate(machine: Machine) -> float:
    assert machine.host_link is not None
    return machine.host_link * machine.constants.links
