"""Pipelines in every format, and weight by weight: each schedule gives what one rank gives."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from megalite.engine.protocol import Engine
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config, train

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
STEPS = 6
UNCLIPPED = {"optimizer": {"lr": 2e-3, "clip_grad_norm": None}}
BF16 = {"precision": {"dtype": "bf16"}}
FP8 = {"precision": {"dtype": "bf16", "fp8": {"backend": "emulate"}}}
FP8_DELAYED = {"precision": {"dtype": "bf16", "fp8": {"backend": "emulate", "recipe": "delayed"}}}
COMPILED = {"train": {"steps": STEPS, "compile": "on"}}


class Piece(NamedTuple):
    """A run of elements of one rank's rectangle of a weight's gradient."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    first: int
    values: np.ndarray


def gradient_pieces(cases: list[dict[str, Any]]) -> list[list[Piece]]:
    """What this rank has of the gradients of the first step."""
    found = []
    for case in cases:
        rank, pieces = start_rank(tiny_config(**case)), []

        def look(update: Callable[[], None], engine: Engine = rank.engine, pieces: list[Piece] = pieces) -> None:
            for part, gradient in zip(engine.slices(), engine.gradients(), strict=True):
                local = part.local
                place = local.weight.name, local.rectangle.start, local.rectangle.shape
                pieces.append(Piece(*place, part.start, gradient.numpy().copy()))
            update()

        rank.engine.hooks.around_update.add(look)
        rank.train(0, 1)
        rank.engine.close()
        found.append(pieces)
    return found


def whole(pieces: list[Piece]) -> dict[str, np.ndarray]:
    """Gradients by weight; NaN where no rank has any."""
    rectangles: dict[tuple, np.ndarray] = {}
    for piece in pieces:
        key = piece.name, piece.start, piece.shape
        flat = rectangles.setdefault(key, np.full(math.prod(piece.shape), np.nan, np.float32))
        flat[piece.first : piece.first + piece.values.size] = piece.values.reshape(-1)
    ends = defaultdict(list)
    for name, start, shape in rectangles:
        ends[name].append([first + size for first, size in zip(start, shape, strict=True)])
    weights = {name: np.full(np.max(each, axis=0), np.nan, np.float32) for name, each in ends.items()}
    for (name, start, shape), flat in rectangles.items():
        place = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        weights[name][place] = flat.reshape(shape)
    return weights


def gradients(world_size: int, cases: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    ranks = run_ranks(gradient_pieces, world_size, cases)
    return [whole([piece for rank in ranks for piece in rank[number]]) for number in range(len(cases))]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_of_each_weight(tied):
    """To 1e-5 of the largest gradient of each weight."""
    more = {"model": {"tie_embeddings": tied}, **UNCLIPPED}
    cases = [{"parallel": {"pp": 2, "schedule": schedule}, **more} for schedule in SCHEDULES]
    (truth,) = gradients(1, [more])
    for case, found in zip(cases, gradients(2, cases), strict=True):
        assert found.keys() == truth.keys()
        for name, wanted in truth.items():
            assert np.abs(found[name] - wanted).max() <= 1e-5 * np.abs(wanted).max(), (case, name)


def curves(cases: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    return [train(tiny_config(**case), STEPS) for case in cases]


RELU = {**COMPILED, "model": {"activation": "relu"}}
"""Its backward pass reads what the next product multiplies last, and may be compiled to write over it."""

FORMATS = {"bf16": BF16, "fp8": FP8, "fp8 delayed": FP8_DELAYED, "compiled": COMPILED, "compiled relu": RELU}


def compare(world_size: int, cases: list[dict[str, Any]], truths: list[list[tuple[float, float]]]) -> None:
    """Loss to 1e-5 and norm to 1e-4 over eight steps, on every rank."""
    for ranks in run_ranks(curves, world_size, cases):
        for case, curve, truth in zip(cases, ranks, truths, strict=True):
            for (loss, norm), (wanted_loss, wanted_norm) in zip(curve, truth, strict=True):
                assert loss == pytest.approx(wanted_loss, abs=1e-5), case
                assert norm == pytest.approx(wanted_norm, rel=1e-4), case


@pytest.mark.parametrize("more", FORMATS.values(), ids=FORMATS)
def test_formats(more):
    """Where rounding is as on one rank."""
    cases = [{"parallel": {"pp": 2, "schedule": schedule}, **more} for schedule in SCHEDULES]
    cases.append({"parallel": {"zero_stage": 0, "pp": 2}, **more})
    truths = run_ranks(curves, 1, [more])[0] * len(cases)
    compare(2, cases, truths)


def test_bf16_over_four_ranks():
    """With recomputation, tied and not, and with replicas, whose sums are in fp32."""
    layouts = [
        ({"pp": 4, "schedule": "zb-v"}, True, "selective"),
        ({"pp": 4, "schedule": "interleaved", "zero_stage": 0}, False, "full"),
        ({"pp": 4}, True, "full"),
        ({"pp": 2, "dp": 2, "schedule": "dualpipe-v", "zero_stage": 0}, False, "selective"),
    ]
    cases = [
        {
            **BF16,
            "parallel": {"zero_stage": 1, **parallel},
            "model": {"num_layers": 8, "tie_embeddings": tied},
            "train": {"steps": STEPS, "recompute": recompute},
            "batch": {"micro_batch_size": 1},
        }
        for parallel, tied, recompute in layouts
    ]
    compare(4, cases, run_ranks(curves, 1, [{**case, "parallel": {}} for case in cases])[0])
