"""`megalite plan`: layouts, one's own, the back-test, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.cli.main import main
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "llama-8b.yaml")
KEYS = {"overrides", "seconds_per_step", "tokens_per_second", "mfu", "fits", "breakdown"}
KEYS |= {"memory_bytes", "process_bytes", "host_bytes"}


def run(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    said = capsys.readouterr()
    assert ended.value.code == EXIT_DONE, said.err
    return said.out


def test_layouts_and_ones_own(capsys: pytest.CaptureFixture):
    """The best three for 32 ranks; the first, given as overrides and judged as it is, comes to the same."""
    options = ("--machine", "h100-sxm", "--world-size", "32", "--json")
    found = json.loads(run(capsys, CONFIG, *options, "--top", "3"))["layouts"]
    assert len(found) == 3
    assert all(each.keys() == KEYS and each["fits"] for each in found)
    assert [each["seconds_per_step"] for each in found] == sorted(each["seconds_per_step"] for each in found)
    first = found[0]
    assert sum(first["breakdown"].values()) == pytest.approx(first["seconds_per_step"])
    (same,) = json.loads(run(capsys, CONFIG, *first["overrides"], *options, "--as-is"))["layouts"]
    assert {**first, "overrides": []} == {**same, "seconds_per_step": pytest.approx(same["seconds_per_step"])}


def test_options_before_the_config(capsys: pytest.CaptureFixture):
    """Say what they say behind it; help is that of all verbs."""
    options = ("--machine", "h200", "--json", "--as-is", "--world-size", "32")
    assert run(capsys, *options, CONFIG, "batch.micro_batch_size=2") == run(
        capsys, CONFIG, "batch.micro_batch_size=2", *options
    )
    assert "backtest" in run(capsys, "--help")
    assert "backtest" not in run(capsys, "--as-is", "--help")


def test_tables(capsys: pytest.CaptureFixture):
    """What a person sees: a row each, what seconds go into, what the run costs, and the line to paste."""
    said = run(capsys, CONFIG, "--machine", "h200", "--world-size", "64", "--top", "2", "--explain", "--price", "2.5")
    assert "layouts looked at" in said
    assert "products" in said
    assert "at 2.5 a rank-hour" in said
    assert "the first: parallel." in said
    assert "MFU" in said
    assert "batch.stages" not in said
    assert "emulation" not in said
    stages = "batch.stages=[{from_step: 3, seq_len: 16384, train: [{path: data/long, name: long}]}]"
    one = run(
        capsys,
        CONFIG,
        "--world-size",
        "64",
        "--top",
        "1",
        stages,
        "data.train=[{path: data/short}]",
        "model.max_positions=16384",
        "precision.fp4={format: nvfp4}",
    )
    assert "what emulation takes to round is not counted" in one
    assert (
        "those of sequences of 8,192 tokens, as before the first of batch.stages; memory is that of the longest" in one
    )


@pytest.mark.parametrize(("machine", "compared"), [("cpu", "GiB a process"), ("h100-sxm", "GiB a rank")])
def test_what_must_fit_is_named(capsys: pytest.CaptureFixture, machine: str, compared: str):
    """Above its column: the GiB of a layout are a whole process's on a CPU, and tensors' on a GPU."""
    small = (
        "parallel.tp=1",
        "parallel.sequence_parallel=false",
        "model.num_layers=2",
        "model.hidden_size=256",
        "model.num_heads=4",
        "model.num_kv_heads=4",
    )
    sizes = ("model.ffn_hidden_size=512", "batch.seq_len=128", "precision.dtype=fp32", "batch.micro_batch_size=1")
    given = (CONFIG, *small, *sizes, "--machine", machine, "--world-size", "2", "--as-is")
    heading = re.sub(r"\s+", " ", run(capsys, *given))
    assert compared in heading
    assert ({"GiB a process", "GiB a rank"} - {compared}).pop() not in heading


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((CONFIG, "--machine", "h300", "--world-size", "8"), "no machine of this name; use a100-40g"),
        ((CONFIG, "--machine", "a100-40g", "--world-size", "1"), "no layout fits: the smallest takes"),
        (("scaling", CONFIG, "--machine", "a100-40g", "--to", "1"), "it fits with --to "),
        ((CONFIG, "--world-size", "8", "--save-seconds", "3"), "--detect-seconds and --restart-seconds have no effect"),
        ((CONFIG, "--world-size", "8", "--as-is", "--top", "3"), "--top has no effect with --as-is"),
        ((CONFIG, "--world-size", "131"), "no layout is legal on so many ranks, of those that are looked at"),
        ((CONFIG, "model.vocab_size=1000", "--vocab-size", "2000"), "found 2000, but model.vocab_size=1000"),
        ((CONFIG, "--world-size", "8", "parallel.tp=3", "--as-is"), "parallel.tp"),
        (
            (CONFIG, "--world-size", "8", "schedule.warmup_steps=10000000"),
            "schedule.warmup_steps: 10000000 is more than",
        ),
        (("nowhere.yaml", "--world-size", "8"), "nowhere.yaml"),
        (("--machien", "h200", CONFIG), "No such option"),
        ((CONFIG, "--machine", "a100-80g", "--world-size", "8", "precision.fp8={backend: te}"), "fp8"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture, arguments: tuple[str, ...], sentence: str):
    """With exit code 2, and what to do."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == EXIT_BAD_INPUT
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("verb", [("layouts", "--trace"), ("scaling", "--plot"), ("calibrate", "--out")])
def test_what_is_read_is_not_written_over(capsys: pytest.CaptureFixture, tmp_path: Path, verb: tuple[str, str]):
    """Neither the config nor, below another name, what it is a link to."""
    own, link = tmp_path / "own.yaml", tmp_path / "link.svg"
    own.write_text(text := (ROOT / "configs" / "llama-1b3.yaml").read_text())
    link.symlink_to(own)
    for written in (own, link):
        with pytest.raises(SystemExit) as ended:
            main(["plan", verb[0], str(own), verb[1], str(written)])
        assert ended.value.code == EXIT_BAD_INPUT
        is_no_figure = verb[1] == "--plot" and written == own  # which is refused before
        why = "a figure is written as .svg" if is_no_figure else "would be written over"
        assert why in capsys.readouterr().err
        assert own.read_text() == text


def test_what_is_assumed_is_said(capsys: pytest.CaptureFixture, tmp_path: Path):
    """A vocabulary that neither config nor caller gives, and a way to the host that the machine's file leaves out."""
    given = (CONFIG, "--world-size", "8", "--as-is", "--json")
    assert "32000 assumed here" in json.loads(run(capsys, *given))["notes"][0]
    (note,) = json.loads(run(capsys, *given, "--vocab-size", "32000"))["notes"]
    assert note == "hours are those of training steps: what train.eval_every and checkpoint.every add is not counted"
    never = ("--vocab-size", "32000", "train.eval_every=null", "checkpoint.every=null", "checkpoint.keep_every=null")
    assert json.loads(run(capsys, *given, *never))["notes"] == []
    text = (ROOT / "configs" / "machines" / "h100-sxm.yaml").read_text()
    (machine := tmp_path / "mine.yaml").write_text(re.sub("(?m)^ *host_link:.*\n", "", text))
    away = ("--machine", str(machine), "train.recompute=full", "train.offload_activations=true")
    assert "the machine has no host_link" in json.loads(run(capsys, *given, *away))["notes"][2]


def test_an_offloaded_optimizer_where_nothing_else_fits(capsys: pytest.CaptureFixture):
    """It is one of the overrides, and its update is most of a step of few tokens."""
    found = json.loads(run(capsys, CONFIG, "--machine", "a100-80g", "--world-size", "1", "--top", "1", "--json"))
    (layout,) = found["layouts"]
    assert "optimizer.offload=true" in layout["overrides"]
    assert layout["fits"]
    assert layout["host_bytes"][0] > 0
    assert found["notes"][0].startswith("no layout fits: the smallest takes")
    assert not any("offloaded optimizer takes" in note for note in found["notes"])
    assert layout["breakdown"]["optimizer"] > 4.0  # 8B: 240 GB over a rank's share of the host's memory


def test_a_shell_takes_what_is_printed(capsys: pytest.CaptureFixture):
    """The last line, with some blocks made again, whose rule has spaces and brackets: the same layout as it is."""
    given = (CONFIG, "--machine", "h100-sxm", "--world-size", "1", "--vocab-size", "128256")
    *_, last = run(capsys, *given, "--top", "1").splitlines()
    assert "'train.recompute_layers=[{mode: full, first: 3}]'" in last
    overrides = shlex.split(last.removeprefix("the first: "))
    (pasted,) = json.loads(run(capsys, *given, *overrides, "--as-is", "--json"))["layouts"]
    (found,) = json.loads(run(capsys, *given, "--top", "1", "--json"))["layouts"]
    assert found["overrides"] == overrides
    assert pasted["seconds_per_step"] == pytest.approx(found["seconds_per_step"])
    assert pasted["fits"]


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_trace(capsys: pytest.CaptureFixture, tmp_path: Path, device: str):
    """A row for each stage, every pass of each micro-batch in it once, one after the other; the busiest works as long
    as the breakdown says, and the whole takes a step but for what stands between steps. The config's own device is
    none of the planned machine's."""
    layout = ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.chunks=2", "batch.global_batch_size=16")
    short = ("train.tokens=null", "train.steps=10", "schedule.warmup_steps=1")  # compiled on CPUs, and not on GPUs
    path, made_again = tmp_path / "step.json", ("train.recompute=selective", f"train.device={device}")
    given = (CONFIG, *layout, *short, *made_again, "--world-size", "32", "--as-is", "--json", "--trace", str(path))
    (planned,) = json.loads(run(capsys, *given))["layouts"]
    events = json.loads(path.read_text())["traceEvents"]
    rows = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert rows == {0: "stage 0", 1: "stage 1"}
    passes = [[each for each in events if each["ph"] == "X" and each["tid"] == stage] for stage in rows]
    named = {(kind, chunk, number) for kind in ("forward", "backward") for chunk in range(4) for number in range(4)}
    found = [(each["cat"], each["args"]["chunk"], each["args"]["micro_batch"]) for row in passes for each in row]
    assert sorted(found) == sorted(named)
    for row in passes:
        ends = [each["ts"] + each["dur"] for each in row]
        assert all(later["ts"] >= end - 1e-6 for later, end in zip(row[1:], ends, strict=False))
    parts = planned["breakdown"]
    between = parts["dp"] + parts["optimizer"]
    work = planned["seconds_per_step"] - between - parts["bubble"] - parts["pp"]
    assert max(sum(each["dur"] for each in row) for row in passes) == pytest.approx(1e6 * work)
    end = max(each["ts"] + each["dur"] for row in passes for each in row)
    assert end == pytest.approx(1e6 * (planned["seconds_per_step"] - between))


def test_failures_in_numbers(capsys: pytest.CaptureFixture):
    """What is said of failures is in the JSON, and the words are made of the same."""
    given = (CONFIG, "--world-size", "512", "--as-is", "--vocab-size", "32000", "--failures", "0.01")
    found = json.loads(run(capsys, *given, "--json"))
    risks, hours = found["failures"], found["run"]["hours"]
    assert risks["hours_between"] == pytest.approx(24 / 0.01 / (512 / 8))
    assert risks["hours"] == pytest.approx(hours / risks["goodput"])
    assert 0.9 < risks["goodput"] < 1.0
    assert risks["rank_hours"] == pytest.approx(512 * risks["hours"])
    assert risks["megawatt_hours"] == pytest.approx(risks["rank_hours"] * 1275 / 1e6)
    assert risks["price"] is None
    words = run(capsys, *given)
    assert f"checkpoint.every={risks['save_every']}), which keeps {100 * risks['goodput']:.1f} % of the time" in words
    assert "1 layout looked at" in words
    assert json.loads(run(capsys, *given[:-2], "--json"))["failures"] is None


def test_what_is_taken_of_failures(capsys: pytest.CaptureFixture):
    """Where nothing is said, a failure is noticed when a rank's heartbeat is missed, and a save takes what a node's
    share of the checkpoint, 12 bytes a parameter, takes at the rate that was measured; which is said."""
    given = (CONFIG, "--world-size", "512", "--as-is", "--vocab-size", "32000", "--failures", "0.01")
    found = json.loads(run(capsys, *given, "slurm.beat_seconds=50", "--json"))
    assert found["failures"]["restart_seconds"] == 50 + 270
    assert found["failures"]["save_seconds"] == pytest.approx(12 * 7.24e9 / 64 / 2.27e9, rel=0.01)
    assert "1.4 GB a node at 2.3 GB/s" in found["notes"][-1]
    own = ("--detect-seconds", "7", "--restart-seconds", "100", "--save-seconds", "2", "--price", "3")
    own_found = json.loads(run(capsys, *given, *own, "--json"))
    risks = own_found["failures"]
    assert (risks["restart_seconds"], risks["save_seconds"]) == (107, 2)
    assert risks["price"] == pytest.approx(3 * risks["rank_hours"])
    assert not any("GB/s" in note for note in own_found["notes"])
    assert "at 3 a rank-hour" in run(capsys, *given, *own).splitlines()[-1]


def test_a_run_that_never_ends(capsys: pytest.CaptureFixture):
    """Which is said, and not how often it should save."""
    given = (CONFIG, "--world-size", "512", "--as-is", "--vocab-size", "32000", "--failures", "1000000")
    words = run(capsys, *given)
    assert "such a run never ends, however often it saves: it takes 5.0 minutes until training goes on" in words
    assert "checkpoint.every=" not in words
    risks = json.loads(run(capsys, *given, "--json"))["failures"]
    assert [risks[name] for name in ("save_every", "hours", "rank_hours", "megawatt_hours", "price")] == [None] * 5


def test_scaling(capsys: pytest.CaptureFixture, tmp_path: Path):
    """As a table, as JSON and as a figure."""
    given = ("scaling", str(ROOT / "configs" / "llama-1b3.yaml"), "--to", "32")
    plain = run(capsys, *given, "--plot", str(tmp_path / "curves.svg"))
    assert "strong scaling" in plain
    assert "weak scaling" in plain
    assert "<svg" in (tmp_path / "curves.svg").read_text("utf-8")
    points = json.loads(run(capsys, *given, "--json"))["points"]
    assert [(each["kind"], each["ranks"]) for each in points] == [
        (kind, ranks) for kind in ("strong", "weak") for ranks in (8, 32)
    ]
    assert all(each["fits"] and each["seconds_per_step"] > 0 for each in points)
    stages = "batch.stages=[{from_step: 3, seq_len: 4096, train: [{path: data/long, name: long}]}]"
    notes = (stages, "data.train=[{path: data/short}]", "model.max_positions=4096", "precision.fp4={format: nvfp4}")
    said = json.loads(run(capsys, *given, *notes, "--json"))["notes"]
    for wanted in ("32000 assumed", "before the first of batch.stages", "emulation"):
        assert sum(wanted in note for note in said) == 1, (wanted, said)
    assert not any("hours" in note for note in said)
    with pytest.raises(SystemExit) as ended:
        main(["plan", *given, "--plot", str(tmp_path / "curves.gif")])
    assert ended.value.code == EXIT_BAD_INPUT
    assert "a figure is written as .svg, .png, .pdf" in capsys.readouterr().err


def test_a_full_disk_is_told_in_a_line():
    """Where the output goes, too."""
    command = (sys.executable, "-m", "megalite", "plan", CONFIG, "--as-is", "--world-size", "32", "--json")
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert "No space left on device; see to the disk" in done.stderr
    assert "Traceback" not in done.stderr
