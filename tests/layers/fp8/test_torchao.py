"""FP8 linear layers against torchao's float8, an independent implementation of the same recipes."""

from __future__ import annotations

import pytest
import torch

from megalite.layers.fp8.quantise import E4M3, cast, scale_of, tile_amax
from tests.kit.child import ask, need
from tests.layers.fp8.kit import difference, draw, fp8_layer, run

TENSORWISE_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-3}
"""The FP8 numbers are the same; torchao multiplies them by the scales before the sum, we after it, as `_scaled_mm`
does. In bf16 that moves a rounding now and then."""

SHAPE = (40, 64, 48)
"""Tokens, inputs, outputs."""

RECIPES = {"current": "tensorwise", "rowwise": "rowwise"}


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tokens, width_in, width_out = SHAPE
    return {
        "x": draw(tokens, width_in, seed=0, dtype=dtype),
        "weight": draw(width_out, width_in, seed=1, dtype=dtype),
        "grad": draw(tokens, width_out, seed=2, dtype=dtype) * 1e-4,
    }


@pytest.fixture(scope="module")
def answers() -> list[dict]:
    """All that torchao is asked, in one process."""
    need("torchao")
    cases = [
        {
            "kind": "linear",
            "recipe": theirs,
            "dtype": str(dtype).removeprefix("torch."),
            **{name: value.double().tolist() for name, value in inputs(dtype).items()},
        }
        for theirs in RECIPES.values()
        for dtype in TENSORWISE_TOLERANCE
    ]
    cases.append({"kind": "mx", "x": draw(8, 96, seed=3).double().tolist()})
    return ask("tests.layers.fp8.torchao_child", {"cases": cases})


@pytest.mark.parametrize("dtype", TENSORWISE_TOLERANCE, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_layers_agree(answers, recipe, dtype):
    """Result and both gradients: rowwise to the last bit, tensorwise (hybrid) to the order of one multiplication."""
    index = list(RECIPES).index(recipe) * len(TENSORWISE_TOLERANCE) + list(TENSORWISE_TOLERANCE).index(dtype)
    found = run(fp8_layer(recipe), *inputs(dtype).values())
    for name, result in found.items():
        theirs = torch.tensor(answers[index][name], dtype=torch.float64)
        if recipe == "rowwise":
            assert torch.equal(result.double(), theirs), name
        else:
            assert difference(result, theirs) < TENSORWISE_TOLERANCE[dtype], name


def test_mxfp8_numbers_agree(answers):
    """Every FP8 number and every exponent of a matrix in blocks of 32."""
    x = draw(8, 96, seed=3)
    mine = cast(x, scale_of(tile_amax(x, (1, 32)), E4M3, power_of_two=True), (1, 32), E4M3)
    assert torch.equal(mine.data.double(), torch.tensor(answers[-1]["data"], dtype=torch.float64))
    assert torch.equal(mine.inverse.log2().int(), torch.tensor(answers[-1]["exponents"], dtype=torch.int32))
