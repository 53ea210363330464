"""Blocks as they are compiled and recomputed on a GPU, counted on the stand-in device."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.host import cpu_flags
from tests.kit.child import ask
from tests.stand_in.build import build

EXPONENTIAL = 1e-3 if "GenuineIntel" in cpu_flags() else 0.0
"""Relative to the largest gradient, of a few in bf16: the compiler spells softmax out, and the exponential that MKL
takes on Intel's CPUs is not the one inside of torch's softmax."""


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    library, why = build()
    if library is None:
        pytest.skip(why)
    return ask("tests.stand_in.blocks", {"library": str(library)})


@pytest.mark.parametrize("name", ["bf16", "current", "delayed", "rowwise"])
def test_all_blocks_share_a_graph(answer, name: str):
    """With attention and FP8 products inside: one for whole sequences, and one for any number of shorter documents.
    Results and gradients are those of eager blocks, bit by bit but for the exponential."""
    found = answer["compiled"][name]
    assert (found["graphs"], found["breaks"]) == (2, 0)
    assert found["worst"] <= EXPONENTIAL


@pytest.mark.parametrize("name", ["bf16", "current"])
def test_selective_recomputation_multiplies_once(answer, name: str):
    """Neither products nor attention are done again; `full` shows that they could be seen."""
    products = answer["products"]
    assert products[f"{name} selective"] == products[f"{name} none"]
    assert sum(products[f"{name} full"].values()) > sum(products[f"{name} none"].values())
