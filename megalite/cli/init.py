"""`megalite init`: a folder to work in, without a clone of the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NEXT = {
    "megalite doctor": "what this machine offers",
    "megalite data prepare configs/data/demo.yaml": "raw text to tokens; Python's own library stands for a corpus",
    "megalite train configs/demo.yaml": "two ranks on the CPU; on a GPU add parallel.tp=1 precision.dtype=bf16",
    "megalite convert to-hf runs/demo runs/demo/hf": "a model that transformers loads",
    'megalite generate runs/demo/hf --prompt "def main("': "a line of its text",
}


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make; it may have other files already.")],
) -> None:
    """Lay out starter files: configs, data recipes, cluster profiles, scripts for Slurm and the docs.

    Overwrites nothing: a file of the same name that says something else is named, and the folder stays as it was.
    """
    import shlex

    from megalite.starter import lay_out

    names = lay_out(folder)
    tops = list(dict.fromkeys(name.split("/")[0] for name in names))
    typer.echo(f"{folder}: {len(names)} files in {', '.join(tops)}")
    typer.echo("\nfrom raw text to a model:")
    if folder.absolute() != Path.cwd():
        typer.echo(f"  cd {shlex.quote(str(folder))}")
    for command, what in NEXT.items():
        typer.echo(f"  {command}\n      {what}")
    typer.echo("docs/ has a page for each job, and `megalite COMMAND --help` every option.")
