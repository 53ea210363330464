"""Compiling the stand-in device, once for each torch and each state of its source."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")

COMPILE_SECONDS = 300
"""Half a minute on a core that has nothing else to do."""


@functools.cache
def build() -> tuple[Path | None, str]:
    """The compiled device, or the reason why there is none. torch is not imported."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        return None, "no C++ compiler (c++ or g++) on the path to make the stand-in device with"
    key = hashlib.sha256(SOURCE.read_bytes() + metadata.version("torch").encode()).hexdigest()[:16]
    library = _folder() / f"device-{key}.so"
    if not library.is_file():
        said = _compile(compiler, library)
        if said:
            return None, f"the stand-in device cannot be compiled here: {said}"
    return library, ""


def _folder() -> Path:
    """Beside the torch that it is for, or where only this user writes."""
    beside = Path(sys.prefix) / "stand-in"
    try:
        beside.mkdir(exist_ok=True)
    except OSError:
        beside = Path(tempfile.gettempdir()) / f"megalite-stand-in-{os.getuid()}"
        beside.mkdir(mode=0o700, exist_ok=True)
    return beside


def _compile(compiler: str, library: Path) -> str:
    """Compile and return the last lines of what was wrong; empty when nothing was."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    include = torch / "include"
    headers = ["-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]
    partial = library.with_suffix(f".{os.getpid()}")
    options = ["-std=c++20", "-O0", "-fPIC", "-shared", *headers, f"-L{torch / 'lib'}", "-o", str(partial)]
    command = [compiler, *options, str(SOURCE), "-lc10", "-ltorch_cpu"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if outcome.returncode:
        return outcome.stderr[-1500:]
    os.replace(partial, library)
    return ""
