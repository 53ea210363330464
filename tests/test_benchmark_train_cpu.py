"""The benchmark of training speed: peers have their best lines, and a ratio is taken within a round and told with how
far it moved."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from tests.kit.paths import ROOT


@pytest.fixture
def benchmark(monkeypatch):
    """The script and its cases, which import each other by bare names."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "benchmarks"))
    import cases
    import train_cpu

    yield train_cpu, cases
    for name in ("arguments", "cases", "plain_llama", "train_cpu"):
        sys.modules.pop(name, None)


def test_peers_have_their_best_lines(benchmark):
    """Compiled, "medium" and bf16, alone and on two ranks; every case of ours is held against all of its group."""
    train_cpu, cases = benchmark
    entries = {entry.name: entry for entry in train_cpu.entries(8192)}
    jobs = {name: cases.Job(**entry.job) for name, entry in entries.items()}
    for peer in ("plain compiled", "DDP compiled", "litgpt"):
        assert jobs[peer].compile
        assert jobs[f"{peer} medium"].matmul == "medium"
        assert jobs[f"{peer} bf16"].bf16
    for case in ("DDP static", "DDP static medium", "DDP static bf16"):
        assert jobs[case] == dataclasses.replace(jobs[case.replace("static", "compiled")], static=True)
    for case in ("megalite", "megalite dp2", "megalite tp2"):
        assert jobs[f"{case} medium"] == dataclasses.replace(jobs[case], matmul="medium")
    names = list(entries)
    for name, entry in entries.items():
        assert set(entry.against) <= set(names[: names.index(name)])
        assert entry.asked is None or entry.asked[0] in entry.against
        if name.startswith("megalite") and entry.group != "pp2":
            peers = {peer for peer in names if entries[peer].group == entry.group and "megalite" not in peer}
            assert set(entry.against) == peers


def test_ratios_are_of_one_round(benchmark):
    """A machine that is twice as fast in one round changes no ratio, and a round that a peer lacks is left out."""
    train_cpu, _ = benchmark
    pair = [train_cpu.Entry("peer", "g", 1, {}), train_cpu.Entry("ours", "g", 1, {}, ("peer", "absent"))]
    results = {
        "peer": {number: figures(100.0 * pace, 500.0) for number, pace in ((0, 1), (2, 4))},
        "ours": {number: figures(110.0 * pace, 400.0) for number, pace in enumerate((1, 9, 4))},
    }
    rows = train_cpu.summarise(pair, results)
    assert rows[1]["ratios"] == {"peer": {"tokens_per_second": 1.1, "tokens_per_cpu_second": 1.1, "peak_rss_mb": 0.8}}
    assert rows[1]["tokens_per_second"] == 440.0


def test_ratios_say_how_far_they_moved(benchmark, capsys):
    """The least and the most of the rounds, where there was more than one."""
    train_cpu, _ = benchmark
    pair = [train_cpu.Entry("peer", "g", 1, {}), train_cpu.Entry("ours", "g", 1, {}, ("peer",))]
    results = {
        "peer": dict(enumerate([figures(100.0, 500.0)] * 3)),
        "ours": dict(enumerate(figures(speed, 400.0) for speed in (93.0, 110.0, 130.0))),
    }
    rows = train_cpu.summarise(pair, results)
    assert rows[1]["ratios"]["peer"]["tokens_per_second"] == 1.1
    moved, level = [0.93, 1.3], [0.8, 0.8]
    by_cpu = {"tokens_per_second": moved, "tokens_per_cpu_second": moved, "peak_rss_mb": level}
    assert rows[1]["spread"] == {"peer": by_cpu}
    train_cpu.show(rows)
    assert "1.10 [0.93 to 1.30] x (1.10 [0.93 to 1.30] by CPU time) peer, 0.80 of its memory" in capsys.readouterr().out


def figures(speed: float, memory: float) -> dict[str, float]:
    return {"tokens_per_second": speed, "tokens_per_cpu_second": speed / 2.0, "peak_rss_mb": memory}


def test_ranks_are_compiled_too(benchmark, monkeypatch):
    """DDP's own line is compiled where that is asked for: what the steps call is torch.compile's. And it has a static
    graph where that is."""
    _, cases = benchmark
    asked, given = [], []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(cases.torch, "compile", lambda model: asked.append(type(model).__name__))
    ddp = type("DDP", (), {"__init__": lambda self, model, **options: given.append(options)})
    monkeypatch.setattr(cases.torch.nn.parallel, "DistributedDataParallel", ddp)
    for is_static in (False, True):
        cases.plain_step(cases.Job("plain", vocab=8, compile=True, static=is_static))
    assert asked == ["DDP"] * 2
    assert given == [{}, {"static_graph": True, "gradient_as_bucket_view": True}]
