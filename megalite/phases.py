"""What a step does, by name: the engine marks spans of these names for a profiler, and a trace is summed up by them."""

from __future__ import annotations

PREFIX = "megalite."
"""Before the name of a span in a trace."""

PHASES = ("data", "forward", "backward", "reduce", "optimizer", "evaluate")
"""In the order of a step. `reduce` is waiting for gradients that other ranks add to, and handing out new weights;
`evaluate` a forward pass that nobody learns from."""

OTHER = "other"
"""What is in no span: components, saves, votes."""
