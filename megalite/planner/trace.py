"""The timeline of a step as a file that Perfetto and chrome://tracing open: a row a pipeline stage."""

from __future__ import annotations

from typing import Any

from megalite.parallel.schedules.simulation import Timeline
from megalite.planner.timeline import NAMES

MICROSECONDS = 1e6


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The trace event format, JSON-ready; the timeline is in seconds."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
        for stage in range(len(timeline.spans))
    ]
    passes = [
        {
            "ph": "X",
            "name": str(span.operation),
            "cat": NAMES[span.operation.kind],
            "pid": 0,
            "tid": stage,
            "ts": MICROSECONDS * span.start,
            "dur": MICROSECONDS * (span.end - span.start),
            "args": {"chunk": span.operation.chunk, "micro_batch": span.operation.micro_batch},
        }
        for stage, spans in enumerate(timeline.spans)
        for span in spans
    ]
    return {"traceEvents": [*names, *passes], "displayTimeUnit": "ms"}
