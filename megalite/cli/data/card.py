"""The verb that describes a prepared set."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megalite.cli.data.options import report_console


def card(
    out: Annotated[Path, typer.Argument(help="Folder of a recipe that `prepare` has finished.")],
    recipe: Annotated[Path | None, typer.Option(help="The recipe, for what it says of its sources.")] = None,
    open_nothing: Annotated[bool, typer.Option("--open-nothing", help="Do not show the page in a browser.")] = False,
) -> None:
    """Describe a prepared set: card.json and card.html in its folder, and a summary here."""
    from megalite.corpus.card.make import HTML_FILE, make_card, write_card
    from megalite.corpus.card.terminal import summary
    from megalite.corpus.prepare import load_recipe

    made = make_card(out, load_recipe(recipe) if recipe is not None else None)
    write_card(out, made)
    report_console().print(summary(made))
    page = out.absolute() / HTML_FILE
    typer.echo(str(page))
    if not open_nothing and sys.stdout.isatty():
        _show(page)


def _show(page: Path) -> None:
    """Open a page where there is a desktop. A browser of text, as servers have, would take the terminal away."""
    import webbrowser

    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if type(browser) is not webbrowser.GenericBrowser:  # text browsers are of this class, desktop ones of others
        browser.open(page.as_uri())
