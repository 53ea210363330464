"""What people say about a mixture becomes weights and stages, and the plan counts what the order really holds."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megalite.data.mix import BLOCK, CYCLE, MixStage, Mixture, StagedMixture
from megalite.data.mix_plan import (
    MixPlan,
    MixSettings,
    SourceSize,
    StageSettings,
    plan_mix,
    render,
    resolve_stages,
)
from megalite.errors import DataError

SEQ_LEN = 10

SOURCES = (SourceSize("web", 8000, 80_000), SourceSize("books", 1000, 10_000), SourceSize("code", 1000, 9_000))


def resolve(weights=(1, 1, 1), *, total_samples: int | None = None, read=None, **said) -> tuple[MixStage, ...]:
    return resolve_stages(SOURCES, weights, MixSettings(**said), SEQ_LEN, total_samples, read or {})


def shares(stage: MixStage) -> list[float]:
    return (np.array(stage.weights) / sum(stage.weights)).tolist()


def plan_of(stages: tuple[MixStage, ...], total_samples: int) -> MixPlan:
    return plan_mix(StagedMixture(stages), SOURCES, seq_len=SEQ_LEN, total_samples=total_samples)


def test_passes_that_are_left():
    """Of a run that is made longer: 1000 of 2000 samples of books are read, or more than all; web has the rest."""
    for read, books in ((1000, 1000), (3000, 0)):
        done = {"web": 4000, "books": read, "gone": 1000}
        (stage,) = resolve((1, 1, 1), total_samples=20_000, epochs={"books": 2.0, "code": 1}, read=done)
        rest = 20_000 - sum(done.values())
        assert shares(stage) == pytest.approx([(rest - books - 1000) / rest, books / rest, 1000 / rest])
    with pytest.raises(DataError, match="1,000 samples are asked for beside those that are read and the rest"):
        resolve(total_samples=5990, epochs={"books": 2.0}, read={"web": 4000, "books": 1000})
    (rounded,) = resolve(total_samples=5999, epochs={"books": 2.0}, read={"web": 4000, "books": 1000})
    assert shares(rounded) == [0, 1, 0], "a sample less than is asked for, by the rounding of what was read"
    (ended,) = resolve(total_samples=5000, epochs={"books": 2.0}, read={"web": 4000, "books": 1000})
    assert shares(ended)[1] == pytest.approx(2000 / 5000)
    (all_asked,) = resolve(epochs={"web": 1, "books": 2, "code": 1}, read={"web": 2000, "books": 2000})
    assert shares(all_asked) == pytest.approx([6 / 7, 0, 1 / 7])


def test_nothing_said_is_no_stage():
    """Then the order is that of the weights alone, as it always was."""
    assert resolve() == ()


@pytest.mark.parametrize(
    ("temperature", "weights", "expected"),
    [
        (1.0, (1, 1, 1), np.array([80, 10, 9]) / 99),
        (1.0, (1, 2, 1), np.array([80, 20, 9]) / 109),
        (2.0, (1, 1, 1), np.sqrt([80, 10, 9]) / np.sqrt([80, 10, 9]).sum()),
        (1e9, (1, 1, 1), np.full(3, 1 / 3)),
    ],
)
def test_temperature(temperature, weights, expected):
    """p ~ weight x tokens^(1/T): 1 follows the sizes, where 2 as a weight doubles a source; very large evens out."""
    (stage,) = resolve(weights, temperature=temperature)
    assert stage.stop is None
    assert shares(stage) == pytest.approx(expected.tolist(), rel=1e-6)


def test_epochs_of_all_sources():
    """Their ratio decides; a run of the length that they add up to holds exactly so many passes."""
    stages = resolve(epochs={"web": 1, "books": 4, "code": 2})
    plan = plan_of(stages, 8000 + 4000 + 2000)
    assert plan.epochs == pytest.approx((1, 4, 2), abs=0.001)


def test_epochs_beside_weights():
    """The named source gets its passes, the others share the rest 3 : 1."""
    plan = plan_of(resolve((3, 1, 1), epochs={"code": 2}, total_samples=10_000), 10_000)
    assert plan.samples == (6000, 2000, 2000)
    assert plan.epochs == (0.75, 2.0, 2.0)


def test_stages_by_tokens_and_by_share():
    """Borders are rounded up to whole samples, and the last stage has no end."""
    stages = resolve(
        total_samples=1000,
        stages=(
            StageSettings(until_tokens=2001, weights={"web": 1}),
            StageSettings(share=0.5),
            StageSettings(weights={"books": 3, "code": 1}),
        ),
    )
    assert [stage.stop for stage in stages] == [201, 701, None]
    assert [stage.weights for stage in stages] == [(1, 0, 0), (1, 1, 1), (0, 3, 1)]
    plan = plan_of(stages, 1001)
    assert [(stage.first_sample, stage.stop_sample) for stage in plan.stages] == [(0, 201), (201, 701), (701, 1001)]
    assert plan.stages[0].samples == (201, 0, 0)
    assert sum(plan.stages[1].samples) == 500
    assert max(plan.stages[1].samples) - min(plan.stages[1].samples) <= 1
    assert plan.stages[2].samples == (0, 225, 75)
    assert sum(plan.tokens) == 1001 * SEQ_LEN


def test_a_run_that_ends_inside_an_early_stage():
    """Later stages are not in its plan."""
    stages = (MixStage(100, (1, 1, 0)), MixStage(None, (0, 0, 1)))
    plan = plan_of(stages, 60)
    assert [stage.samples for stage in plan.stages] == [(30, 30, 0)]


@given(
    lengths=st.lists(st.integers(1, 3000), max_size=3),
    weights=st.lists(st.tuples(*[st.floats(0, 1)] * 3).filter(any), min_size=4, max_size=4),
    total=st.integers(1, 6000),
)
@settings(max_examples=12, deadline=None)
def test_the_plan_counts_the_order_itself(lengths, weights, total):
    """Against drawing every sample of the run and counting."""
    stops = [*np.cumsum(lengths).tolist(), None]
    stages = tuple(MixStage(stop, own) for stop, own in zip(stops, weights, strict=False))
    mixture = StagedMixture(stages)
    drawn, _ = mixture.draw(np.arange(total))
    plan = plan_mix(mixture, SOURCES, seq_len=SEQ_LEN, total_samples=total)
    assert plan.samples == tuple(np.bincount(drawn, minlength=3).tolist())
    for stage in plan.stages:
        own = np.bincount(drawn[stage.first_sample : stage.stop_sample], minlength=3)
        assert stage.samples == tuple(own.tolist())
        assert sum(stage.samples) == stage.num_samples


def test_plan_of_plain_weights_and_of_a_trillion_samples():
    """The old order is counted too, and the length of the run costs nothing."""
    plan = plan_mix(Mixture((2, 1, 1)), SOURCES, seq_len=SEQ_LEN, total_samples=10**12)
    assert plan.samples == (5 * 10**11, 25 * 10**10, 25 * 10**10)
    assert plan.epochs == (5e11 / 8000, 25e7, 25e7)
    staged = plan_of((MixStage(10**12 - 4, (1, 0, 0)), MixStage(None, (0, 1, 1))), 10**12)
    assert staged.samples == (10**12 - 4, 2, 2)


def test_warnings():
    """More than four passes, and a source that is never read; four are none."""
    plan = plan_of((MixStage(None, (0, 5, 4)),), 9000)
    assert plan.epochs == (0, 5, 4)
    first, second = plan.warnings
    assert first == "web: not read at all in this run"
    assert second.startswith("books: read 5.0 times; passes beyond 4 or so bring little (Muennighoff et al. 2023)")


def test_the_table_shows_stages_and_warnings():
    """As people see it: a column for each stage, tokens, epochs with a mark, the warning below."""
    plan = plan_of((MixStage(100, (1, 1, 0)), MixStage(None, (0, 1, 0))), 5100)
    console = Console(width=160, file=io.StringIO())
    console.print(render(plan))
    text = console.file.getvalue()
    assert "51,000 tokens in 5,100 sequences of 10" in text
    books = next(line for line in text.splitlines() if "books" in line)
    for cell in ("10,000", "50.00 %", "100.00 %", "50,500", "99.02 %", "5.05 !"):
        assert cell in books
    assert "stage 2" in text
    assert "from 1,000" in text
    assert "books: read 5.0 times" in text


BAD = {
    "temperature": ({"temperature": 0.0}, "data.mix.temperature: 0.0 found; give a positive number"),
    "unknown source": ({"epochs": {"wep": 1}}, "data.mix.epochs.wep: no such source; there are web, books, code"),
    "no length for the rest": ({"epochs": {"web": 1}}, "the length of the run is needed to share out the rest"),
    "no epochs": ({"epochs": {"web": 0, "books": 1, "code": 1}}, "data.mix.epochs.web: 0 found, a positive number"),
    "end of the last": ({"stages": (StageSettings(share=0.5),)}, "stages.0: the last stage goes on to the end"),
    "no end": ({"stages": (StageSettings(), StageSettings())}, "stages.0: none of until_tokens and share found"),
    "two ends": (
        {"stages": (StageSettings(until_tokens=10, share=0.1), StageSettings())},
        "stages.0: both of until_tokens and share found",
    ),
    "share without a length": (
        {"stages": (StageSettings(share=0.1), StageSettings())},
        "stages.0.share: the length of the run is needed; set train.tokens",
    ),
    "share": ({"stages": (StageSettings(share=1.5), StageSettings())}, "stages.0.share: 1.5 found, a part between"),
    "tokens": ({"stages": (StageSettings(until_tokens=0), StageSettings())}, "until_tokens: 0 found, 1 or more"),
    "weights": (
        {"stages": (StageSettings(weights={"web": -1, "x": 1}),)},
        "stages.0.weights.web: -1 found, 0 or more expected\ndata.mix.stages.0.weights.x: no such source",
    ),
    "no weight": ({"stages": (StageSettings(weights={"web": 0}),)}, "stages.0.weights: no source has a positive"),
    "epochs and stages": (
        {"epochs": {"web": 1, "books": 1, "code": 1}, "stages": (StageSettings(weights={"web": 1}),)},
        "stages with weights of their own decide how often a source is read; drop one",
    ),
    "order of stages": (
        {"stages": (StageSettings(until_tokens=100), StageSettings(until_tokens=100), StageSettings())},
        "data.mix.stages.1: it ends at sample 10 of the run and begins at 10, so it holds none",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_named(case):
    """What was found, where, and what to do."""
    said, message = BAD[case]
    with pytest.raises(DataError) as caught:
        resolve(**said)
    assert message in str(caught.value)


def test_epochs_that_fill_the_run_leave_nothing_for_others():
    """8,000 samples of web in a run of 8,000."""
    with pytest.raises(DataError, match="8,000 samples are asked for and the run has 8,000, which leaves nothing"):
        resolve(epochs={"web": 1}, total_samples=8000)


def test_shares_are_met_within_a_cycle():
    """What the plan cannot promise: weights are rounded to a hundred-millionth."""
    plan = plan_of((MixStage(None, (1, 1e-9, 0)),), CYCLE * BLOCK)
    assert plan.samples == (CYCLE * BLOCK - 1, 1, 0)
