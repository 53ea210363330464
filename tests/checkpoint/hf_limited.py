"""Conversions in a process whose memory is limited: `python -m tests.checkpoint.hf_limited ROOT SHARD_BYTES OWN_BYTES`.

The limit is the kernel's on private memory (RLIMIT_DATA): an allocation beyond it fails. It counts files that are
mapped privately as well, which is how safetensors opens them, though their pages are the page cache's, which the kernel
takes back when it likes; so the size of the files is allowed for, and nothing else but OWN_BYTES.

Prints one JSON object: the size of the model; by how much memory of its own (RssAnon, looked at all the while) grew at
most in this process; and the most that the process which reads the result back had, for this model and for a tiny one.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from megalite.checkpoint.hf import reload
from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.checkpoint.hf.to_checkpoint import from_hugging_face
from tests.checkpoint.hf_kit import reloading_here, tiny_model, write_checkpoint

LOOK_EVERY_SECONDS = 0.001


class Watch:
    """The most memory of its own that this process, and a child of it, has while this is open."""

    def __enter__(self) -> Watch:
        self.own = self.child = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while not self._done.wait(LOOK_EVERY_SECONDS):
            self.own = max(self.own, in_bytes("self", "RssAnon"))
            for child in children.read_text().split():
                if is_reload(child):
                    self.child = max(self.child, in_bytes(child, "RssAnon"))


def is_reload(process: str) -> bool:
    """Whether a child is what it was started for; for a moment it is a copy of this process, all memory shared."""
    try:
        return reload.__name__ in Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return False


def in_bytes(process: str, name: str) -> int:
    """A number of /proc/PROCESS/status; 0 when the process is gone."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
        return int(text.split(f"{name}:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def limited(convert: Callable[[], object], *, mapped_bytes: int, own_bytes: int) -> dict[str, int]:
    """Convert under the limit; by how much each process grew."""
    gc.collect()
    limit = in_bytes("self", "VmData") + mapped_bytes + own_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    before = in_bytes("self", "RssAnon")
    with Watch() as watch:
        convert()
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    gc.collect()
    return {"own": watch.own - before, "child": watch.child}


def main(root: Path, shard_bytes: int, own_bytes: int) -> None:
    """Convert ROOT/run to ROOT/hf and that to ROOT/back, with logits of the first block only; first a tiny model."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        tiny = Path(name)
        write_checkpoint(tiny / "run", tiny_model())
        with Watch() as watch:
            to_hugging_face(tiny / "run", tiny / "hf")
        with reloading_here():
            from_hugging_face(tiny / "hf", tiny / "back")
    size = sum(path.stat().st_size for path in (root / "run").rglob("*.safetensors"))

    def export() -> None:
        to_hugging_face(root / "run", root / "hf", max_shard_bytes=shard_bytes, verify_blocks=1)

    def import_() -> None:
        from_hugging_face(root / "hf", root / "back", verify_blocks=1)

    grown = {
        "to-hf": limited(export, mapped_bytes=2 * size, own_bytes=own_bytes),  # the checkpoint, and what was written
        "from-hf": limited(import_, mapped_bytes=3 * size, own_bytes=own_bytes),  # the folder twice, what was written
    }
    print(json.dumps({**grown, "size": size, "tiny child": watch.child}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
