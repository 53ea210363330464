"""`megalite convert`: checkpoints to Hugging Face folders and back, each proven equal before it gets its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.paths import named

if TYPE_CHECKING:
    from megalite.checkpoint.hf.verify import Verdict

app = typer.Typer(help="Convert between checkpoints and Hugging Face folders.", no_args_is_help=True)


class Dtype(str, Enum):
    """Number formats of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an older model in OUT.")]
VerifyBlocks = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Run only this many blocks to compare logits, for models larger than memory. All weights are still "
        "compared bit by bit. (default: all)",
        show_default=False,
    ),
]


@app.command("to-hf")
def to_hf(
    checkpoint: Annotated[Path, typer.Argument(help="A step-… folder, or a run's folder for its newest checkpoint.")],
    out: Annotated[Path, typer.Argument(callback=named, help="Folder to make.")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Number format of the weights. (default: fp32)", show_default=False)
    ] = None,
    quantized: Annotated[
        bool,
        typer.Option(
            "--quantized",
            help="Write the integers of a run with precision.qat (compressed-tensors), and all else as that run "
            "computes with it.",
        ),
    ] = False,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of weights.")] = "5GB",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer's folder, or `none`. (default: the one that the checkpoint records)", show_default=False
        ),
    ] = None,
    overwrite: Overwrite = False,
    verify_blocks: VerifyBlocks = None,
) -> None:
    """Export a checkpoint as a folder that transformers reads; refused unless a reload gives equal logits and ids."""
    from megalite.checkpoint.hf.exporter import QUANTIZED, to_hugging_face
    from megalite.checkpoint.hf.shards import parse_size
    from megalite.errors import ConversionError

    if quantized and dtype is not None:
        raise ConversionError(
            f"--dtype: found {dtype.value} beside --quantized, which keeps the run's own format; leave one out"
        )
    max_shard_bytes = parse_size(max_shard_size)
    number_format = QUANTIZED if quantized else Dtype.fp32.value if dtype is None else dtype.value
    with _working(out) as say:
        done = to_hugging_face(
            checkpoint,
            out,
            dtype=number_format,
            max_shard_bytes=max_shard_bytes,
            tokenizer=tokenizer,
            overwrite=overwrite,
            verify_blocks=verify_blocks,
            say=say,
        )
    written, num_files = done.written, len(done.written.files)
    typer.echo(f"{done.checkpoint} -> {done.folder}")
    typer.echo(
        f"  {done.architecture}: {written.num_parameters:,} parameters in {written.num_tensors} tensors, "
        f"{done.dtype}, {written.num_bytes / 1e6:,.1f} MB in {num_files} file{'s' if num_files > 1 else ''}"
    )
    _print_verdict(done.verdict)
    _print_notes(done.alarms, "WARNING")
    _print_notes(done.notes)


@app.command("to-peft")
def to_peft(
    checkpoint: Annotated[Path, typer.Argument(help="A step-… folder, or a run's folder for its newest checkpoint.")],
    out: Annotated[Path, typer.Argument(callback=named, help="Folder to make.")],
    base: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder of the model that was adapted. (default: what the run began with)",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Export the low-rank adapters of a run (`model.lora`) alone, for PEFT; refused unless all other weights are the
    base's."""
    from megalite.checkpoint.hf.adapter import to_peft as export

    with _working(out):
        done = export(checkpoint, out, base=base, overwrite=overwrite)
    typer.echo(f"{done.checkpoint} -> {done.folder}")
    typer.echo(
        f"  {done.num_parameters:,} parameters of adapters in {done.num_layers} layers of {done.architecture}, fp32; "
        f"all other weights are equal to those of {done.base}"
    )


@app.command("from-hf")
def from_hf(
    folder: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors.")],
    out: Annotated[
        Path, typer.Argument(callback=named, help="Folder to make; training starts from it with train.init_from=OUT.")
    ],
    overwrite: Overwrite = False,
    verify_blocks: VerifyBlocks = None,
) -> None:
    """Import a Hugging Face folder as a checkpoint to continue from; refused unless both compute equal logits."""
    from megalite.architecture.costs import count_parameters
    from megalite.checkpoint.hf.to_checkpoint import from_hugging_face

    with _working(out) as say:
        done = from_hugging_face(folder, out, overwrite=overwrite, verify_blocks=verify_blocks, say=say)
    typer.echo(f"{folder} -> {done.checkpoint}")
    typer.echo(f"  {done.architecture}: {count_parameters(done.model):,} parameters, fp32, no optimizer state")
    _print_verdict(done.verdict)
    typer.echo(f"  its model section is in {done.checkpoint / 'config.yaml'}")
    _print_notes(done.notes)


@app.command("upcycle")
def upcycle(
    checkpoint: Annotated[Path, typer.Argument(help="A step-… folder, or a run's folder for its newest checkpoint.")],
    out: Annotated[
        Path, typer.Argument(callback=named, help="Folder to make; training starts from it with train.init_from=OUT.")
    ],
    experts: Annotated[int, typer.Option(min=1, help="Experts of a block, each a copy of its MLP.")] = 8,
    top_k: Annotated[int, typer.Option(min=1, help="Experts that a token goes to.")] = 2,
    first_dense: Annotated[int, typer.Option(min=0, help="Blocks from the first on that stay dense.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="Of the others each so-manieth gets experts.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the fresh routers.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Give the blocks of a dense checkpoint experts, each a copy of the MLP: the new model computes what the old one
    did, and has room to learn."""
    from megalite.checkpoint.hf import upcycle as work

    settings = {"num_experts": experts, "top_k": top_k, "first_dense": first_dense, "every": every}
    with _working(out):
        done = work.upcycle(checkpoint, out, settings, seed=seed, overwrite=overwrite)
    typer.echo(f"{done.origin} -> {done.checkpoint}")
    typer.echo(f"  {done.num_parameters:,} parameters, of which a token meets {done.num_active:,}; fp32, no moments")
    typer.echo(f"  its model section is in {done.checkpoint / 'config.yaml'}")


@contextmanager
def _working(out: Path) -> Iterator[Callable[[str], None]]:
    """A sign of life on a terminal, which says what is being done; nothing in a log."""
    from rich.console import Console

    with Console(stderr=True, markup=False).status(f"{out} ...") as status:
        yield lambda what: status.update(f"{out}: {what} ...")


def _print_verdict(verdict: Verdict) -> None:
    typer.echo(f"  read back by transformers {verdict.transformers} in a fresh process:")
    typer.echo(f"    {verdict.num_weights} weights equal bit by bit")
    typer.echo(
        f"    logits of {verdict.num_tokens:,} tokens in {verdict.num_sequences} sequences through "
        f"{verdict.num_blocks} blocks: largest difference {verdict.max_difference:.2e}, every prediction equal"
    )
    if verdict.num_texts:
        typer.echo(f"    {verdict.num_texts} texts with equal ids")


def _print_notes(notes: tuple[str, ...], title: str = "NOTE") -> None:
    for note in notes:
        typer.secho(f"  {title}: {note}", bold=True, fg="red" if title == "WARNING" else None)
