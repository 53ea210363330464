"""Writing a checkpoint: every rank writes its share, rank 0 gives the folder its name.

    rank 0      make .partial-step-…-a0002                                      [begin]
    all ranks   write rank-N.safetensors and its checksum, then leave done-N    [write]
    rank 0      wait for every done-N, merge the lists of pieces, check that they tile every tensor, write the
                manifest, look at the fence, rename                             [write]

Between `begin` and the rename ranks talk through files in the folder alone, never through a process group: a thread
can do it while training uses the groups, and it works wherever the file system is shared. A crash at any moment leaves
the previous checkpoints untouched and a `.partial-` folder that is swept away later.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from megalite import __version__
from megalite.checkpoint import catalog
from megalite.checkpoint.differential import Storage, find_base
from megalite.checkpoint.fence import Fence, SupersededError
from megalite.checkpoint.format import (
    CONFIG,
    Manifest,
    Progress,
    folder_name,
    hash_file,
    write_manifest,
)
from megalite.checkpoint.shares import FULL, WrittenShare, sync, take_shares, write_share
from megalite.checkpoint.snapshot import Share
from megalite.config.plan import RunPlan
from megalite.errors import CheckpointError
from megalite.parallel.axes import Axes

DEFAULT_TIMEOUT_SECONDS = 1800.0
POLL_SECONDS = (0.005, 0.5)
"""How often rank 0 looks for the others' notes: at first, and after a while."""
DONE = "done-"


@dataclass(frozen=True)
class Target:
    """Where a run's checkpoints go, and what every one of them says of the run."""

    root: Path
    """The run's `checkpoints` folder."""
    plan: RunPlan
    config_text: str
    """The resolved config, kept beside the tensors."""
    data: dict
    """Fingerprint of the training data and path of its tokenizer."""
    fence: Fence | None = None
    """None where there is only one attempt, as in tests."""
    storage: Storage = FULL
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """How long rank 0 waits for the others after its own share."""


@dataclass
class Saving:
    """One checkpoint that is being written, as one rank sees it."""

    target: Target
    axes: Axes
    progress: Progress
    validation_loss: float | None = None
    """Of this very step; kept beside the tensors for `checkpoint.keep_best`."""
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set when another rank has failed: there is nothing to wait for."""
    written: WrittenShare = field(default_factory=WrittenShare)
    """What this rank's share took, once it is written."""

    @property
    def final(self) -> Path:
        """The checkpoint's folder, once it is complete."""
        return self.target.root / folder_name(self.progress.step)

    @property
    def partial(self) -> Path:
        """Its name until then, which no other attempt uses."""
        attempt = self.target.fence.attempt if self.target.fence else 0
        return self.target.root / f"{catalog.PARTIAL}{self.final.name}-a{attempt:05d}"

    def begin(self) -> None:
        """Make the folder, if this attempt may and the disk has room. Rank 0 does it; the others then may write.

        Raises:
            CheckpointError: it may not, or there is no room, or the disk cannot be written.
        """
        if self.axes.global_rank != 0:
            return
        root, fence = self.target.root, self.target.fence
        try:
            root.mkdir(parents=True, exist_ok=True)
            if fence:
                fence.check()
            catalog.sweep(root, fence.attempt if fence else None)
            catalog.check_disk(root, self.target.plan.num_parameters)
            self.partial.mkdir()
        except (OSError, CheckpointError) as error:
            raise not_saved(self.final, error) from error

    def write(self, share: Share) -> None:
        """Write this rank's share; on rank 0, see the checkpoint to its end. Not collective: a thread may do it.

        Raises:
            CheckpointError: this rank could not; the others learn it from whoever called.
        """
        try:
            self.written = write_share(
                self.partial,
                self.axes.global_rank,
                share.tensors,
                share.pieces,
                base=find_base(self.target.root, self.progress.step),
                storage=self.target.storage,
            )
            (self.partial / _done(self.axes.global_rank)).touch()
            if self.axes.global_rank == 0:
                self._wait_for_others()
                self._commit()
        except Exception as error:  # whatever it is, it must reach the rank that trains
            raise not_saved(self.final, error) from error

    def clean_up(self) -> None:
        """Remove what a failed save has left. Called when no rank writes any more."""
        if self.axes.global_rank == 0:
            catalog.remove(self.partial)

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + self.target.timeout_seconds
        pause, last_pause = POLL_SECONDS
        missing = {_done(rank) for rank in range(self.axes.world.size)}
        while missing := missing - {path.name for path in self.partial.iterdir()}:
            if self.given_up.wait(pause):
                raise CheckpointError("another rank could not write its share")
            if time.monotonic() > deadline:
                ranks = ", ".join(str(int(name.removeprefix(DONE))) for name in sorted(missing)[:8])
                raise CheckpointError(
                    f"{len(missing)} ranks ({ranks}{', …' if len(missing) > 8 else ''}) had not written their share "
                    f"after {self.target.timeout_seconds:g} s; see to the disk, or raise checkpoint.timeout_seconds"
                )
            pause = min(2 * pause, last_pause)

    def _commit(self) -> None:
        """Merge the shares into the manifest, check that nothing is missing, and give the folder its name."""
        partial, final, target = self.partial, self.final, self.target
        for rank in range(self.axes.world.size):
            (partial / _done(rank)).unlink()
        manifest = self._manifest()
        manifest.files, manifest.tensors = take_shares(partial)
        texts = {CONFIG: target.config_text}
        if self.validation_loss is not None:
            texts[catalog.VALIDATION] = json.dumps({"loss": self.validation_loss})
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
            sync(partial / name)
            manifest.files[name] = hash_file(partial / name)
        write_manifest(partial, manifest)
        sync(partial)
        if target.fence:
            target.fence.check()
        catalog.commit(partial, final)
        sync(final.parent)

    def _manifest(self) -> Manifest:
        return Manifest(
            progress=self.progress,
            model=self.target.plan.model.model_dump(mode="json"),
            layout=self.target.plan.layout,
            tensors={},
            files={},
            megalite=__version__,
            data=self.target.data,
        )


def not_saved(final: Path, error: Exception) -> CheckpointError:
    """The error of a save that came to nothing; that of the fence stays what it is."""
    if isinstance(error, SupersededError):
        return error
    reason = str(error) if isinstance(error, (OSError, CheckpointError)) else repr(error)
    return CheckpointError(f"{final}: checkpoint not saved: {reason}; the former ones are untouched")


def _done(rank: int) -> str:
    """Note that a rank has written its share, or had nothing to write."""
    return f"{DONE}{rank:05d}"
