"""Spans of a step that a profiler's trace shows by name, see `megalite.phases`.

Without a profiler at work a span is one question to torch, some fifty nanoseconds, and nothing is recorded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from megalite.phases import PHASES, PREFIX

_NOTHING = nullcontext()
_NAMES = {phase: f"{PREFIX}{phase}" for phase in PHASES}


def span(phase: str) -> AbstractContextManager[Any]:
    """Mark what is done within as a phase of the step."""
    return record_function(_NAMES[phase]) if _profiler_enabled() else _NOTHING
