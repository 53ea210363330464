"""Saving: every rank writes its share of the tensors, then the folder gets its name.

    all ranks   walk the weights together, each keeping the ones it is to write
    all ranks   write rank-N.safetensors and its checksum into .partial-step-…       any failure: all ranks give up
    rank 0      merge the lists of pieces, check that they tile every tensor, write the manifest, rename

A crash at any moment leaves the previous checkpoints untouched and a `.partial-` folder that the next save sweeps away.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from megalite import __version__
from megalite.checkpoint import catalog
from megalite.checkpoint.format import (
    CONFIG,
    Manifest,
    Piece,
    Progress,
    folder_name,
    hash_file,
    tensor_name,
    write_manifest,
)
from megalite.checkpoint.shares import file_name, sync, take_shares, write_share
from megalite.config.plan import RunPlan
from megalite.engine.protocol import Engine, LocalState
from megalite.errors import CheckpointError
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import any_rank


def save(
    root: Path,
    engine: Engine,
    axes: Axes,
    *,
    plan: RunPlan,
    progress: Progress,
    config_text: str,
    zero_stage: int,
    data: dict,
    device: torch.device,
) -> Path:
    """Write the checkpoint of the current step. Collective.

    Args:
        root: the run's `checkpoints` folder.
        config_text: the resolved config, kept beside the tensors.
        data: fingerprint of the training data and path of its tokenizer.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on all ranks, when any could not write; nothing is left behind.
    """
    final = root / folder_name(progress.step)
    partial = root / (catalog.PARTIAL + final.name)

    def agree(action: Callable[[], None]) -> None:
        _together(action, axes, device, partial)

    agree(lambda: _begin(root, partial, plan.num_parameters) if axes.global_rank == 0 else None)
    tensors, pieces = _collect(engine, axes)
    agree(lambda: write_share(partial, axes.global_rank, tensors, pieces))
    if axes.global_rank == 0:
        layout = {"pp": axes.pp.size, "dp": axes.dp.size, "cp": axes.cp.size, "tp": axes.tp.size}
        manifest = Manifest(
            progress=progress,
            model=plan.model.model_dump(mode="json"),
            layout={**layout, "zero_stage": zero_stage},
            tensors={},
            files={},
            megalite=__version__,
            data=data,
        )
    agree(lambda: _commit(partial, final, manifest, config_text) if axes.global_rank == 0 else None)
    return final


def _together(action: Callable[[], None], axes: Axes, device: torch.device, partial: Path) -> None:
    """Run an action on every rank; when it fails on any, fail on all and clean up."""
    error: Exception | None = None
    try:
        action()
    except (OSError, SafetensorError, CheckpointError) as caught:
        error = caught
    if not any_rank(error is not None, axes.world, device):
        return
    if axes.global_rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    if isinstance(error, CheckpointError):
        raise error
    reason = str(error) if error is not None else "another rank could not write its share"
    raise CheckpointError(f"{partial.parent}: checkpoint not saved: {reason}; the former ones are untouched") from error


def _begin(root: Path, partial: Path, num_parameters: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    catalog.sweep(root)
    catalog.check_disk(root, num_parameters)
    partial.mkdir()


def _collect(engine: Engine, axes: Axes) -> tuple[dict[str, Tensor], dict[str, list[Piece]]]:
    """Copies of the tensors that this rank writes, by key, and the pieces that describe them, by tensor name."""
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, list[Piece]] = {}
    file = file_name(axes.global_rank)
    for number, state in enumerate(engine.local_weights()):
        if not _writes(number, state, axes):
            continue
        rectangle = state.local.rectangle
        for kind, tensor in state.tensors.items():
            name = tensor_name(kind, state.local.weight.name)
            key = f"{name}@{','.join(map(str, rectangle.start))}"
            tensors[key] = tensor.to("cpu", torch.float32, copy=True).contiguous()
            pieces[name] = [Piece(file, key, rectangle.start, rectangle.shape)]
    return tensors, pieces


def _writes(number: int, state: LocalState, axes: Axes) -> bool:
    """Whether this rank writes a weight: dp ranks take turns, replicated weights and tied pairs are written once."""
    local = state.local
    is_tied_copy = local.parameter_name == "head.weight" and local.weight.layer == "embedding"
    is_replica = local.weight.cut is None and axes.tp.rank != 0
    is_empty = math.prod(local.rectangle.shape) == 0
    return number % axes.dp.size == axes.dp.rank and not (is_tied_copy or is_replica or is_empty)


def _commit(partial: Path, final: Path, manifest: Manifest, config_text: str) -> None:
    """Merge the shares into the manifest, check that nothing is missing, and give the folder its name."""
    manifest.files, manifest.tensors = take_shares(partial)
    (partial / CONFIG).write_text(config_text, encoding="utf-8")
    manifest.files[CONFIG] = hash_file(partial / CONFIG)
    write_manifest(partial, manifest)
    sync(partial)
    if final.exists():  # the same step saved again, after a resume that did not get further
        catalog.delete(final)
    partial.rename(final)
    sync(final.parent)
