"""`megalite doctor`."""

from __future__ import annotations

from pathlib import Path

import typer


def doctor(
    folder: Path = typer.Option(Path("runs"), "--dir", help="Where runs would be written."),
) -> int:
    """Say what this machine offers, and what each missing piece would need."""
    from rich.console import Console
    from rich.markup import escape

    from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE
    from megalite.page.terminal import FittingTable
    from megalite.planner.machine import examine

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
