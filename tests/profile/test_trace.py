"""What is read out of traces made by hand, in which every sum can be counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megalite.errors import UserError
from megalite.profile.breakdown import PhaseTime, break_down
from megalite.profile.summary import peaks_by_phase, read_run
from megalite.profile.trace import read_trace, trace_of_events

MAIN, OTHER_THREAD = 1, 2


def event(category: str, name: str, start: float, stop: float, *, thread: int | str = MAIN, **args: object) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "tid": thread, "args": args}


def step(start: float, stop: float) -> dict:
    return event("user_annotation", "ProfilerStep#1", start, stop)


def span(phase: str, start: float, stop: float) -> dict:
    return event("user_annotation", f"megalite.{phase}", start, stop)


def kernel(name: str, start: float, stop: float, *, launched: float, stream: int = 7) -> list[dict]:
    number = int(start * 1000 + stream)
    return [
        event("cuda_runtime", "cudaLaunchKernel", launched, launched + 0.5, correlation=number),
        event("kernel", name, start, stop, thread=f"stream {stream}", correlation=number),
    ]


def test_a_gpu_step():
    """Kernels belong to the phase in which they were launched, however late they run; of a reduction of 30 us 20 are
    beside the backward pass; a step's parts add up to it."""
    events = [
        step(0, 100),
        span("forward", 2, 10),
        span("backward", 10, 20),
        span("optimizer", 20, 90),
        *kernel("gemm_forward", 10, 30, launched=3),
        *kernel("gemm_backward", 30, 70, launched=12),
        *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 80, launched=15, stream=9),
        *kernel("adamw", 82, 90, launched=25),
        event("gpu_user_annotation", "megalite.forward", 10, 30, thread="stream 7"),
        event("user_annotation", "nccl:all_reduce", 14, 16),
        event("cpu_op", "aten::mm", 2, 9),
    ]
    trace = trace_of_events(events)
    assert trace.device == "cuda"
    found = break_down(trace.activity)
    assert found.total == 100
    assert (found.communication, found.exposed) == (30, 10)
    assert found.phases["forward"] == PhaseTime(20, 8)  # idle while the program is in it: 2 to 10
    assert found.phases["backward"] == PhaseTime(40, 0)  # launched there, run from 30 to 70
    assert found.phases["optimizer"] == PhaseTime(8, 2)  # idle from 80 to 82
    assert found.phases["other"] == PhaseTime(0, 12)  # 0 to 2, and 90 to 100
    assert found.computing + found.exposed + found.idle == found.total
    assert [(op.name, op.count, op.time) for op in trace.ops][:2] == [
        ("gemm_backward", 1, 40),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1, 30),
    ]


@pytest.mark.parametrize(
    ("when", "exposed"), [((30, 50), 0), ((50, 70), 20), ((20, 60), 10), ((0, 10), 0), ((90, 120), 10), ((20, 20), 0)]
)
def test_exposed_communication(when: tuple[float, float], exposed: float):
    """Beside a computation from 0 to 50 in a step of 100: what is not beside it, and within the step."""
    events = [step(0, 100), *kernel("gemm", 0, 50, launched=0), *kernel("ncclSend", *when, launched=0, stream=8)]
    found = break_down(trace_of_events(events).activity)
    assert found.exposed == exposed
    assert found.communication == min(100, when[1]) - when[0]


def test_overlapping_streams_count_once():
    """Two streams that compute at once, and two messages at once: time, not work, is counted."""
    events = [
        step(0, 100),
        *kernel("a", 0, 60, launched=0, stream=1),
        *kernel("b", 40, 70, launched=0, stream=2),
        *kernel("ncclX", 65, 80, launched=0, stream=3),
        *kernel("ncclY", 75, 90, launched=0, stream=4),
    ]
    found = break_down(trace_of_events(events).activity)
    assert found.phases["other"] == PhaseTime(70, 10)
    assert (found.communication, found.exposed) == (25, 20)


def test_a_cpu_step():
    """Ops compute, a wait for others does not; gloo's thread communicates beside the backward pass; time of an op is
    without what it calls; ops before the first step count nowhere."""
    events = [
        event("cpu_op", "aten::mm", -20, -5),
        step(0, 100),
        span("data", 0, 10),
        span("forward", 10, 40),
        event("cpu_op", "aten::linear", 12, 30),
        event("cpu_op", "aten::mm", 14, 28),
        event("cpu_op", "_c10d_functional::wait_tensor", 30, 38),
        span("backward", 40, 80),
        event("cpu_op", "MmBackward", 40, 75),
        event("cpu_op", "_c10d_functional::all_reduce", 60, 70),
        event("user_annotation", "gloo:all_reduce", 50, 68, thread=OTHER_THREAD),
        span("reduce", 80, 95),
        event("user_annotation", "gloo:all_reduce", 78, 93, thread=OTHER_THREAD),
    ]
    trace = trace_of_events(events)
    assert trace.device == "cpu"
    found = break_down(trace.activity)
    assert found.phases["data"] == PhaseTime(0, 10)
    assert found.phases["forward"] == PhaseTime(18, 4)
    assert found.phases["backward"] == PhaseTime(25, 3)  # 40 to 60 and 70 to 75; idle from 75 to 78
    assert found.phases["reduce"] == PhaseTime(0, 2)
    assert (found.communication, found.exposed) == (8 + 20 + 15, 8 + 10 + 15)
    assert found.computing + found.exposed + found.idle == found.total == 100
    assert {op.name: op.time for op in trace.ops} == {
        "aten::mm": 14,
        "aten::linear": 4,
        "MmBackward": 25,
        "_c10d_functional::wait_tensor": 8,
        "_c10d_functional::all_reduce": 10,
    }


def test_memory_by_phase():
    """The most that was allocated while the program stood in a phase; another device's bytes are not mixed in."""
    said = [(5, 100, 0), (15, 900, 0), (18, 300, 0), (25, 400, 0), (26, 9999, 1)]
    memory = [
        {"ph": "i", "name": "[memory]", "ts": at, "tid": MAIN, "args": {"Total Allocated": number, "Device Type": kind}}
        for at, number, kind in said
    ]
    trace = trace_of_events([step(0, 100), span("forward", 10, 20), span("backward", 20, 30), *memory])
    assert peaks_by_phase(trace) == {"forward": 900, "backward": 400}
    assert trace.memory is not None
    times, megabytes = trace.memory.stairs()
    assert times == [0.005, 0.015, 0.015, 0.018, 0.018, 0.025, 0.025]
    assert megabytes == [1e-4, 1e-4, 9e-4, 9e-4, 3e-4, 3e-4, 4e-4]


def test_what_is_no_trace_is_refused(tmp_path: Path):
    """A file cut short, one of something else, a trace without steps, a folder without traces."""
    whole = gzip.compress(json.dumps({"traceEvents": [step(0, 1)]}).encode())
    for name, content in (
        ("cut.json.gz", whole[:-12]),
        ("plain.json.gz", b'{"traceEvents": []}'),
        ("list.json", b"[1, 2]"),
        ("odd.json", b'{"traceEvents": [1]}'),
        ("none.json", b'{"traceEvents": []}'),
        ("text.json", b"\xff\xfe"),
        ("no_time.json", json.dumps({"traceEvents": [step(1, 1)]}).encode()),
        ("deep.json", b"[" * 100_000),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="no trace of torch's profiler"):
            read_trace(tmp_path / name)
    (tmp_path / "good.json.gz").write_bytes(whole)
    assert len(read_run(tmp_path / "good.json.gz")) == 1
    with pytest.raises(UserError, match=r"--steps 3:5: .*good\.json\.gz is a trace, of its own steps; give the run's"):
        read_run(tmp_path / "good.json.gz", "3:5")
    with pytest.raises(UserError, match=r"no traces in .*train with monitor\.profile"):
        read_run(tmp_path)
