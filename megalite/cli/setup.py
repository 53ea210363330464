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
    config: Annotated[
        Path | None, typer.Argument(help="A run's YAML file, to look at the run as well.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that replace the file's: section.key=value ...", show_default=False),
    ] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where runs would be written.")] = Path("runs"),
    overfit_steps: Annotated[int, typer.Option(min=1, help="Updates on one batch, which should learn it.")] = 100,
) -> int:
    """Say what this machine offers; with a config, look at the run before it begins.

    Of a run: whether its data is text, its first loss that of its weights, every weight has a gradient, one batch can
    be learnt by heart, the loss is the same in another layout, a restart is exact, and the speed the planned one. It
    takes the run's own ranks and some minutes, and leaves the run's folder alone.
    """
    if config is not None:
        return _examine_run(config, overrides or [], overfit_steps)
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


def _examine_run(config: Path, overrides: list[str], overfit_steps: int) -> int:
    from rich.console import Console
    from rich.markup import escape

    from megalite.errors import EXIT_DONE, EXIT_FAULT
    from megalite.page.terminal import FittingTable
    from megalite.studies.checkup import check_up

    verdicts = check_up(config, overrides, overfit_steps=overfit_steps)
    table = FittingTable("", "", "found", "what to do", box=None, pad_edge=False)
    marks = {True: "[green]good[/]", False: "[red]bad[/]", None: "[yellow]?[/]"}
    for each in verdicts:
        table.add_row(marks[each.is_good], each.what, escape(each.found), escape(each.advice))
    Console().print(table)
    bad = [each.what for each in verdicts if each.is_good is False]
    if bad:
        typer.echo(f"look at this before you train: {', '.join(bad)}", err=True)
        return EXIT_FAULT
    typer.echo("nothing speaks against this run")
    return EXIT_DONE
