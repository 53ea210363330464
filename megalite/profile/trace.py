"""A trace that torch's profiler has written (Chrome's trace event format), as what ran when.

On a GPU kernels and copies compute, NCCL's communicate; the phase of each is the one that the program stood in when it
launched it (a launch and what it started share a correlation number), for the device is behind the program. On a CPU
ops compute, on any thread, and the phase is the one at that time. gloo's threads say when they are at work.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalite.errors import UserError
from megalite.phases import OTHER, PHASES, PREFIX
from megalite.profile.breakdown import Activity
from megalite.profile.intervals import NONE, Intervals, contains, minus, union

Event = dict[str, Any]

STEP = re.compile(r"ProfilerStep#\d+$")
"""What torch calls a traced step."""

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
COMMUNICATING_KERNEL = re.compile(r"nccl", re.IGNORECASE)
COMMUNICATING_OP = re.compile(r"(c10d|_c10d_functional|c10d_functional|megalite_context)::")
AT_WORK = re.compile(r"(gloo|mpi|ucc):")
"""Spans of threads that communicate on a CPU."""

MEMORY = "[memory]"
DEVICE_TYPES = {"cpu": 0, "cuda": 1}


@dataclass(frozen=True)
class OpTime:
    """An op or kernel of one name in all traced steps; microseconds, without what it calls."""

    name: str
    count: int
    time: float


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes that torch had allocated, after each change."""

    times: np.ndarray
    """`[n]` fp64, microseconds from the first traced step on."""
    allocated: np.ndarray
    """`[n]` int64. On a CPU counted from where the trace begins, so that what was there before is missing."""

    def stairs(self) -> tuple[list[float], list[float]]:
        """To draw: milliseconds and megabytes, each value until the next one."""
        return np.repeat(self.times / 1e3, 2)[1:].tolist(), np.repeat(self.allocated / 1e6, 2)[:-1].tolist()


@dataclass(frozen=True)
class Trace:
    """Of one rank."""

    num_steps: int
    device: str
    """`cpu` or `cuda`: where it computes."""
    activity: Activity
    ops: tuple[OpTime, ...]
    """The longest first."""
    memory: MemoryTimeline | None


def read_trace(path: Path, num_steps: int | None = None) -> Trace:
    """Read a trace, compressed or not.

    Args:
        num_steps: as in `trace_of_events`.

    Raises:
        UserError: it is cut short, or no trace with steps.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            events = json.load(file)["traceEvents"]
        return trace_of_events(events, num_steps)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        EOFError,
        gzip.BadGzipFile,
        zlib.error,
    ) as error:
        raise UserError(
            f"{path}: no trace of torch's profiler, or one cut short ({type(error).__name__}: {error}); trace the "
            "steps again (monitor.profile)"
        ) from error


def trace_of_events(events: Iterable[Event], num_steps: int | None = None) -> Trace:
    """What a trace says.

    Args:
        num_steps: that are whole; a run that stopped has begun another one. None for all that it has.

    Raises:
        ValueError: it has no step.
    """
    spans = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) >= 0]
    by_category: dict[str, list[Event]] = defaultdict(list)
    for event in spans:
        by_category[event.get("cat", "")].append(event)
    annotations = by_category["user_annotation"]
    marked = [event for event in annotations if STEP.match(event["name"]) and event.get("dur", 0) > 0]
    if not marked:
        raise ValueError("it has no step (ProfilerStep#N) that took any time")
    marked = sorted(marked, key=lambda event: event["ts"])[:num_steps]
    steps, thread = _set(marked), marked[0]["tid"]
    names = {f"{PREFIX}{phase}": phase for phase in PHASES}
    of_phase: dict[str, list[Event]] = defaultdict(list)
    for event in annotations:
        if event["tid"] == thread and event["name"] in names:
            of_phase[names[event["name"]]].append(event)
    host, taken = {}, NONE
    for phase in PHASES:  # one stands in one at a time
        host[phase] = minus(_set(of_phase[phase]), taken)
        taken = union(np.concatenate((taken, host[phase])))
    on_device = [event for category in ON_DEVICE for event in by_category[category]]
    device = "cuda" if on_device else "cpu"
    if on_device:
        launches = [event for category in LAUNCHES for event in by_category[category]]
        compute, communication = _of_device(on_device, launches, host)
        ops = _times_of_kernels(_within(on_device, steps))
    else:
        compute, communication = _of_host(by_category["cpu_op"], annotations, host)
        ops = _own_times(_within(by_category["cpu_op"], steps))
    memory = _memory((event for event in events if event.get("name") == MEMORY), device, float(steps[0, 0]))
    return Trace(len(marked), device, Activity(steps, compute, communication, host), ops, memory)


def _set(events: Iterable[Event]) -> Intervals:
    return union([(event["ts"], event["ts"] + event["dur"]) for event in events])


def _within(events: list[Event], steps: Intervals) -> list[Event]:
    starts = np.array([event["ts"] for event in events], dtype=np.float64)
    return [event for event, is_in in zip(events, contains(steps, starts), strict=True) if is_in]


def _of_device(
    kernels: list[Event], launches: list[Event], host: dict[str, Intervals]
) -> tuple[dict[str, Intervals], Intervals]:
    """What computes, by phase, and what communicates."""
    asked = {event["args"]["correlation"]: event["ts"] for event in launches if "correlation" in event.get("args", {})}
    computing = [event for event in kernels if not COMMUNICATING_KERNEL.search(event["name"])]
    when = np.array([asked.get(event.get("args", {}).get("correlation"), np.nan) for event in computing])
    found, is_left = {}, np.ones(len(computing), dtype=bool)
    for phase, where in host.items():
        is_own = contains(where, when) & is_left
        found[phase] = _set(event for event, own in zip(computing, is_own, strict=True) if own)
        is_left &= ~is_own
    found[OTHER] = _set(event for event, left in zip(computing, is_left, strict=True) if left)
    return found, _set(event for event in kernels if COMMUNICATING_KERNEL.search(event["name"]))


def _of_host(
    ops: list[Event], annotations: list[Event], host: dict[str, Intervals]
) -> tuple[dict[str, Intervals], Intervals]:
    """The same of a CPU: an op that another rank is waited for in does not compute."""
    threads: dict[Any, tuple[list[Event], list[Event]]] = defaultdict(lambda: ([], []))
    for event in ops:
        threads[event["tid"]][bool(COMMUNICATING_OP.match(event["name"]))].append(event)
    pieces = [minus(_set(computing), _set(communicating)) for computing, communicating in threads.values()]
    computing = union(np.concatenate([NONE, *pieces]))
    found, left = {}, computing
    for phase, where in host.items():
        found[phase] = minus(left, minus(left, where))
        left = minus(left, where)
    found[OTHER] = left
    messages = [event for event in ops if COMMUNICATING_OP.match(event["name"])]
    messages += [event for event in annotations if AT_WORK.match(event["name"])]
    return found, _set(messages)


def _times_of_kernels(kernels: list[Event]) -> tuple[OpTime, ...]:
    return _sorted((event["name"], event["dur"]) for event in kernels)


def _own_times(ops: list[Event]) -> tuple[OpTime, ...]:
    """Of ops on each thread, what they took without the ops that they call."""
    found: list[tuple[str, float]] = []
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in ops:
        by_thread[event["tid"]].append(event)
    for of_thread in by_thread.values():
        open_ops: list[list[Any]] = []  # name, stop, own time
        for event in sorted(of_thread, key=lambda event: (event["ts"], -event["dur"])):
            while open_ops and open_ops[-1][1] <= event["ts"]:
                found.append(_closed(open_ops.pop()))
            if open_ops:
                open_ops[-1][2] -= event["dur"]
            open_ops.append([event["name"], event["ts"] + event["dur"], event["dur"]])
        found += map(_closed, open_ops)
    return _sorted(found)


def _closed(op: list[Any]) -> tuple[str, float]:
    name, _, own = op
    return name, max(0.0, own)


def _sorted(times: Iterable[tuple[str, float]]) -> tuple[OpTime, ...]:
    total, counts = defaultdict[str, float](float), Counter[str]()
    for name, time in times:
        total[name] += time
        counts[name] += 1
    rows = (OpTime(name, counts[name], time) for name, time in total.items())
    return tuple(sorted(rows, key=lambda op: (-op.time, op.name)))


def _memory(events: Iterator[Event], device: str, start: float) -> MemoryTimeline | None:
    found = sorted(
        (event["ts"] - start, event["args"]["Total Allocated"])
        for event in events
        if event["args"].get("Device Type") == DEVICE_TYPES[device]
    )
    if not found:
        return None
    times, allocated = zip(*found, strict=True)
    return MemoryTimeline(np.array(times, dtype=np.float64), np.array(allocated, dtype=np.int64))
