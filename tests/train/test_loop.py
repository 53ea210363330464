"""The loop and its components: who is called when, what is kept, and who is named when something fails."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint.format import Progress
from megalite.errors import EXIT_DONE, CheckpointError, DataError
from megalite.loop_checks import check_step
from megalite.monitor.recorder import Recorder
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from megalite.train.components.component import Component, RollBack, Step
from megalite.train.loop import ComponentError, Ended, TrainingLoop
from tests.kit.spawn import run_ranks


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
    return made


def test_a_component_that_fails_is_named():
    """The error says which component, of which class, failed where and why; errors for the user stay what they are."""
    step = Step(1, [], range(0), None, 0, 0)
    with pytest.raises(
        ComponentError, match=r"component broken \(.*test_loop\.Broken\) failed in after_step: KeyError"
    ):
        loop_of(Broken(KeyError("x")))._wish("after_step", lambda each: each.after_step(step, None))
    with pytest.raises(DataError, match="as it is"):
        loop_of(Broken(DataError("as it is")))._wish("after_step", lambda each: each.after_step(step, None))


def test_who_asks_to_go_back_ends_the_step():
    """Components in order; behind the first that wants to go back nobody is asked. Those of plug-ins are asked on all
    ranks alike, whatever this one's want; the first wish counts."""
    wish = RollBack(3, "because")
    first, second, third = Wants(None), Wants(wish), Wants(RollBack(1, "never"))
    assert loop_of(first, second, third)._wish("after_step", lambda each: each.after_step(None, None)) is wish
    assert [each.num_calls for each in (first, second, third)] == [1, 1, 0]
    assert loop_of(first)._wish("after_step", lambda each: each.after_step(None, None)) is None
    second.is_brought = third.is_brought = True
    assert loop_of(first, second, third)._wish("after_step", lambda each: each.after_step(None, None)) is wish
    assert third.num_calls == 1


@pytest.mark.parametrize(
    ("wish", "complaint"),
    [
        ((-1, "x"), "before is -1, expected a whole number of at least 0"),
        ((2.0, "x"), "before is 2.0, expected a whole"),
        ((3, None), "why is None, expected text"),
        ((3, "x", -4), "skip_samples is -4, expected a whole number of at least 0"),
    ],
)
def test_a_wish_that_makes_no_sense(wish, complaint):
    """It is refused where it is made."""
    with pytest.raises(ValueError, match=f"RollBack: {complaint}"):
        RollBack(*wish)


def test_who_wants_to_skip_more_than_there_is_is_named():
    """The run's samples are the most."""
    made = loop_of(greedy := Wants(RollBack(3, "because", 10**9)))
    greedy.is_brought = True
    made._control = SimpleNamespace(batch_sizes=SimpleNamespace(first_sample=lambda step: 4 * (step - 1)))
    made.run = SimpleNamespace(plan=SimpleNamespace(total_steps=9))
    with pytest.raises(ComponentError, match="skip_samples is 1000000000, but the run has 36 samples"):
        made._wish("after_step", lambda each: each.after_step(None, None))


class Does(Component):
    """Does something to a step when it is called by some method."""

    name = "does"

    def __init__(self, moment: str, change):
        setattr(self, moment, lambda step, *others: change(step))


def call(made: TrainingLoop, moment: str, step: Step) -> None:
    """The part of the loop in which components are called by a method."""
    if moment == "before_step":
        made.run = SimpleNamespace(heartbeat=SimpleNamespace(enter=lambda *where: None))
        made._step = lambda number, batches: step
        made._train_step(step.number, [])
    elif moment == "measure":
        made._measure(step, None)
    else:
        made._after_step(step, None)


def set_to(name: str, value):
    return lambda step: setattr(step, name, value)


def figure(name: str, value):
    return lambda step: step.figures.update({name: value})


@pytest.mark.parametrize(
    ("moment", "change", "complaint"),
    [
        ("before_step", figure("loss", 1.0), "'loss' stands in metrics.jsonl already"),
        ("before_step", figure("hours", 1.0), "'hours': reports and sweeps have a number of this name"),
        ("measure", figure("validation", 1.0), "'validation': reports and sweeps have a number of this name"),
        ("measure", figure("task/x", 1.0), "'task/x': reports and sweeps have a number of this name"),
        ("before_step", figure("mine", torch.tensor(1.0)), r"figure 'mine' is tensor\(1.\), expected a number"),
        ("before_step", figure("theirs", 2.0), "'theirs' stands in metrics.jsonl already"),
        ("before_step", set_to("lr", float("nan")), "lr is nan, expected a number of at least 0"),
        ("before_step", set_to("lr", -1.0), "lr is -1.0, expected"),
        ("before_step", set_to("lr", True), "lr is True, expected"),
        ("before_step", set_to("lr", None), "lr is None, expected"),
        ("before_step", set_to("lr", torch.tensor(0.1)), r"lr is tensor\(0.1000\), expected .*of a tensor, .item"),
        ("before_step", set_to("clip_norm", "high"), "clip_norm is 'high', expected"),
        ("before_step", set_to("clip_norm", float("inf")), "clip_norm is inf, expected"),
        ("measure", lambda step: step.figures.clear(), "'theirs' stands in metrics.jsonl already; leave it as it is"),
        ("measure", set_to("figures", {"mine": 1.0}), "'theirs' stands in metrics.jsonl already; leave it as it is"),
        ("measure", set_to("figures", None), "TypeError"),
        (
            "before_step",
            set_to("number", 7),
            "number was changed, which is not a component's; it may set lr, clip_norm",
        ),
        ("measure", lambda step: step.batches.append(3), "batches was changed"),
        ("after_step", set_to("batches", [1]), "batches was changed"),
        ("measure", set_to("lr", 0.3), "lr was set to 0.3, which is too late for this step; set it in before_step"),
        ("after_step", figure("mine", 1.0), "'mine' is too late for this step's line; set it in measure"),
        ("after_step", set_to("clip_norm", None), "clip_norm was set to None, which is too late"),
    ],
)
def test_what_a_component_may_not_do_to_a_step(moment, change, complaint):
    """The one that does it is named, whenever it does so."""
    step = Step(1, [], range(0), None, 0, 0, lr=0.1, clip_norm=1.0, figures={"theirs": 1.0})
    with pytest.raises(ComponentError, match=rf"component does \(.*\) failed in {moment}: .*{complaint}"):
        call(loop_of(Does(moment, change)), moment, step)


def test_what_a_component_may_do_to_a_step():
    """Rate, clipping and figures before it, figures behind it; NaN is a number, if none that JSON has."""
    step = Step(1, [], range(0), None, 0, 0, lr=0.1, clip_norm=1.0, figures={"theirs": float("nan")})
    former = replace(step, figures=dict(step.figures))
    step.lr, step.clip_norm = 0, None
    step.figures["mine"] = float("nan")
    check_step("before_step", former, step)
    check_step("measure", replace(former, lr=step.lr, clip_norm=step.clip_norm), step)


class OnOneRank(Component):
    """Ends the run, by what only the second rank knows."""

    name = "on_one_rank"

    def stop_reason(self):
        return "the second rank has seen enough" if dist.get_rank() == 1 else ""


def ends_early() -> tuple[int, list]:
    """How a loop begins anew that has ended early before, and what it writes down when it ends so; of this rank."""
    made, said = loop_of(OnOneRank()), []
    made.run = SimpleNamespace(
        axes=connect(Mesh(dp=2), dist.get_rank()),
        heartbeat=SimpleNamespace(enter=lambda *where: None),
        recorder=SimpleNamespace(event=lambda event, step, **details: said.append(details), say=said.append),
        plan=SimpleNamespace(total_steps=9),
    )
    made._checkpoints = SimpleNamespace(close=lambda: None, finish=lambda *state: None)
    made.progress = Progress(step=4)
    made._validation_loss = made._consumed = lambda: None
    code = made.train()
    made._end(Ended.EARLY)
    return code, said


def test_what_one_rank_finds_ends_the_run_on_all():
    """Also at a restart, where the others would else train on and wait for it; all say why."""
    why = "the second rank has seen enough"
    ended = [{"why": why}, f"stopped early at step 4: {why}", {"consumed": None}]
    said = [f"the run has ended early before: {why}", *ended, *ended]  # again behind its new start, then by itself
    assert run_ranks(ends_early, 2) == [(EXIT_DONE, said)] * 2


class Clumsy(Component):
    """Fails in a method, and notes by what it was called."""

    name = "clumsy"

    def __init__(self, fails_in: str, called: list[str]):
        self._fails_in, self._called = fails_in, called

    def finish(self, step):
        self._note("finish")

    def close(self):
        self._note("close")

    def _note(self, method):
        self._called.append(method)
        if method == self._fails_in:
            raise KeyError("x")


def loop_at_its_end(fails_in: str, called: list[str]) -> TrainingLoop:
    """Of two components of which the first fails, at step 4 of 4."""
    made = loop_of(Clumsy(fails_in, called), Clumsy("", called))
    made.run = SimpleNamespace(
        axes=connect(Mesh(), 0),
        heartbeat=SimpleNamespace(enter=lambda *where: None),
        recorder=SimpleNamespace(event=lambda *about, **details: None, say=called.append),
        plan=SimpleNamespace(total_steps=4),
    )
    made._checkpoints = SimpleNamespace(
        name="checkpoints", finish=lambda *state: called.append("saved"), close=lambda: called.append("closed")
    )
    made.progress = Progress(step=4)
    made._validation_loss = made._consumed = lambda: None
    made._stretch = lambda: Ended.LAST_STEP
    return made


def test_the_last_step_is_saved_whatever_fails_at_the_end():
    """The other components come to their end too; then the failure is told."""
    called = []
    with pytest.raises(ComponentError, match=r"component clumsy .* failed in finish: KeyError: 'x'"):
        loop_at_its_end("finish", called).train()
    assert called == ["finish", "finish", "saved", "closed", "close", "close"]


def test_everything_is_closed_and_nothing_hides_the_error():
    """A failure to close is told where nothing else has failed, and beside what has."""
    called = []
    with pytest.raises(ComponentError, match=r"component clumsy .* failed in close: KeyError: 'x'"):
        loop_at_its_end("close", called).train()
    assert called == ["finish", "finish", "saved", "closed", "close", "close"]
    made = loop_at_its_end("close", called := [])
    made._stretch = lambda: 1 / 0
    made._checkpoints.close = lambda: [][0]
    with pytest.raises(ZeroDivisionError):
        made.train()
    assert called[:2] == ["close", "close"]
    assert [each.rpartition(" failed ")[2] for each in called[2:]] == [
        "in close: IndexError: list index out of range",
        "in close: KeyError: 'x'",
    ]


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

    note = Recorder.note


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
