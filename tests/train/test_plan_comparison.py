"""What a run says of its steps beside what was planned for them."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megalite.config.load import load_config
from megalite.config.plan import make_plan
from megalite.monitor.recorder import Recorder
from megalite.planner.estimate import Estimate
from megalite.planner.machines import known_machines, load_machine, machine_of_gpu
from megalite.train.components.plan_comparison import (
    COUNTED,
    UNSETTLED,
    Measured,
    comparison_of,
    complaints,
    summary,
)
from tests.kit.runs import events, megalite, metrics, write_run

PLANNED = Estimate((), 1.0, 1000.0, 0.5, (100,), (0,), True, {"products": 0.6, "passes": 0.4})
AS_PLANNED = Measured((1.0,) * 3, (0.0,) * 3, 100)


def why(measured: Measured, *, is_compiled: bool = True) -> str:
    return " ".join(complaints(measured, PLANNED, is_compiled=is_compiled))


def test_nothing_is_complained_about_within_a_tenth():
    for seconds, memory in ((1.0, 100), (1.09, 109), (0.91, 91)):
        assert why(Measured((seconds,) * 3, (0.0,) * 3, memory)) == ""


@pytest.mark.parametrize(
    ("measured", "is_compiled", "said"),
    [
        (replace(AS_PLANNED, seconds=(1.5,) * 3, waited=(0.5,) * 3), True, "It waits 0.5 s for its batch"),
        (replace(AS_PLANNED, seconds=(1.05, 1.5, 1.6)), True, "The fastest took 1.05 s: something else takes turns"),
        (replace(AS_PLANNED, seconds=(1.5,) * 3), False, "Blocks are not compiled"),
        (replace(AS_PLANNED, seconds=(1.5,) * 3), True, "most was said to go into products (0.6 s): `megalite plan"),
        (replace(AS_PLANNED, seconds=(0.5,) * 3), True, "Nothing that is seen from here explains it"),
        (replace(AS_PLANNED, memory=120), True, "Memory is more than planned"),
        (replace(AS_PLANNED, memory=80), True, "Memory is less than planned"),
    ],
)
def test_why_it_is_off(measured: Measured, is_compiled: bool, said: str):
    assert said in why(measured, is_compiled=is_compiled)


def test_both_figures_with_how_far_they_are():
    """A percentage each; of a pipeline also the stage that was to take more than the first rank, which was measured."""
    gib = 2**30
    planned = replace(PLANNED, tensors=(4 * gib, 3 * gib))
    said = summary(replace(AS_PLANNED, seconds=(1.5,) * 3, memory=5 * gib), planned, "h200")
    assert said == (
        "a step takes 1.5 s, and megalite plan says 1 on h200 (+50%); the first rank 5.00 GiB, planned 4.00 (+25%)"
    )
    later = summary(replace(AS_PLANNED, memory=3 * gib), replace(planned, tensors=(4 * gib, 6 * gib)), "h200")
    assert later.endswith("the first rank 3.00 GiB, planned 4.00 (-25%), of stage 1 6.00, the most")


@pytest.mark.parametrize(
    ("device", "why"), [("cpu", ""), ("cuda", ", and none that comes along is an NVIDIA GeForce RTX 4090")]
)
def test_no_machine_is_said(tmp_path, monkeypatch, device: str, why: str):
    """Where neither config nor GPU names one: once, in a line, with what to do."""
    config = load_config(write_run(tmp_path, parallel={"tp": 1}))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA GeForce RTX 4090")
    said = list[str]()
    recorder = cast(Recorder, SimpleNamespace(say=said.append))
    assert comparison_of(config, make_plan(config, 1), recorder, torch.device(device)) is None
    assert said == [
        f"no comparison with megalite plan: monitor.machine names no machine{why}; `megalite plan calibrate CONFIG "
        "--ranks N --out FILE` measures this one, and monitor.machine=FILE names it"
    ]


def test_gpus_have_machines():
    """Every file of a GPU is found by what CUDA calls the device, and others have none."""
    names = (
        "NVIDIA H200",
        "NVIDIA H100",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA B200",
        "NVIDIA A100-SXM4-80GB",
    )
    found = {machine_of_gpu(name) for name in (*names, "NVIDIA A100-SXM4-40GB")}
    assert found == known_machines().keys() - {"cpu"}
    assert all(load_machine(str(name)) for name in found)
    assert machine_of_gpu("NVIDIA GeForce RTX 4090") is None


def test_a_run_says_how_far_it_is(tmp_path):
    """Once the steps have settled, on a machine that the config names; seconds are those of metrics.jsonl."""
    steps = UNSETTLED + COUNTED + 1
    config = write_run(tmp_path, parallel={"tp": 1}, train={"steps": steps}, monitor={"machine": "cpu"})
    done = megalite("train", config)
    assert done.returncode == 0, done.stderr
    (found,) = [each for each in events(tmp_path / "run") if each["event"] == "plan"]
    assert found["step"] == UNSETTLED + COUNTED
    counted = metrics(tmp_path / "run")[UNSETTLED : UNSETTLED + COUNTED]
    assert found["seconds"] == pytest.approx(median(each["seconds"] for each in counted), abs=1e-4)
    assert sum(found["planned_parts"].values()) == pytest.approx(found["planned_seconds"])
    assert found["memory_bytes"] == max(each["memory_bytes"] for each in counted)
    assert 0.5 < found["memory_bytes"] / found["planned_memory_bytes"] < 1.5  # of a model that is next to nothing
    assert "a step takes" in done.stdout
    assert "megalite plan says" in done.stdout
    assert re.search(r"the first rank [\d.]+ GiB, planned [\d.]+ \([+-]\d+%\)", found["why"])
    assert "no comparison" not in done.stdout


def test_an_unknown_machine_is_refused_before_the_start(tmp_path):
    config = write_run(tmp_path, monitor={"machine": "h300"})
    done = megalite("train", config)
    assert done.returncode == 2
    assert "monitor.machine: there is no file h300, and no machine of this name; use a100-40g" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_steps_of_a_growing_batch_are_not_compared(tmp_path):
    """What was planned is a step of the whole batch."""
    steps, growing = UNSETTLED + COUNTED + 4, 4
    ramp = {"start_size": 2, "samples": 2 * growing}
    sections = {"train": {"steps": steps}, "monitor": {"machine": "cpu"}, "batch": {"ramp": ramp}}
    done = megalite("train", write_run(tmp_path, parallel={"tp": 1}, **sections))
    assert done.returncode == 0, done.stderr
    sizes = [each["tokens"] for each in metrics(tmp_path / "run")]
    small = sum(later - former < sizes[-1] - sizes[-2] for former, later in zip([0, *sizes], sizes, strict=False))
    assert small >= 1
    (found,) = [each for each in events(tmp_path / "run") if each["event"] == "plan"]
    assert found["step"] == small + UNSETTLED + COUNTED


def test_the_machine_of_another_device_is_not_compared(tmp_path):
    sections = {"train": {"steps": 1}, "schedule": {"warmup_steps": 0}, "monitor": {"machine": "h100-sxm"}}
    config = write_run(tmp_path, parallel={"tp": 1}, **sections)
    done = megalite("train", config)
    assert done.returncode == 0, done.stderr
    assert "no comparison with megalite plan: monitor.machine=h100-sxm is not for a CPU" in done.stdout
