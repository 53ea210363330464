"""Before the first run: `megalite init` lays out a folder to work in, `megalite doctor` says what a machine offers."""

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


def doctor(
    folder: Path = typer.Option(Path("runs"), "--dir", help="Where runs would be written."),
) -> int:
    """Say what this machine offers, and what each missing piece would need."""
    from rich.console import Console
    from rich.markup import escape

    from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE
    from megalite.page.terminal import FittingTable
    from megalite.planner.examine import examine

    findings = examine(folder)
    table = FittingTable("", "", "found", "to get it", box=None, pad_edge=False)
    for finding in findings:
        mark = "[green]yes[/]" if finding.present else "[red]no[/]" if finding.required else "[yellow]no[/]"
        needs = "" if finding.present else finding.needs
        table.add_row(mark, finding.name, escape(finding.found), escape(needs))
    Console().print(table)
    missing = [finding.name for finding in findings if finding.required and not finding.present]
    if missing:
        typer.echo(f"not ready to train: {', '.join(missing)} missing", err=True)
        return EXIT_BAD_INPUT
    typer.echo("ready to train on this machine")
    return EXIT_DONE
