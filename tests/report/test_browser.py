"""The page in a real browser: everything is drawn, nothing complains, it fits a phone and a dark room."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megalite.report.write import write_report
from tests.kit.browser import elements, find_browser, screenshot
from tests.report.conftest import make_run

BLUE, ORANGE = (0x38, 0x67, 0xD6), (0xE0, 0x7B, 0x00)
"""Of the first two lines, in a light room."""

PROBE = """<script>
const act = () => {
  const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
  const at = (x) => ({clientX: box.left + x, clientY: box.top + 90, bubbles: true});
  const send = (kind, x) => plot.dispatchEvent(new PointerEvent(kind, at(x)));
  const paths = () => [...plot.querySelectorAll("path.line")].map((path) => path.getAttribute("d")).join();
  const ticks = () => [...plot.querySelectorAll("text.middle")].map((text) => text.textContent).join(" ");
  const found = {whole: ticks(), fits: document.documentElement.scrollWidth <= window.innerWidth};
  send("pointermove", 300); found.tip = plot.querySelector(".tip").textContent;
  send("pointerdown", 200); send("pointermove", 320); send("pointerup", 320); found.zoomed = ticks();
  plot.dispatchEvent(new MouseEvent("dblclick")); found.back = ticks();
  const before = paths(); document.querySelector("button.log").click(); found.log = before !== paths();
  const straight = paths(), slider = document.getElementById("smoothing");
  slider.value = 90; slider.dispatchEvent(new Event("input")); found.smooth = straight !== paths();
  document.querySelector('input[value="hours"]').click(); found.hours = ticks();
  document.querySelector(".key").click(); found.hidden = plot.querySelectorAll("path.line.c0").length;
  document.documentElement.dataset.found = JSON.stringify(found);
};
setTimeout(act, 200);
</script></body>"""


@pytest.fixture(scope="module")
def page(finished, tmp_path_factory) -> Path:
    """A report of one run."""
    find_browser()
    return write_report([finished], tmp_path_factory.mktemp("browser") / "report.html")[0]


def count(image: np.ndarray, colour: tuple[int, int, int]) -> int:
    """Pixels of about a colour."""
    return int((np.abs(image.astype(int) - colour).max(axis=2) < 40).sum())


def test_everything_is_drawn(page, tmp_path):
    """Every chart has axes and lines, lines of both colours are seen, and the console is silent."""
    image, said = screenshot(page, tmp_path, width=1280, height=1600)
    assert said == []
    assert image.shape == (1600, 1280, 3)
    assert tuple(image[5, 5]) == (255, 255, 255)
    assert count(image, BLUE) > 1500
    assert count(image, ORANGE) > 300
    dom = elements(page, tmp_path)
    num_charts = dom.count("data-chart=")
    assert num_charts >= 7
    assert f'data-drawn="{num_charts}"' in dom
    lines = re.findall(r'<path d="([^"]*)" class="line c\d', dom)
    assert len(lines) == num_charts + 2
    assert all(line.startswith("M") and "NaN" not in line for line in lines)
    assert dom.count('class="flag warn"') == 1


def test_dark_and_narrow(page, tmp_path):
    """In a dark room the page is dark; on a phone nothing is wider than the screen."""
    image, said = screenshot(page, tmp_path, width=1280, height=900, dark=True)
    assert said == []
    assert image[5, 5].max() < 60
    narrow, said = screenshot(page, tmp_path, width=500, height=1600)
    assert said == []
    assert count(narrow, BLUE) > 1000
    assert count(narrow[:, -6:], (255, 255, 255)) == narrow[:, -6:].shape[0] * 6  # the margin stays free


def test_controls(page, tmp_path):
    """Pointing tells values, dragging looks closer, a double click goes back; log scale, smoothing, hours and the
    legend change what is drawn. The policy forbids scripts from elsewhere, so it is taken out for the probe, which does
    nothing while it is there."""
    text = page.read_text(encoding="utf-8").replace("</body>", PROBE)
    guarded, free = tmp_path / "guarded.html", tmp_path / "free.html"
    guarded.write_text(text, encoding="utf-8")
    free.write_text(re.sub(r"<meta http-equiv[^>]*>", "", text), encoding="utf-8")
    assert "data-found" not in elements(guarded, tmp_path).split(">")[1]
    found = re.search(r'data-found="([^"]*)"', elements(free, tmp_path))[1].replace("&quot;", '"')
    values = dict(re.findall(r'"(\w+)":("[^"]*"|\w+)', found))
    assert values["fits"] == "true"
    assert values["whole"] == values["back"] != values["zoomed"]
    assert "training" in values["tip"]
    assert "validation: prose" in values["tip"]
    assert values["log"] == values["smooth"] == "true"
    assert values["hours"] != values["whole"]
    assert values["hidden"] == "0"


def test_several_runs(finished, tmp_path):
    """Each run in its colour, a run of one step too."""
    find_browser()
    others = [make_run(tmp_path / "short", 200, lr=6e-4, end="stop"), make_run(tmp_path / "one", 1, end=None)]
    page, _ = write_report([finished, *others], tmp_path / "all.html")
    image, said = screenshot(page, tmp_path, width=1280, height=1200)
    assert said == []
    assert count(image, BLUE) > 1000
    assert count(image, ORANGE) > 100
