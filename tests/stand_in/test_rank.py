"""Whole runs with `train.device=cuda` on the stand-in device: they end well, wait for the device once a step and never
for a micro-batch, and no rank touches another's device.

Numbers come from kernels on the CPU: what is compared is that nothing is mixed up on the way, not what a GPU computes.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.paths import ROOT
from tests.kit.runs import clean_environment, metrics, write_run
from tests.stand_in.build import build
from tests.stand_in.lines import cuda_statements

JOB_SECONDS = 300

COMMON = ("train.device=cuda", "precision.dtype=bf16", "batch.global_batch_size=8", "checkpoint.every=3")
"""Four micro-batches a step on one rank and under a pipeline, two on each of two."""

EXPERTS = (
    "model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 16, aux_loss: 0.01, bias_rate: 0.001, capacity_factor: 1.5}"
)
LATENTS = "model.mla={q_lora_rank: 24, kv_lora_rank: 16, qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16}"
GPT_OSS = (
    *("model.bias=all", "model.attention_sinks=true", "model.activation=swiglu_clamped"),
    "model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 16, logit_bias: true}",
)
RECORDED = "train.cuda_graphs=true"
FSDP2 = ("parallel.zero_stage=3", "parallel.engine=fsdp2")

ALONE = {
    "zero1": ("parallel.tp=1", "parallel.zero_stage=1"),
    "zero2": ("parallel.tp=1", "parallel.zero_stage=2"),
    "zero3": ("parallel.tp=1", "parallel.zero_stage=3", "parallel.engine=deepspeed"),
    "zero0": ("parallel.tp=1", "parallel.zero_stage=0", "precision.dtype=fp32", "run.deterministic=true"),
    "fsdp2": ("parallel.tp=1", *FSDP2),
    "fsdp2-offload": ("parallel.tp=1", *FSDP2, "optimizer.offload=true"),
    "fsdp2-fp16": ("parallel.tp=1", *FSDP2, "precision.dtype=fp16"),
    "fp16-zero1": ("parallel.tp=1", "precision.dtype=fp16", "parallel.zero_stage=1"),
    "fp16-zero2": ("parallel.tp=1", "precision.dtype=fp16", "parallel.zero_stage=2"),
    "fp16-zero3": ("parallel.tp=1", "precision.dtype=fp16", "parallel.zero_stage=3", "parallel.engine=deepspeed"),
    "offload": (
        *("parallel.tp=1", "train.recompute=full", "train.offload_activations=true", "train.mlp_chunk_tokens=16"),
        "optimizer.offload=true",
    ),
    "graphs": ("parallel.tp=1", RECORDED),
    "fp16-graphs": ("parallel.tp=1", RECORDED, "precision.dtype=fp16", "train.recompute=full"),
    "experts": ("parallel.tp=1", EXPERTS),
    "experts-graphs": ("parallel.tp=1", EXPERTS, RECORDED),
    "latents-further-graphs": ("parallel.tp=1", LATENTS, "model.mtp={num_layers: 1}", RECORDED),
    "experts-fp8": ("parallel.tp=1", EXPERTS, "precision.fp8={backend: scaled_mm, recipe: rowwise}"),
    "latents": ("parallel.tp=1", LATENTS),
    "latents-further": ("parallel.tp=1", LATENTS, "model.mtp={num_layers: 1}"),
    "latents-fp32": ("parallel.tp=1", LATENTS, "precision.dtype=fp32"),
    "gpt-oss": ("parallel.tp=1", *GPT_OSS),
    "gpt-oss-fp32": ("parallel.tp=1", *GPT_OSS, "precision.dtype=fp32"),
    "experts-fp32": ("parallel.tp=1", EXPERTS, "precision.dtype=fp32", "run.deterministic=true"),
    "fp4": ("parallel.tp=1", "precision.fp4={format: mxfp4, forward: true, hadamard_size: 32}"),
    "fp8-zero1": ("parallel.tp=1", "precision.fp8={backend: scaled_mm}", "parallel.zero_stage=1"),
    "fp8-zero2": ("parallel.tp=1", "precision.fp8={backend: scaled_mm, recipe: delayed}", "parallel.zero_stage=2"),
    "fp8-zero3": (
        "parallel.tp=1",
        "precision.fp8={backend: scaled_mm, recipe: rowwise}",
        "parallel.zero_stage=3",
        "parallel.engine=deepspeed",
    ),
    "fp8-fsdp2": ("parallel.tp=1", "precision.fp8={backend: scaled_mm, recipe: delayed}", *FSDP2),
}
TOGETHER = {
    "tp2": ("parallel.tp=2",),
    "tp2-graphs": ("parallel.tp=2", RECORDED),
    "tp2-rows-graphs": ("parallel.tp=2", "parallel.sequence_parallel=true", RECORDED),
    "dp2-graphs": ("parallel.tp=1", RECORDED),
    "tp2-async": ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.async_tp=true"),
    "pp2": ("parallel.tp=1", "parallel.pp=2"),
    "cp2": ("parallel.tp=1", "parallel.cp=2"),
    "cp2-ulysses": ("parallel.tp=1", "parallel.cp=2", "parallel.cp_kind=ulysses"),
    "cp2-ring": ("parallel.tp=1", "parallel.cp=2", "parallel.cp_kind=ring"),
    "latents-cp2": ("parallel.tp=1", "parallel.cp=2", LATENTS),
    "experts-ep2": ("parallel.tp=1", "parallel.ep=2", EXPERTS),
    "dp2-zero1": ("parallel.tp=1", "precision.reduce_bits=4", "precision.gather_bits=8"),
    "dp2-zero2": ("parallel.tp=1", "parallel.zero_stage=2"),
    "dp2-zero3": ("parallel.tp=1", "parallel.zero_stage=3", "parallel.engine=deepspeed"),
    "dp2-fsdp2": ("parallel.tp=1", *FSDP2, "precision.reduce_bits=8", "precision.gather_bits=8"),
    "experts-fsdp2": ("parallel.tp=1", "parallel.ep=2", EXPERTS, *FSDP2),
}
UNLOCKED = "zero2"
"""A run whose host memory cannot be locked, as under a small limit: CUDA keeps the error for whoever asks next."""

PLAIN_STEPS = (1, 4)
"""Steps, counted from 0, with no save, validation or first use behind the step before."""

SYNCS_A_STEP = 1
"""The loss, norm, tokens and what ranks were asked, at once."""

FURTHER_SYNCS = {"experts-ep2": 4, "experts-fsdp2": 4, "offload": 2, "fsdp2-offload": 1}
"""In each of two blocks two micro-batches learn how many rows come from other ranks; an offloaded optimizer's gradient
goes to the host (FSDP2 sends it there by itself), and its norm comes back."""

WITHOUT_GPU = "the way of a machine without a GPU, where all other tests run"

CALIBRATION = "`plan calibrate`, whose every line but these runs on CPUs; on a GPU: docs/gpu-queue.md, 34"

NOT_RUN = {
    "megalite/studies/calibrate.py": dict.fromkeys(
        (
            'device = torch.device("cuda", rank) if device_type == "cuda"',
            "dist.init_process_group(",
            "return float(torch.cuda.get_device_properties(device).total_",
            'found |= {"host_link": _host_link_rate(bench), "host_memory_',
            'found["host_bandwidth"] = _copy_rate(bench, "cpu")',
            "host = torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memo",
        ),
        CALIBRATION,
    ),
    "megalite/studies/bench.py": {"torch.cuda.synchronize(self.device)": CALIBRATION},
    "megalite/studies/peaks.py": {
        'since, capability = {"tf32": TF32_SINCE, "fp8": FP8_SINCE}, ': CALIBRATION,
        "torch.cuda.synchronize(device)": CALIBRATION,
    },
    "megalite/checkpoint/snapshot.py": {
        "torch.cuda.synchronize()  # the copies are queued": "ZeRO-3 over more than 64 ranks, where no part is live",
    },
    "megalite/checkpoint/hf/embed.py": {
        'raise UnavailableError("device=cuda: torch finds no GPU here': WITHOUT_GPU,
        'return torch.device("cuda", os.getpid() % torch.cuda.device_': "`megalite embed`: docs/gpu-queue.md, 23",
    },
    "megalite/layers/attention.py": {"return attend_by_document": "torch before 2.10"},
    "megalite/layers/flash.py": {
        'raise UnavailableError(f"{setting}: it is for GPUs, and this': WITHOUT_GPU,
        "found = torch.cuda.get_device_capability(device)": "a FlashAttention that is installed",
        "name = torch.cuda.get_device_name(device)": "a FlashAttention that is installed",
    },
    "megalite/layers/te.py": {'return "there is no CUDA device"': WITHOUT_GPU},
    "megalite/model/offload.py": {
        "return Kept(x, None, None)": WITHOUT_GPU,
        **dict.fromkeys(
            (
                "with torch.cuda.stream(self._stream):",
                "torch.cuda.current_stream().wait_stream(self._stream)",
                "found.record_stream(torch.cuda.current_stream())",
            ),
            "a backward pass, in a thread whose lines nobody watches; without them it asserts",
        ),
    },
    "megalite/planner/examine.py": dict.fromkeys(
        (
            "built = torch.version.cuda",
            'why = f"torch {torch.__version__} is built for CPU only" if ',
            'yield Finding("CUDA", False, why, "a GPU with its driver, an',
            "return",
            'return Finding(name, False, f"{version} is installed, but th',
        ),
        WITHOUT_GPU,
    ),
    "megalite/slurm/node_check.py": {
        'backend, token = "nccl" if report.num_gpus else "gloo", os.e': "the agent on a"
        " node of a cluster, whose parts are asked one by one",
    },
    "megalite/profile/summary.py": {
        'what = "kernel" if one.trace.device == "cuda" else "op, with': "reads files, in tests/profile",
    },
    "megalite/profile/trace.py": {
        'device = "cuda" if on_device else "cpu"': "reads files, in tests/profile",
    },
    "megalite/train/components/profiler.py": dict.fromkeys(
        (
            "self._remembers_allocations = settings.memory and device.typ",
            "activities |= {ProfilerActivity.CUDA} & supported_activities",
            "torch.cuda.memory._record_memory_history(max_entries=MAX_ALL",
            'torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}',
            "torch.cuda.memory._record_memory_history(enabled=None)",
        ),
        "a profiler of CUDA, which torch without CUDA has not: docs/gpu-queue.md, 18",
    ),
    "megalite/train/device.py": {'return torch.device("cpu")': WITHOUT_GPU},
}
"""Statements for CUDA that do not run here, by file: how their first lines begin, and why."""

TOLERANCE = {"fp16": 2e-3, "fp8": 2e-2, "fp4": 5e-2}
OTHERS_TOLERANCE = 2e-3
"""Of the loss; bf16 rounds to 4e-3 of each number, and the loss is a mean over hundreds."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """Each run's folder, and what its ranks asked of the device."""
    library, why = build()
    if library is None:
        pytest.skip(why)
    found = {}
    for world_size, cases in ((1, ALONE), (2, TOGETHER)):
        folder = tmp_path_factory.mktemp(f"world-{world_size}")
        write_run(folder)
        job = {"library": str(library), "world_size": world_size, "folder": str(folder)}
        job["unlocked"] = UNLOCKED
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            job["port"] = free.getsockname()[1]
        job["runs"] = {name: [*COMMON, *overrides] for name, overrides in cases.items()}
        _start(folder, job)
        for name in cases:
            answers = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(world_size)]
            found[name] = (folder / name, answers)
    return found


RECORDS = {
    "graphs": "zero1",
    "fp16-graphs": "fp16-zero1",
    "experts-graphs": "experts",
    "latents-further-graphs": "latents-further",
    "tp2-graphs": "tp2",
    "tp2-rows-graphs": None,
    "dp2-graphs": None,
}
"""Runs that repeat micro-batches from a record, and those that compute the same without."""

FIRST_RECORDED = 1
"""The step that waits for the device until a record is made, and compared."""


def _start(folder: Path, job: dict[str, Any]) -> None:
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-W", "ignore", "-m", "tests.stand_in.rank", str(folder / "job.json")]
    outputs = [(folder / f"said-{rank}").open("w") for rank in range(job["world_size"])]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=out, stderr=out, cwd=ROOT, env=clean_environment())
        for rank, out in enumerate(outputs)
    ]
    try:
        codes = [rank.wait(timeout=JOB_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    said = "\n".join((folder / f"said-{rank}").read_text()[-3000:] for rank in range(len(ranks)))
    assert codes == [0] * len(ranks), said


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_a_step_waits_for_the_device_once(runs, name: str):
    """More micro-batches than that pass by, so none of them is waited for."""
    if name in ("experts-fp32", "gpt-oss-fp32"):
        pytest.skip("products in groups have a kernel in bf16 alone; a loop waits for the groups' sizes")
    for answer in runs[name][1]:
        counts = answer["syncs_by_step"]
        found = [
            counts[step] - counts[step - 1] for step in PLAIN_STEPS if name not in RECORDS or step != FIRST_RECORDED
        ]
        assert max(found) <= SYNCS_A_STEP + FURTHER_SYNCS.get(name, 0), (
            found,
            sorted(answer["syncs"], key=lambda each: -each[2])[:12],
        )


@pytest.mark.parametrize("name", RECORDS)
def test_repeated_micro_batches_compute_what_they_did(runs, name: str):
    """Losses and norms, bit by bit; most of the micro-batches are repeated."""
    folder, answers = runs[name]
    num_micro_batches = len(metrics(folder)) * 4 // (2 if name.startswith("dp2") else 1)
    for answer in answers:
        assert answer["calls"]["graph replayed"] >= num_micro_batches / 2
    if RECORDS[name] is not None:
        both = [[(each["loss"], each["grad_norm"]) for each in metrics(runs[run][0])] for run in (name, RECORDS[name])]
        assert both[0] == both[1]


@pytest.mark.parametrize("name", TOGETHER)
def test_a_rank_touches_its_own_device_alone(runs, name: str):
    """A process that as much as chooses another's takes half a gigabyte there."""
    for rank, answer in enumerate(runs[name][1]):
        assert set(answer["devices"]) == {rank}
        assert answer["touched"] == [rank]


@pytest.fixture(scope="module")
def lines_run(runs) -> dict[str, set[int]]:
    """Lines that have run on any rank, by file."""
    found: dict[str, set[int]] = defaultdict(set)
    for folder in {folder.parent for folder, _ in runs.values()}:
        for path in folder.glob("lines-*.json"):
            for file, lines in json.loads(path.read_text()).items():
                found[str(Path(file).relative_to(ROOT))].update(lines)
    return found


def test_every_statement_for_cuda_has_run_or_says_why_not(lines_run):
    """Statements that name CUDA, or stand under an `if` that does, ran in these runs, or in what a machine is asked
    beside them (`questions.py`); the list of the others holds nothing that ran."""
    statements = cuda_statements()
    assert len(statements) > 50
    not_run = {
        place for place, lines in statements.items() if lines_run[place[0]].isdisjoint(range(lines[0], lines[1] + 1))
    }
    listed = {(file, text) for file, texts in NOT_RUN.items() for text in texts}
    assert not not_run - listed, "\n".join(f"{file}: {text}" for file, text in sorted(not_run - listed))
    assert not listed - not_run, listed - not_run


def losses(folder: Path) -> Iterator[float]:
    """Of every step."""
    return (record["loss"] for record in metrics(folder))


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_nothing_is_mixed_up_on_the_way(runs, name: str):
    """Losses are those of the run in fp32, but for the rounding of the format."""
    tolerance = TOLERANCE.get(name.split("-")[0], OTHERS_TOLERANCE)
    truth = next((f"{model}-fp32" for model in ("experts", "latents", "gpt-oss") if name.startswith(model)), "zero0")
    assert list(losses(runs[name][0])) == pytest.approx(list(losses(runs[truth][0])), abs=tolerance)
