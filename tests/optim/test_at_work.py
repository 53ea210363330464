"""What rules have beside a unit while they work, every allocation watched."""

from __future__ import annotations

import pytest
import torch

from megalite.addition import load
from megalite.architecture.weights import Weight
from megalite.config.optimizers import RULES
from megalite.config.schema import OptimizerConfig
from megalite.host import cpu_flags
from megalite.optim.at_work import CHUNK, Formats
from megalite.optim.exchange import Unit
from megalite.optim.whole import WholeRule

SHAPES = ((512, 1376), (1376, 512), (768, 768))
CASES = [(name, bytes_) for name in ("muon", "muon8bit") for bytes_ in (2, 4)]
CASES += [(name, 4) for name in ("adamw8bit", "lion8bit", "adafactor", "soap")]


def peak_of(rule: WholeRule, unit: Unit, step: int) -> int:
    """Bytes at most that a step of a unit allocates, of a gradient that is there."""
    gradient = torch.randn(unit.shape, dtype=rule.wire_dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        direction = rule.direction(unit, gradient, step)
    assert found.profiler is not None
    now = most = 0
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert direction.shape == unit.shape
    return most


@pytest.mark.parametrize(("name", "product"), CASES)
def test_bytes_of_a_unit_at_work(name: str, product: int):
    """Within a tenth of what a step allocates at most, the result among it; SOAP refreshes its bases in every other.

    Where AMX multiplies bf16, oneDNN lays out a product's square factor once more, which no plan counts.
    """
    is_packed = product == 2 and "amx_bf16" in cpu_flags()
    optimizer = OptimizerConfig(name=name, **({"precondition_every": 2} if name == "soap" else {}))
    given = [torch.float32 if product == 4 else torch.bfloat16] if RULES[name].multiplies else []
    rule = load(RULES[name].make)(optimizer, *given)
    work = load(RULES[name].work)
    for shape in SHAPES:
        unit = Unit(Weight("blocks.0.mlp.up.weight", shape, "blocks.0", ""), 0, 0, shape[0])
        rule.start(unit, torch.device("cpu"))
        rule.direction(unit, torch.randn(shape, dtype=rule.wire_dtype), 1)  # makes tables, and bases
        found = max(peak_of(rule, unit, step) for step in (2, 3))
        counted = work(shape, Formats(product, 4, CHUNK["cpu"], optimizer.max_precondition_dim))
        packed = product * min(shape) ** 2 if is_packed else 0
        assert counted + packed == pytest.approx(found, rel=0.1), (shape, found)
