"""`megalite checkpoint`: what checkpoints hold, whether they are sound, how two differ, and one made of many files."""

from __future__ import annotations

import json
import math
import re
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalite.cli.convert import Overwrite
from megalite.cli.paths import named
from megalite.errors import EXIT_DONE, EXIT_FAULT

if TYPE_CHECKING:
    from rich.table import Table

    from megalite.checkpoint.compare import Comparison, TensorDifference
    from megalite.checkpoint.format import Manifest
    from megalite.checkpoint.listing import Listed, Listing

app = typer.Typer(help="Look into checkpoints, check, merge and compare them.", no_args_is_help=True)

Checkpoint = Annotated[Path, typer.Argument(help="A step-… folder, or a run's folder for its newest checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")]


@app.command("ls")
def ls(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint's.")],
    full: Annotated[bool, typer.Option("--full", help="Compare all checksums, not only look for the files.")] = False,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints: step, size, who wrote them, validation loss, health."""
    from megalite.checkpoint.listing import list_checkpoints

    with _working(f"Looking at {run}"):
        listing = list_checkpoints(run, full=full)
    if as_json:
        rows = [_row_facts(row, full) for row in listing.checkpoints]
        typer.echo(json.dumps({"checkpoints": rows, "leftovers": listing.leftovers}))
        return
    _print_listing(listing, full)


@app.command("show")
def show(checkpoint: Checkpoint, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds: where the run stood, who wrote it, its files and tensors."""
    from megalite.checkpoint.hf.folders import find_checkpoint
    from megalite.checkpoint.listing import list_checkpoints

    row = list_checkpoints(find_checkpoint(checkpoint)).checkpoints[0]
    if row.manifest is None:
        _print_damage(row.problems)
        raise typer.Exit(EXIT_FAULT)
    if as_json:
        typer.echo(json.dumps({**_row_facts(row, full=False), "manifest": asdict(row.manifest)}))
        return
    _print_checkpoint(row, row.manifest)


@app.command("verify")
def verify(
    folder: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's for all of its checkpoints.")],
    as_json: AsJson = False,
) -> int:
    """Compare the checksum of every file; exit 1 and name the damage if there is any."""
    from megalite.checkpoint.listing import find, inspect

    problems: dict[str, tuple[str, ...]] = {}
    for path in find(folder):
        with _working(f"Reading {path}"):
            manifest, found = inspect(path, full=True)
        problems[str(path)] = found
        if not as_json:
            size = sum(record.bytes for record in manifest.files.values()) if manifest is not None else 0
            sound = f"sound: {len(manifest.files)} files, {_size(size)}, all checksums agree" if manifest else ""
            typer.echo(f"{path}: {'damaged' if found else sound}")
            _print_damage(found)
    if as_json:
        typer.echo(json.dumps({"checkpoints": [{"folder": k, "problems": v} for k, v in problems.items()]}))
    return EXIT_FAULT if any(problems.values()) else EXIT_DONE


@app.command("merge")
def merge(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(callback=named, help="Folder to make.")],
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave the optimizer's moments out: to start from, not to resume.")
    ] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Round the weights to bf16; needs --weights-only.")] = False,
    max_file_size: Annotated[str, typer.Option(help="Largest file of tensors.")] = "5GB",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint, differential or of many ranks, as a full one in few files, after checking it."""
    from megalite.checkpoint.hf.folders import find_checkpoint
    from megalite.checkpoint.hf.shards import parse_size
    from megalite.checkpoint.merge import merge as merge_checkpoint

    max_file_bytes = parse_size(max_file_size)
    with _working(f"Writing {out}"):
        done = merge_checkpoint(
            find_checkpoint(checkpoint),
            out,
            weights_only=weights_only,
            dtype="bf16" if bf16 else "fp32",
            max_file_bytes=max_file_bytes,
            overwrite=overwrite,
        )
    if as_json:
        typer.echo(json.dumps({key: _plain(value) for key, value in asdict(done).items()}))
        return
    files = f"{done.num_files} file{'s' if done.num_files > 1 else ''}"
    typer.echo(f"{done.source} -> {done.folder}: {done.num_tensors} tensors, {_size(done.num_bytes)} in {files}")


@app.command("diff")
def diff(
    a: Checkpoint,
    b: Checkpoint,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Compare weights, not moments.")] = False,
    num: Annotated[int, typer.Option(min=0, help="How many of the most different tensors are shown.")] = 20,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints of any layouts; exit 0 if training would go on alike from both, 1 if not."""
    from megalite.checkpoint.compare import compare
    from megalite.checkpoint.hf.folders import find_checkpoint

    with _working(f"Comparing {a} and {b}"):
        found = compare(find_checkpoint(a), find_checkpoint(b), weights_only=weights_only)
    if as_json:
        typer.echo(json.dumps(_comparison_facts(found)))
    else:
        _print_comparison(found, num)
    return EXIT_DONE if found.is_same_state else EXIT_FAULT


def _print_listing(listing: Listing, full: bool) -> None:
    table = _table("checkpoint", "saved (UTC)", "written by", "storage", "health")
    for head in ("tokens", "valid. loss", "size", "on disk"):
        table.add_column(head, justify="right")
    for row in listing.checkpoints:
        facts = _row_facts(row, full)
        tokens = f"{row.manifest.progress.num_tokens:,}" if row.manifest is not None else ""
        loss = "" if row.validation_loss is None else f"{row.validation_loss:.4f}{' best' if row.is_best else ''}"
        sizes = (_size(row.logical_bytes), _size(row.disk_bytes))
        cells = row.folder.name, f"{row.saved_at:%Y-%m-%d %H:%M}", facts["written_by"], facts["storage"]
        table.add_row(*cells, facts["health"], tokens, loss, *sizes)
    total = sum(row.disk_bytes for row in listing.checkpoints)
    console = _console()
    console.print(table)
    checked = "all checksums compared" if full else "files and sizes looked at; --full compares checksums"
    typer.echo(f"{_size(total)} on disk in all ({checked})")
    for row in listing.checkpoints:
        _print_damage(row.problems)
    for name, what in listing.leftovers.items():
        typer.echo(f"  {name}: {what}")


def _row_facts(row: Listed, full: bool) -> dict[str, Any]:
    """A row of the list as plain data."""
    from megalite.checkpoint.listing import storage

    manifest = row.manifest
    return {
        "folder": str(row.folder),
        "step": row.step,
        "saved_at": row.saved_at.isoformat(),
        "tokens": manifest.progress.num_tokens if manifest else None,
        "validation_loss": row.validation_loss,
        "best": row.is_best,
        "written_by": _layout(manifest.layout) if manifest else "",
        "storage": storage(manifest) if manifest else "",
        "size_bytes": row.logical_bytes,
        "disk_bytes": row.disk_bytes,
        "shared_bytes": row.shared_bytes,
        "health": "damaged" if row.problems else "sound" if full else "complete",
        "problems": row.problems,
    }


def _print_checkpoint(row: Listed, manifest: Manifest) -> None:
    from megalite.checkpoint.listing import by_kind, storage

    progress, model = manifest.progress, manifest.model
    loss = "" if row.validation_loss is None else f", validation loss {row.validation_loss:.4f}"
    facts = {
        "step": f"{progress.step:,}, {progress.num_updates:,} of them updates{loss}",
        "read": f"{progress.num_samples:,} samples, {progress.num_tokens:,} tokens",
        "data": f"{manifest.data.get('fingerprint', 'not recorded')}, consumed {progress.data_chain or 'nothing'}",
        "tokenizer": str(manifest.data.get("tokenizer") or "not recorded"),
        "written": f"{row.saved_at:%Y-%m-%d %H:%M} UTC by megalite {manifest.megalite}, {_layout(manifest.layout)}",
        "model": f"hidden {model.get('hidden_size')}, {model.get('num_layers')} layers, {model.get('num_heads')} heads",
        "size": f"{_size(row.logical_bytes)} of tensors, {_size(row.disk_bytes)} on disk, {storage(manifest)}",
    }
    table = _table("checkpoint", row.folder.name)
    for name, value in facts.items():
        table.add_row(name, value)
    kinds = _table("kind", "stands for")
    for head in ("tensors", "numbers", "size"):
        kinds.add_column(head, justify="right")
    for kind, (tensors, numbers) in by_kind(manifest).items():
        kinds.add_row(kind, KINDS.get(kind, ""), str(tensors), f"{numbers:,}", _size(4 * numbers))
    files = _table("file", "")
    files.add_column("size", justify="right")
    for name, record in sorted(manifest.files.items()):
        carried = f"shared, carried on {record.age} time{'s' if record.age > 1 else ''}" if record.age else ""
        files.add_row(name, carried, _size(record.bytes))
    for each in (table, kinds, files, _tensor_table(manifest)):
        _console().print(each)
    _print_damage(row.problems)


KINDS = {
    "weight": "master weights",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "exp_avg_sq_row": "second moments, means of rows",
    "exp_avg_sq_col": "second moments, means of columns",
    "momentum": "momentum",
    "z_minus_x": "of averages: model = weight - (1 - beta) this",
    "fp8_amax": "maxima that FP8 scales come from",
    "fp8_retired": "layers that went back from FP8",
}


def _tensor_table(manifest: Manifest) -> Table:
    """Weights, those of the blocks that look alike in one row; all kinds have the same."""
    groups: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
    for full_name, record in manifest.tensors.items():
        kind, name = full_name.split("/", 1)
        if kind != "weight":
            continue
        block = re.match(r"blocks\.(\d+)\.", name)
        pattern = re.sub(r"^blocks\.\d+\.", "blocks.*.", name)
        groups.setdefault((pattern, record.shape, len(record.pieces)), []).append(int(block[1]) if block else 0)
    table = _table("weight", "blocks")
    for head in ("shape", "numbers each", "pieces"):
        table.add_column(head, justify="right")
    for (name, shape, pieces), blocks in groups.items():
        which = _ranges(blocks) if name.startswith("blocks.*") else ""
        table.add_row(name, which, " x ".join(map(str, shape)), f"{math.prod(shape):,}", str(pieces))
    return table


def _ranges(numbers: list[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _print_comparison(found: Comparison, num: int) -> None:
    notes = {"model": found.model, "progress": found.progress, "layout": found.layout, "config": found.config}
    table = _table("", "A", "B")
    for section, pairs in notes.items():
        for key, pair in pairs.items():
            table.add_row(f"{section}: {key}", *map(str, pair))
    if table.row_count:
        _console().print(table)
    different = found.different
    typer.echo(f"{len(found.tensors) - len(different)} of {len(found.tensors)} tensors are equal bit for bit")
    if different and num:
        _console().print(_difference_table(different[:num]))
        typer.echo("relative: largest |A - B| over largest |A|")
    typer.echo("same state" if found.is_same_state else "different states")


def _difference_table(different: list[TensorDifference]) -> Table:
    table = _table("tensor")
    for head in ("shape", "numbers that differ", "largest |A - B|", "relative"):
        table.add_column(head, justify="right")
    for tensor in different:
        shape, other = (" x ".join(map(str, each)) if each else "absent" for each in (tensor.shape, tensor.other_shape))
        if tensor.shape is None or tensor.shape != tensor.other_shape:
            table.add_row(tensor.name, f"{shape} / {other}", "", "", "")
            continue
        share = f"{tensor.num_different:,} ({tensor.num_different / math.prod(tensor.shape):.1%})"
        table.add_row(tensor.name, shape, share, f"{tensor.max_abs:.3g}", f"{tensor.relative:.3g}")
    return table


def _comparison_facts(found: Comparison) -> dict[str, Any]:
    tensors = [
        {
            **asdict(tensor),
            "equal": tensor.is_equal,
            "max_abs": _finite(tensor.max_abs),
            "relative": _finite(tensor.relative),
        }
        for tensor in found.tensors
    ]
    sections = {name: getattr(found, name) for name in ("model", "progress", "layout", "config")}
    return {"same_state": found.is_same_state, **sections, "tensors": tensors}


def _finite(number: float) -> float | str:
    """JSON has no infinity."""
    return number if math.isfinite(number) else str(number)


def _layout(layout: dict[str, int]) -> str:
    """`tp 2 x dp 4, zero 1`: axes of size 1 are left out."""
    axes = [f"{axis} {layout[axis]}" for axis in ("pp", "dp", "cp", "tp") if layout.get(axis, 1) > 1]
    if not layout:
        return "an import"
    return f"{' x '.join(axes) or '1 rank'}, zero {layout.get('zero_stage', '?')}"


def _size(num_bytes: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 1000:,.1f} kB" if num_bytes >= 1000 else f"{num_bytes} B"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _print_damage(problems: tuple[str, ...]) -> None:
    for problem in problems:
        typer.secho(f"  {problem}", fg="red")


def _working(what: str) -> AbstractContextManager:
    """A sign of life on a terminal; nothing in a log."""
    from rich.console import Console

    return Console(stderr=True, markup=False).status(f"{what} ...")


def _console() -> Any:
    from megalite.cli.data.options import report_console

    return report_console()


def _table(*columns: str) -> Table:
    from megalite.page.terminal import figures

    return figures(*columns)
