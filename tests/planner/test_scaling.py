"""Curves over the number of ranks: each point the best that the search finds there."""

from __future__ import annotations

import time

import pytest

from megalite.config.schema import Config
from megalite.errors import UserError
from megalite.planner.machines import load_machine
from megalite.planner.scaling import rank_counts, scaling, without_layout
from megalite.planner.search import search

H100 = load_machine("h100-sxm")
SMALL = {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "ffn_hidden_size": 5632, "vocab_size": 32000}
LARGE = {"preset": "llama-70b"}


def config(model: dict, **sections) -> Config:
    batch = {"global_batch_size": 512, "seq_len": 2048, **sections.pop("batch", {})}
    return Config(**{"model": model, "batch": batch, "train": {"steps": 1000}, **sections})


def test_ranks_grow_by_whole_nodes():
    assert rank_counts(H100, 1024) == [8, 32, 128, 512, 1024]
    assert rank_counts(H100, 8) == [8]
    assert rank_counts(H100, 4) == [4]


def test_points_are_the_best_of_the_search():
    """With the batch of the point; what is kept is against the first one's tokens a second and rank."""
    counts = [8, 32, 128]
    points = scaling(config(SMALL), H100, counts)
    assert [(each.kind, each.ranks) for each in points] == [(kind, n) for kind in ("strong", "weak") for n in counts]
    for point in points:
        wanted = 512 if point.kind == "strong" else 512 * point.ranks // 8
        assert point.global_batch_size == wanted
        (best,) = search(config(SMALL, batch={"global_batch_size": wanted}), point.ranks, H100, top=1).best
        assert point.best.seconds == best.seconds
        assert point.best.overrides == best.overrides
        rate = best.tokens_per_second / point.ranks
        assert point.efficiency == pytest.approx(rate / (points[0].best.tokens_per_second / 8))
    strong, weak = points[:3], points[3:]
    assert all(one.efficiency <= other.efficiency + 1e-9 for one, other in zip(strong, weak, strict=True))


def test_it_begins_where_the_model_fits():
    points = scaling(config(LARGE), H100, [8, 32, 128])
    assert {each.ranks for each in points} == {32, 128}
    assert without_layout(points, [8, 32, 128]) == [
        f"{kind} scaling has no point on 8 ranks: no layout fits, or divides the batch, there"
        for kind in ("strong", "weak")
    ]
    assert without_layout(points, [32, 128]) == []


def test_a_refusal_speaks_of_options_that_the_verb_has():
    """Of the most ranks on which there is a layout at all; and what it says helps."""
    for counts in ([8], [8, 131]):
        with pytest.raises(UserError, match=r"no layout fits: .* it fits with --to \d+ or optimizer") as told:
            scaling(config(LARGE), H100, counts)
        ranks = int(str(told.value).split("--to ")[1].split(" ")[0])
        assert scaling(config(LARGE), H100, [*counts, ranks])
    with pytest.raises(UserError, match=r"change --to, or the batch, or .* with megalite plan CONFIG --as-is"):
        scaling(config(LARGE, batch={"global_batch_size": 8}), H100, [77])


def test_a_batch_that_soon_ends_the_run_is_no_obstacle():
    """A run of so many tokens would be over before its warm-up."""
    short = config(SMALL, train={"tokens": 5e9}, schedule={"warmup_steps": 2000})
    assert len(scaling(short, H100, [8, 512])) == 4


def test_up_to_16384_ranks_is_quick():
    """By the process' own clock."""
    begin = time.process_time()
    points = scaling(config(LARGE, batch={"global_batch_size": 1024, "seq_len": 8192}), H100, rank_counts(H100, 16384))
    assert time.process_time() - begin < 10.0
    assert points[-1].ranks == 16384


@pytest.mark.parametrize(
    "sections",
    [
        {"batch": {"stages": [{"from_step": 200_001, "seq_len": 4096}]}, "train": {"steps": 300_000}},
        {"schedule": {"name": "wsd", "decay_steps": 200_000}, "train": {"steps": 300_000}},
        {
            "schedule": {"name": "piecewise", "phases": [{"until_step": 150_000, "min_lr": 1e-5}, {"name": "linear"}]},
            "train": {"steps": 300_000},
        },
    ],
    ids=["stages", "decay", "phases"],
)
def test_what_begins_late_in_a_run_is_no_obstacle(sections: dict):
    assert len(scaling(config({**SMALL, "max_positions": 4096}, **sections), H100, [8, 32])) == 4


@pytest.mark.parametrize(
    "batch",
    [
        {"stages": [{"from_step": 100, "seq_len": 4096, "global_batch_size": 8}, {"from_step": 200, "seq_len": 8192}]},
        {"stages": [{"from_tokens": 2048 * 60, "seq_len": 4096}, {"from_tokens": 2048 * 120, "seq_len": 8192}]},
        {"ramp": {"start_size": 4, "samples": 2048}},
        {"noise_scale": {"max_batch_size": 32}},
    ],
    ids=["sizes of stages", "tokens of stages", "ramp", "noise scale"],
)
def test_all_sizes_of_a_batch_grow(batch: dict):
    """A batch that is just enough for eight ranks is so in every step on the 512."""
    base = config({**SMALL, "num_layers": 2, "max_positions": 8192}, batch={"global_batch_size": 8, **batch})
    weak = [each for each in scaling(base, H100, [8, 512]) if each.kind == "weak"]
    assert [(each.ranks, each.global_batch_size) for each in weak] == [(8, 8), (512, 512)]
