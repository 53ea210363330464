"""Micro-batches that a GPU repeats from a record, on the stand-in device, which really records and repeats."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.child import ask
from tests.stand_in.build import build


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    library, why = build()
    if library is None:
        pytest.skip(why)
    return ask("tests.stand_in.recorded", {"library": str(library)})


@pytest.mark.parametrize(("name", "repeated"), [("well behaved", 11), ("nothing finite", 11)])
def test_repeating_is_computing(answer, name: str, repeated: int):
    """Sums and losses are equal, bit by bit, in every step: of fifteen micro-batches, a first one of each shape is
    computed, and those of a shape that has not been a step's first."""
    assert answer[name] == {"worst": 0.0, "repeated": repeated}


@pytest.mark.parametrize("name", ["asks the host", "numbers of the host's", "borders"])
def test_what_cannot_be_recorded_is_refused(answer, name: str):
    assert answer[name]["refused"].startswith("train.cuda_graphs: a micro-batch cannot be recorded (CUDA error: sync")
    assert answer[name]["refused"].endswith("set train.cuda_graphs=false")


def test_a_pass_that_remembers_another_micro_batch_is_found_out(answer):
    assert "something in the model remembers an earlier one" in answer["remembers"]["refused"]


def test_what_the_host_changes_between_steps_is_recorded_again(answer):
    """Of eight steps of two micro-batches the first with each number are computed; records of the other are gone."""
    assert answer["constants"] == {"worst": 0.0, "repeated": 12, "records": 1}


def test_losses_are_added_up_in_order(answer):
    assert answer["many"] == {"worst": 0.0}


def test_shapes_that_are_too_many_are_computed(answer):
    assert answer["shapes"] == {"worst": 0.0, "repeated": 4, "records": 2}


def test_what_is_forgotten_is_recorded_again(answer):
    assert answer["forgotten"] == {"worst": 0.0, "repeated": 2}
