"""`megalite data card OUT`, as people call it."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megalite.cli.data import reports as verb
from megalite.corpus.card.make import HTML_FILE, JSON_FILE
from megalite.errors import DataError


def call(*arguments: str):
    app = typer.Typer()
    app.command()(verb.card)
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_card_is_written_and_summed_up(recipe):
    """Both files lie in the folder, and the screen shows the stations and where the page is."""
    result = call(recipe.out, "--open-nothing")
    assert result.exit_code == 0, result.output
    assert json.loads((recipe.out / JSON_FILE).read_text())["tokenizer"]["vocab_size"] == 300
    assert (recipe.out / HTML_FILE).read_text().startswith("<!doctype html>")
    assert "near-dedup" in result.output
    assert result.output.splitlines()[-1] == str(recipe.out / HTML_FILE)


def test_without_a_prepared_set(tmp_path):
    """The complaint is one for users."""
    result = call(tmp_path)
    assert isinstance(result.exception, DataError)


@pytest.mark.parametrize(("kind", "opens"), [(webbrowser.GenericBrowser, False), (webbrowser.BackgroundBrowser, True)])
def test_only_a_desktop_browser_is_opened(monkeypatch, kind, opens):
    """A browser of text would take the terminal away."""
    shown = []
    monkeypatch.setattr(kind, "open", lambda self, address, *_: shown.append(address))
    monkeypatch.setattr(webbrowser, "get", lambda: kind("browser"))
    verb._show_in_browser(Path("/folder/card.html"))
    assert shown == (["file:///folder/card.html"] if opens else [])
