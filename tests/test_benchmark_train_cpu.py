"""The benchmark of training speed: peers have their best lines, and a ratio is taken within a round."""

from __future__ import annotations

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


def figures(speed: float, memory: float) -> dict[str, float]:
    return {"tokens_per_second": speed, "tokens_per_cpu_second": speed / 2.0, "peak_rss_mb": memory}


def test_ranks_are_compiled_too(benchmark, monkeypatch):
    """DDP's own line is compiled where that is asked for: what the steps call is torch.compile's."""
    _, cases = benchmark
    asked = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(cases.torch, "compile", lambda model: asked.append(type(model).__name__))
    monkeypatch.setattr(
        cases.torch.nn.parallel, "DistributedDataParallel", type("DDP", (), {"__init__": lambda *_: None})
    )
    cases.plain_step(cases.Job("plain", vocab=8, compile=True))
    assert asked == ["DDP"]
