"""The simulation of a cluster against what can be said in closed form, and its plan against arithmetic by hand."""

from __future__ import annotations

import importlib
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).parents[3] / "tools" / "benchmarks"

NUM_SEEDS = 300

STANDARD_ERRORS = 4.0
"""How far a mean over seeds may lie from its expectation."""


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("data_scale")


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("data_scale_simulation")


def phase(engine, num_tasks: int, cpu_seconds: float = 0.0, **amounts: float):
    defaults = {"bytes_read": 0.0, "bytes_written": 0.0, "small_reads": 0.0, "memory": 0.0}
    return engine.Phase("station", "phase", num_tasks, cpu_seconds, **{**defaults, **amounts})


def run(engine, one, cluster, trouble=None, seed=0):
    (outcome,) = engine.simulate([one], cluster, trouble, seed=seed)
    return outcome


@pytest.mark.parametrize(("num_tasks", "waves"), [(1, 1), (5, 1), (6, 1), (7, 2), (12, 2), (13, 3)])
def test_equal_tasks_run_in_waves(engine, num_tasks, waves):
    """Six workers, nothing else: as many waves as are needed, each as long as a task."""
    outcome = run(engine, phase(engine, num_tasks, 7.0), engine.Cluster(nodes=2, cores=3))
    assert outcome.seconds == pytest.approx(7.0 * waves)
    assert (outcome.runs, outcome.lost) == (num_tasks, 0)
    assert outcome.busy_seconds == pytest.approx(7.0 * num_tasks)


def test_moving_bytes_takes_what_the_disk_gives(engine):
    """A phase that only moves bytes takes all of them over the bandwidth: the disk's, or the nodes' if that is less."""
    moving = phase(engine, 40, bytes_read=3e9, bytes_written=1e9)
    shared = engine.Cluster(nodes=10, cores=4, disk_gbs=20.0, node_gbs=100.0)
    assert run(engine, moving, shared).seconds == pytest.approx(40 * 4 / 20)
    own = engine.Cluster(nodes=10, cores=4, disk_gbs=1000.0, node_gbs=2.0)
    assert run(engine, moving, own).seconds == pytest.approx(4 * 4 / 2)
    alone = phase(engine, 1, bytes_read=3e9, bytes_written=1e9)
    assert run(engine, alone, own).seconds == pytest.approx(4 / 2)


def test_small_reads_take_what_the_disk_answers(engine):
    """All of them over the rate of the disk, however many tasks ask."""
    cluster = engine.Cluster(nodes=5, cores=2, reads_per_second=1000.0)
    assert run(engine, phase(engine, 20, small_reads=500.0), cluster).seconds == pytest.approx(20 * 500 / 1000)


def test_computing_and_moving_add_up(engine):
    """A worker reads, then computes, then writes."""
    cluster = engine.Cluster(nodes=1, cores=2, disk_gbs=2.0, node_gbs=2.0, reads_per_second=10.0)
    outcome = run(engine, phase(engine, 2, 5.0, bytes_read=3e9, small_reads=10.0), cluster)
    assert outcome.seconds == pytest.approx(5 + 3 / 1 + 10 * 2 / 10)


def test_a_phase_waits_for_slow_nodes(engine):
    """One wave on slow nodes takes their time; many short tasks share the work by speed."""
    cluster, slow = engine.Cluster(nodes=4, cores=5), engine.Trouble(slow_share=1.0, slow_factor=3.0)
    assert run(engine, phase(engine, 20, 2.0), cluster, slow).seconds == pytest.approx(6.0)
    some = engine.Trouble(slow_share=0.5, slow_factor=3.0)
    cluster = engine.Cluster(nodes=40, cores=1)
    slow_nodes = sum(node.slowness > 1 for node in _nodes(engine, cluster, some))
    assert 0 < slow_nodes < 40
    speed = (40 - slow_nodes) + slow_nodes / 3
    outcome = run(engine, phase(engine, 40_000, 1.0), cluster, some)
    assert outcome.seconds == pytest.approx(40_000 / speed, rel=0.01)


def _nodes(engine, cluster, trouble, seed=0):
    """The nodes that a simulation makes first of all."""
    rng = np.random.default_rng(seed)
    slow = rng.random(cluster.nodes) < trouble.slow_share
    return [engine.Node(trouble, trouble.slow_factor if each else 1.0, rng) for each in slow]


def test_a_task_that_fails_is_done_again_until_it_ends(engine):
    """One worker, one task of d hours, a failure every 1/r hours, R hours lost with each: (1/r + R) (e^(rd) - 1)."""
    trouble = engine.Trouble(hours_between_failures=1.5, minutes_to_notice=3.0, minutes_to_repair=12.0)
    cluster = engine.Cluster(nodes=1, cores=1)
    outcomes = [run(engine, phase(engine, 1, 7200.0), cluster, trouble, seed) for seed in range(NUM_SEEDS)]
    hours = [outcome.seconds / 3600 for outcome in outcomes]
    expected = (1.5 + 0.2) * math.expm1(2 / 1.5)
    error = statistics.stdev(hours) / math.sqrt(NUM_SEEDS)
    assert abs(statistics.mean(hours) - expected) < STANDARD_ERRORS * error
    lost = statistics.mean(outcome.lost for outcome in outcomes)
    assert lost == pytest.approx(math.expm1(2 / 1.5), rel=STANDARD_ERRORS * 1.2 / math.sqrt(NUM_SEEDS))


def test_nothing_is_lost_or_done_twice(engine):
    """With all kinds of trouble every task is done once, a seed decides all, and trouble never makes it faster."""
    trouble = engine.Trouble(0.3, 0.1, 2.0, hours_between_failures=0.5, minutes_to_notice=1.0, minutes_to_repair=10.0)
    cluster = engine.Cluster(nodes=8, cores=4)
    phases = [phase(engine, 500, 60.0), phase(engine, 3, 600.0), phase(engine, 1, 60.0)]
    outcomes = engine.simulate(phases, cluster, trouble, seed=5)
    assert [outcome.runs for outcome in outcomes] == [500, 3, 1]
    assert sum(outcome.lost for outcome in outcomes) > 0
    assert engine.simulate(phases, cluster, trouble, seed=5) == outcomes
    assert engine.simulate(phases, cluster, trouble, seed=6) != outcomes
    calm = engine.simulate(phases, cluster)
    assert sum(each.seconds for each in outcomes) > sum(each.seconds for each in calm)


def costs(scale):
    """A second for each 100 MB of text, and for each million documents, in every phase."""
    names = {
        "clean": ("clean",),
        "dedup": ("hash", "match", "keep"),
        "near-dedup": ("sign", "match", "cluster", "mask", "write"),
        "substring-dedup": ("substring-windows", "substring-repeats", "substring-spans", "write"),
        "tokens/train": ("encode",),
        "packed/train": ("all",),
    }
    of_text, of_documents = scale.Cost(byte=1e-8), scale.Cost(document=1e-6)
    return {
        f"{station}/{name}": of_documents if name in ("match", "cluster", "mask") else of_text
        for station, phases in names.items()
        for name in phases
    }


def test_the_plan_is_the_arithmetic_of_the_stations(scale):
    """10 TB of 2 billion documents, reckoned by hand."""
    corpus = scale.Corpus(10e12, 5000.0, compression=2.5, clean_keeps=0.5, dedup_keeps=0.8, near_keeps=0.75)
    phases = {f"{each.station}/{each.name}": each for each in scale.stations(corpus, costs(scale), task_memory=1e9)}
    clean = phases["clean/clean"]
    assert clean.num_tasks == 39_063  # of 256 MB
    assert clean.num_tasks * clean.cpu_seconds == pytest.approx(1e5)
    assert clean.num_tasks * clean.bytes_read == pytest.approx(4e12)
    match = phases["dedup/match"]
    assert match.num_tasks == 60  # of 2**24 of a billion
    assert match.num_tasks * match.bytes_read == pytest.approx(24e9)
    assert match.small_reads == 19_532  # a slice of every shard of 5 TB
    bands = phases["near-dedup/match"]
    assert bands.num_tasks == 3052  # 800 million documents, 32 bands, 2**23 entries
    assert bands.num_tasks * bands.bytes_read == pytest.approx(8e8 * (12 * 32 + 0.3 * 1024))
    assert bands.memory == pytest.approx(scale.BATCH_MEMORY + 50 * 2**23, rel=0.01)
    assert phases["near-dedup/cluster"].num_tasks == 1
    assert phases["near-dedup/cluster"].cpu_seconds == pytest.approx(800)
    passages = phases["substring-dedup/repeats"]
    assert passages.num_tasks == 4500  # 3 TB and 5 bytes for each of a tenth of them, in parts of 1 GB
    encode = phases["tokens/train/encode"]
    assert encode.num_tasks * encode.bytes_written == pytest.approx(2 * 2.7e12 / 4.2)


def test_shards_are_those_of_the_stations(scale):
    """The tool's size of a shard is that of the package."""
    from megalite.corpus.shards import shard_size

    for text in (1e6, 3e8, 1e9, 5e10, 1e12, 1e14):
        assert scale.shard_size(text) == pytest.approx(shard_size(text), abs=1)


def test_costs_come_from_the_largest_corpus_that_was_measured(scale, tmp_path):
    """Text-bound phases by byte, comparing phases by document; a station without tasks as a whole."""
    clean = {"text_bytes_in": 1000, "text_bytes": 800, "documents_in": 10, "documents": 8, "cpu_seconds": 3.0}
    near = {"text_bytes_in": 800, "documents_in": 8, "documents": 6, "text_bytes": 700, "cpu_seconds": 9.0}
    phases = {"sign": {"cpu_seconds": 4.0}, "match-8": {"cpu_seconds": 2.0}}
    large = {
        "clean": {**clean, "phases": {"clean": {"cpu_seconds": 2.0}}},
        "near-dedup": {**near, "phases": phases},
        "packed/train": {"documents": 6, "cpu_seconds": 7.0, "phases": {}},
    }
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"sizes": {"5": {}, "25": large}}))
    found = scale.read_costs(path)
    assert found["clean/clean"] == scale.Cost(byte=0.002)
    assert found["near-dedup/sign"] == scale.Cost(byte=0.005)
    assert found["near-dedup/match"] == scale.Cost(document=0.25)
    assert found["packed/train/all"] == scale.Cost(byte=0.01)
