"""The page is whole, fetches nothing, and shows what runs say as text."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import numpy as np
import pytest

from megalite.cli import curves as cli_curves
from megalite.cli.main import main
from megalite.report.page import render
from megalite.report.run_data import read_runs
from tests.kit.html import Reader
from tests.report.conftest import START, event, make_run

HOSTILE = '</script><script>alert("1")</script>'


def test_page_is_whole_and_fetches_nothing(finished):
    """Tags balance, nothing is loaded from anywhere, and the policy allows the one script by its hash."""
    page = render(read_runs([finished]), START)
    reader = Reader(page)
    names = [name for name, _ in reader.tags]
    assert names.count("script") == 2
    assert not {"link", "img", "iframe", "object"} & set(names)
    for name, attributes in reader.tags:
        assert not [key for key in attributes if key.startswith("on") or key in ("src", "href", "style")], name
    assert "@import" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    policy = next(attributes["content"] for name, attributes in reader.tags if "http-equiv" in attributes)
    script = re.search(r"<script>(.*)</script></body>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_what_runs_say_is_text(tmp_path):
    """Reasons, names and settings that look like markup are shown as they are written."""
    folder = make_run(tmp_path / f"<i>{HOSTILE.replace('/', '')}", 200, sets=(HOSTILE.replace("/", ""), "b"))
    page = render(read_runs([folder]), START)
    assert "alert" in page
    assert "<script>alert" not in page
    assert "<b>its</b>" not in page
    numbers = json.loads(re.search(r'id="numbers">(.*?)</script>', page, re.DOTALL)[1])
    assert "<b>its</b> mean" in numbers["runs"][0]["marks"][0]["text"]


@pytest.mark.parametrize(("num_steps", "first"), [(3000, 2951), (120, 109), (60, 55), (9, 9)])
def test_headline_loss_is_of_the_last_steps(tmp_path, num_steps, first):
    """A tenth of a short run, fifty steps of a long one, and the page says which: never the mean of the whole run."""
    (run,) = read_runs([make_run(tmp_path / "run", num_steps)])
    mean = np.mean([10 / step**0.5 for step in range(first, num_steps + 1)])
    which = f"steps {first:,} to {num_steps:,}" if first < num_steps else f"step {num_steps}"
    text = Reader(render([run], START)).text
    assert f"training loss{mean:.4f}mean of {which}" in text
    two = read_runs([run.folder, run.folder])
    assert Reader(render(two, START)).text.count(f"{mean:.4f}{which}") == 2


def test_the_lowest_validation_is_of_the_run_as_it_is(tmp_path):
    """Not one that a rollback has undone: of a step that was done again, or of one that has yet to be; a loss that is
    no number is none."""
    validations = [(20, 5.0), (30, 2.0), (40, 1.0), (60, 0.5), (20, 4.5), (30, 4.0), (40, None)]
    for name, more, expected in (("a", [], "4.0000at step 30"), ("b", [(40, 3.5)], "3.5000at step 40")):
        folder = make_run(tmp_path / name, 50)
        (folder / "events.jsonl").write_text(
            "".join(
                json.dumps(event("validation", START + place, step, loss=loss, seconds=1.0)) + "\n"
                for place, (step, loss) in enumerate([*validations, *more])
            )
        )
        assert f"lowest validation loss{expected}" in Reader(render(read_runs([folder]), START)).text


def test_what_was_out_of_the_ordinary_is_in_sight(tmp_path):
    """It is not among hundreds of validations behind a click; a run without anything says so."""
    page = render(read_runs([make_run(tmp_path / "run", 200)]), START)
    events = page.split("<h2>Events</h2>")[1].split("</section>")[0]
    assert "12 sigma above" in events.split("<details>")[0]
    assert events.count("12 sigma above") == 2
    assert "All 8 events" in events
    quiet = render(read_runs([make_run(tmp_path / "quiet", 40)]), START)
    assert "Nothing was out of the ordinary." in quiet


def test_several_runs(finished, tmp_path):
    """Side by side: how each stands, and only the settings that differ."""
    other = make_run(tmp_path / "faster", 200, lr=6e-4, end="stop")
    runs = read_runs([finished, other])
    page = render(runs, START)
    text = Reader(page).text
    assert "finished at step 3,000 of 3,000" in text
    assert "stopped at step 200 of 200, ready to go on" in text
    differences = page.split("Differences")[1].split("</section>")[0]
    assert "optimizer.lr" in differences
    assert "0.0006" in differences
    assert "optimizer.name" not in differences


def test_says_what_it_does(finished, tmp_path, capsys, monkeypatch):
    """Where there is much to read: what is read and drawn, on the error stream; nothing where it takes no time."""
    for least, said in ((10**9, False), (0, True)):
        monkeypatch.setattr(cli_curves, "LONG_READ_BYTES", least)
        with pytest.raises(SystemExit):
            main(["report", str(finished), "-o", str(tmp_path / "report.html")])
        err = capsys.readouterr().err
        assert ("reading: 3,000 steps of 1 run" in err) == said
        assert ("drawing: ..." in err) == said


def test_verb(finished, tmp_path, capsys):
    """`megalite report RUN` writes beside the run, -o elsewhere; bad input is told without a traceback."""

    def run(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["report", *map(str, arguments)])
        output = capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    code, said, _ = run(finished)
    assert code == 0
    assert "base: finished at step 3,000 of 3,000" in said
    assert (finished / "report.html").read_text().startswith("<!doctype html>")
    code, said, _ = run(finished, finished, "-o", tmp_path / "two.html")
    assert code == 0
    assert (tmp_path / "two.html").is_file()
    for arguments in ((tmp_path / "nowhere",), (tmp_path,), (finished, "-o", tmp_path / "two.html" / "such.html")):
        code, _, error = run(*arguments)
        assert code == 2
        assert "Traceback" not in error
        assert "give the folder" in error or "give another name" in error


def test_number_formats_of_runs_that_differ_in_their_products(tmp_path):
    """Two runs in fp32 look apart where one's products round."""
    folder = make_run(tmp_path / "run", 12)
    config = (folder / "config.yaml").read_text().replace("dtype: bf16", "dtype: fp32", 1)
    for products, shown in (("products: fp32", "fp32<"), ("products: tf32", "fp32, products tf32<")):
        (folder / "config.yaml").write_text(config.replace("products: fp32", products))
        assert shown in render(read_runs([folder]), START)
