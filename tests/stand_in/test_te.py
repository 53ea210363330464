"""Transformer Engine's own Python on the stand-in device against our emulation: which tensor is rounded when, by which
scale, and which of its copies goes into which product. Rounding and products are the stand-in's, so what a GPU makes of
them is another question.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.child import ask, need
from tests.stand_in.build import build

FOLDER = Path(sys.prefix) / "transformer-engine"

DELAYED_TOLERANCE = 1e-4
"""Theirs keeps 1/scale and ours multiplies with it, so that a bf16 number falls to the other side now and then."""

LINEARS, LAYERS, MICRO_BATCHES = 4, 2, 4
"""Micro-batches of both steps."""


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    library, why = build()
    if library is None:
        pytest.skip(why)
    need("transformer_engine", FOLDER)
    return ask("tests.stand_in.te_child", {"library": str(library)}, folder=FOLDER)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_layers_are_bit_equal(answer, recipe: str):
    """Result and both gradients, in every step."""
    assert answer["layers"][recipe] == [{"y": 0.0, "dx": 0.0, "dw": 0.0}] * len(answer["layers"][recipe])


def test_delayed_scales_follow_the_same_history(answer):
    """From the second step on: in the first theirs has scale 1, and ours that of the tensor at hand."""
    for step in answer["layers"]["delayed"][1:]:
        assert max(step.values()) < DELAYED_TOLERANCE, step


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_stages_are_bit_equal(answer, recipe: str, recompute: str):
    """Losses and gradients over two steps of two micro-batches; no rounded weight outlives its step. What selective
    recomputation does again holds no product."""
    found = answer["stages"][f"{recipe} {recompute}"]
    passes = LINEARS * LAYERS * MICRO_BATCHES
    forward = 2 * passes if recompute == "full" else passes
    assert found == {"loss": 0.0, "gradients": 0.0, "products": {"TN": forward, "NN": passes, "NT": passes}}
