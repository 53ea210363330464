"""The loop and its components: who is called when, what is kept, and who is named when something fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megalite.checkpoint.format import Progress
from megalite.errors import CheckpointError, DataError
from megalite.train.components.component import Component, RollBack, Step
from megalite.train.loop import ComponentError, TrainingLoop


class Broken(Component):
    """Fails as it is told."""

    name = "broken"

    def __init__(self, error: Exception):
        self._error = error

    def after_step(self, step, result):
        raise self._error


class Wants(Component):
    """Asks to go back, and counts how often it is asked."""

    def __init__(self, wish: RollBack | None):
        self.wish, self.num_calls = wish, 0

    def after_step(self, step, result):
        self.num_calls += 1
        return self.wish


def loop_of(*components: Component) -> TrainingLoop:
    """A loop of these components that does nothing but ask them."""
    made = TrainingLoop.__new__(TrainingLoop)
    made._components = components
    made.went_back = []
    made._roll_back = made.went_back.append
    return made


def test_a_component_that_fails_is_named():
    """The error says which component, of which class, failed where and why; errors for the user stay what they are."""
    step = Step(1, [], range(0), None, 0, 0)
    with pytest.raises(
        ComponentError, match=r"component broken \(.*test_loop\.Broken\) failed in after_step: KeyError"
    ):
        loop_of(Broken(KeyError("x")))._rolls_back("after_step", lambda each: each.after_step(step, None))
    with pytest.raises(DataError, match="as it is"):
        loop_of(Broken(DataError("as it is")))._rolls_back("after_step", lambda each: each.after_step(step, None))


def test_who_asks_to_go_back_ends_the_step():
    """Components in order; behind the first that wants to go back nobody is asked, and the run goes back once."""
    wish = RollBack(3, "because")
    first, second, third = Wants(None), Wants(wish), Wants(RollBack(1, "never"))
    made = loop_of(first, second, third)
    assert made._rolls_back("after_step", lambda each: each.after_step(None, None))
    assert [each.num_calls for each in (first, second, third)] == [1, 1, 0]
    assert made.went_back == [wish]
    assert not loop_of(first)._rolls_back("after_step", lambda each: each.after_step(None, None))


class Forgetful(Component):
    """Needs a state that it never has."""

    name = "forgetful"

    def load_state(self, state):
        state["missing"]


class Notebook:
    """A recorder that keeps what it is told."""

    def __init__(self):
        self.said = []

    def event(self, event, step, **details):
        self.said.append((event, step, details["component"]))

    def say(self, text):
        self.said.append(text)


def test_state_that_does_not_load_is_named_before_training():
    """It ends the start, with the component's name; a state that nobody takes up is told."""
    made = loop_of(Forgetful())
    with pytest.raises(CheckpointError, match=r"component forgetful: .* at step 4 \(KeyError: 'missing'\)"):
        made._load_states(Progress(step=4))
    made = loop_of(Wants(None))
    made.run = SimpleNamespace(recorder=Notebook())
    made._load_states(Progress(step=4, components={"ema": {"decay": 0.9}}))
    assert made.run.recorder.said == [
        ("component_gone", 4, "ema"),
        "step 4: this run has no component ema; what it had to remember goes",
    ]
