"""What this machine offers for training, and what each missing piece would need."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalite.host import BF16_UNITS, cpu_flags, num_cores

COMMAND_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Finding:
    """One thing a run may need."""

    name: str
    present: bool
    found: str
    """What is here, with its version or size; or why it is not."""
    needs: str = ""
    """What to do to get it; empty when it is here."""
    required: bool = False
    """Nothing trains without it."""


def examine(folder: Path) -> list[Finding]:
    """Look at the machine; `folder` is where runs would be written."""
    return [*_packages(), *_devices(), *_communication(), _transformer_engine(), _slurm(), *_resources(folder)]


def _packages() -> Iterator[Finding]:
    yield Finding("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("torch", "deepspeed", "transformers", "datasets", "sentencepiece", "tokenizers"):
        try:
            yield Finding(package, True, importlib.metadata.version(package), required=True)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, False, "not installed", f"pip install {package}", required=True)


def _devices() -> Iterator[Finding]:
    has_units = bool(cpu_flags() & BF16_UNITS)
    units = (
        f"{'' if has_units else 'no '}units for bf16: the faster precision.dtype is {'bf16' if has_units else 'fp32'}"
    )
    yield Finding("CPU", True, f"{num_cores()} cores for this process, {units}")
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch {torch.__version__} is built for CPU only" if built is None else f"no device seen by CUDA {built}"
        yield Finding("CUDA", False, why, "a GPU with its driver, and a CUDA build of torch; training runs on the CPU")
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    yield Finding("CUDA", True, f"{len(names)} x {names[0]}, {memory:.0f} GiB each, CUDA {torch.version.cuda}")


def _communication() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch.distributed as dist

    yield Finding("gloo", dist.is_gloo_available(), "for ranks on CPUs", "a torch build with gloo", required=True)
    nccl = dist.is_available() and dist.is_nccl_available()
    yield Finding("NCCL", nccl, "for ranks on GPUs" if nccl else "not in this torch build", "a CUDA build of torch")


def _transformer_engine() -> Finding:
    """Whether FP8 through Transformer Engine could run. Importing it proves nothing, so that is not tried."""
    name, needs = "Transformer Engine", 'a CUDA device and `pip install --no-build-isolation "megalite[te]"`'
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed; FP8 needs it", needs)
    import torch

    if not torch.cuda.is_available():
        return Finding(name, False, f"{version} is installed, but there is no CUDA device", needs)
    return Finding(name, True, version)


def _slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("Slurm", False, "no sbatch on the path", "a login node; `megalite train` runs without it")
    try:
        out = subprocess.run(
            ["sinfo", "--noheader", "--format=%P %D nodes"],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_SECONDS,
            check=True,
        ).stdout
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        why = said[-1] if said else f"exit code {error.returncode}"
        return Finding("Slurm", False, f"sbatch is here, but sinfo fails: {why}", "a running slurmctld")
    except subprocess.TimeoutExpired:
        why = f"sinfo does not answer in {COMMAND_TIMEOUT_SECONDS:g} s"
        return Finding("Slurm", False, f"sbatch is here, but {why}", "a running slurmctld")
    except OSError as error:
        return Finding("Slurm", False, f"sbatch is here, but not sinfo: {error.strerror}", "a whole installation")
    return Finding("Slurm", True, "; ".join(out.split("\n")).strip("; ") or "no partitions")


def _resources(folder: Path) -> Iterator[Finding]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("memory", True, f"{pages / 2**30:.1f} GiB")
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    needs = "" if writable else "a run.dir that you may write to"
    yield Finding("disk", writable, f"{free / 1e9:.0f} GB free under {existing}", needs, required=True)
