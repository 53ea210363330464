"""This machine as a file for the planner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, cycle
from pathlib import Path

import pytest
import torch

from megalite.cli.main import main
from megalite.config.load import load_config
from megalite.config.plan import make_plan
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE
from megalite.planner.machines import load_machine
from megalite.studies import calibrate, peaks
from megalite.studies.bench import Bench
from megalite.studies.calibrate import allocator_of_training
from megalite.train.fork_server import RANK_MEMORY

ROOT = Path(__file__).parents[2]
TINY = (
    str(ROOT / "configs" / "debug.yaml"),
    *("train.device=cpu", "model.hidden_size=64", "model.num_heads=2", "model.num_kv_heads=2"),
    *("model.ffn_hidden_size=128", "batch.seq_len=64", "batch.micro_batch_size=2"),
)


def test_a_machine_is_measured(tmp_path: Path):
    """Two ranks: a file that loads, with rates that a computer can have, and a source for each number."""
    out = tmp_path / "mine.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["plan", "calibrate", *TINY, "--ranks", "2", "--out", str(out)])
    assert ended.value.code == EXIT_DONE
    found = load_machine(str(out))
    assert found.ranks_per_node == 2
    assert 1e9 < found.flops["fp32"] < 1e14
    assert 1e8 < found.memory_bandwidth < 1e13
    assert 1e6 < found.link < 1e12
    assert 0.0 < found.constants.products <= 1.0
    assert 0.0 < found.attention < 2.0
    assert found.flops.keys() == {"fp32", "bf16"}
    assert (found.host_link, found.host_memory_gib) == (None, None)  # which only a GPU has beside its own
    assert found.meeting is None or found.constants.overhead < found.meeting < 1.0
    assert 0.0 < found.constants.overhead < 1.0  # beside other work, what blocks take may be lost in it
    assert all("calibrate" in source or "not measured" in source for source in found.sources.values())


def bench(*overrides: str) -> Bench:
    config = load_config(Path(TINY[0]), [*TINY[1:], *overrides])
    return Bench(config, make_plan(config, 1, 512).model, torch.device("cpu"))


@pytest.mark.parametrize("overrides", [(), ("model.sliding_window=80",), ("model.qk_norm=true", "batch.seq_len=32")])
def test_attention_is_measured_over_products(overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """What documents of four times the length take longer, forward and 2.5 times that backward, as the planner counts
    them; a rate that cannot be is none."""
    tiny = bench(*overrides)
    length, window = tiny.config.batch.seq_len, 80 if "model.sliding_window=80" in overrides else None
    spans = [mean_span(length, window), mean_span(4 * length, window)]
    flops = 3.5 * 2 * 2 * 256 * 64 * (spans[1] - spans[0])
    for rate, share in ((3e10, flops / 1e-3 / 3e10), (1e6, None), (1e30, None)):
        clock = chain([2e-3, 3e-3], cycle([3e-3, 2e-3]))  # both once, then in turns, the longer ones first
        monkeypatch.setattr(Bench, "_once", lambda _, work, clock=clock: (work(), next(clock))[1])
        found = calibrate._attention(tiny, 256, rate)
        assert (found is None) == (share is None)
        assert share is None or found == pytest.approx(share)


def mean_span(length: int, window: int | None) -> float:
    """Tokens that a token sees, half of itself counted."""
    seen = [min(position + 0.5, window or length) for position in range(length)]
    return sum(seen) / length


def test_attention_that_drops_weights_is_not_measured():
    assert bench("model.attention_dropout=0.1").attention_seconds(128, (64, 128)) is None


def test_what_is_measured_of_a_gpu_alone_runs_here(monkeypatch: pytest.MonkeyPatch):
    """Copies to the host, at the slower way's rate; and products of formats that CPUs are not asked for, after which
    fp32's are as exact as before."""
    ways: Iterator[float] = iter([1.0, 4.0])
    monkeypatch.setattr(Bench, "seconds", lambda _, work: (work(), next(ways))[1])
    monkeypatch.setattr(calibrate, "COPIED_BYTES", 1024)
    assert calibrate._host_link_rate(bench()) == 256.0
    before, seen = torch.get_float32_matmul_precision(), []

    def measured(_: torch.device, dtype: torch.dtype, size: int) -> tuple[float, int]:
        seen.append((dtype, torch.get_float32_matmul_precision() if dtype == torch.float32 else None))
        return 5.0, size

    monkeypatch.setattr(peaks, "measure_gemm_flops", measured)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    formats = peaks.formats_of(torch.device("cuda"))
    assert [peaks.peak(torch.device("cpu"), name) for name in formats] == [5.0] * 4
    assert seen == [(torch.float32, before), (torch.bfloat16, None), (torch.float16, None), (torch.float32, "high")]
    assert torch.get_float32_matmul_precision() == before
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "tf32" not in peaks.formats_of(torch.device("cuda"))


def test_products_in_fp8_are_measured_of_those_that_have_units(monkeypatch: pytest.MonkeyPatch):
    """From Ada on, by the product that training asks for; what is no quicker than bf16 is left out of the file, which
    would be refused with it."""
    cuda = torch.device("cuda")
    for capability, has_it in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert ("fp8" in peaks.formats_of(cuda)) == has_it
    monkeypatch.setitem(peaks.SIZE, "cpu", 64)
    assert 0.0 < peaks.peak(torch.device("cpu"), "fp8") < 1e12
    for fp8, expected in ((3.0, {"bf16": 2.0, "fp8": 3.0}), (1.0, {"bf16": 2.0})):
        assert peaks.worth_planning_with({"bf16": 2.0, "fp8": fp8}) == expected


def test_products_are_calibrated_exactly():
    """What may round has a rate of its own in a file, against which products that did not would be slow."""
    config = load_config(Path(TINY[0]), [*TINY[1:], "precision.dtype=fp32", "precision.products=tf32"])
    assert calibrate._on_one_rank(config).precision.products == "fp32"


def test_memory_is_what_a_job_may_have(monkeypatch: pytest.MonkeyPatch):
    """The control group's, not the machine's."""
    monkeypatch.setattr(calibrate, "total_bytes", lambda: 6 * 2**30)
    assert calibrate._memory_bytes(torch.device("cpu"), 2) == 3 * 2**30


def test_ranks_keep_freed_memory_as_those_of_training(monkeypatch: pytest.MonkeyPatch):
    """Processes started meanwhile have the allocator's settings; what the user has set stays, and afterwards all is as
    before."""
    for name in RANK_MEMORY:
        monkeypatch.delenv(name, raising=False)
    own, *others = RANK_MEMORY
    monkeypatch.setenv(own, "12345")
    before = dict(os.environ)
    with allocator_of_training():
        asked = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
        seen = json.loads(subprocess.check_output(asked, text=True))
    assert seen[own] == "12345"
    assert {name: seen[name] for name in others} == {name: RANK_MEMORY[name] for name in others}
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("model.moe={num_experts: 4}", "give a config of a dense model"),
        ("precision.dtype=fp16", "precision.dtype"),
    ],
)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture, setting: str, sentence: str):
    """Before anything is measured or written."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", "calibrate", *TINY, setting, "--out", str(tmp_path / "x.yaml")])
    assert ended.value.code == EXIT_BAD_INPUT
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
