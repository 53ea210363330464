"""The page in a real browser: everything is drawn, nothing complains, and it reads well on a phone, a tablet,
a desk and in a dark room."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megalite.report.page import write_report
from tests.kit.browser import WIDTHS, find_browser, layout_faults, show
from tests.report.conftest import make_run, write_lines

BLUE, ORANGE = (0x38, 0x67, 0xD6), (0xE0, 0x7B, 0x00)
"""Of the first two lines, in a light room."""

LONG_NAME = "llama-125m_lr6e-4_wd0.1_seed1234_averyveryverylongwordwithoutanyseparator"

CONTROLS = """(() => {
  const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
  const at = (x, type) => ({clientX: box.left + x, clientY: box.top + 90, bubbles: true, pointerType: type});
  const send = (kind, x, type = "mouse") => plot.dispatchEvent(new PointerEvent(kind, at(x, type)));
  const paths = () => [...plot.querySelectorAll("path.line")].map((path) => path.getAttribute("d")).join();
  const ticks = () => [...plot.querySelectorAll("text.middle")].map((text) => text.textContent).join(" ");
  const tip = plot.querySelector(".tip"), found = {whole: ticks()};
  send("pointermove", 300); found.tip = tip.textContent;
  send("pointerdown", 200); send("pointermove", 320); send("pointerup", 320); found.zoomed = ticks();
  plot.dispatchEvent(new MouseEvent("dblclick")); found.back = ticks();
  document.querySelector('input[name="span"][value="0.1"]').click(); found.last = ticks();
  document.querySelector('input[name="span"][value="1"]').click(); found.again = ticks();
  send("pointerleave", 0); found.left = tip.hidden;
  send("pointerdown", 300, "touch"); send("pointermove", 340, "touch"); send("pointerup", 340, "touch");
  send("pointerleave", 340, "touch"); found.finger = ticks();
  found.touched = tip.textContent; found.stays = !tip.hidden;
  document.querySelector("h1").dispatchEvent(new PointerEvent("pointerdown", {bubbles: true})); found.gone = tip.hidden;
  const before = paths(); document.querySelector("button.log").click(); found.log = before !== paths();
  const straight = paths(), slider = document.getElementById("smoothing");
  slider.value = 90; slider.dispatchEvent(new Event("input")); found.smooth = straight !== paths();
  document.querySelector('input[value="hours"]').click(); found.hours = ticks();
  document.querySelector(".key").click(); found.hidden = plot.querySelectorAll("path.line.c0").length;
  return found;
})()"""


@pytest.fixture(scope="module")
def page(finished, tmp_path_factory) -> Path:
    """A report of one run."""
    find_browser()
    return write_report([finished], tmp_path_factory.mktemp("browser") / "report.html")[0]


@pytest.fixture(scope="module")
def five(finished, tmp_path_factory) -> Path:
    """A report of five runs: long names, one validation, one step, no last word; a spike at step 150 in most."""
    find_browser()
    folder = tmp_path_factory.mktemp("five")
    others = [
        make_run(folder / LONG_NAME, 2000, lr=6e-4, end="stop"),
        make_run(folder / "no-last-word", 800, lr=1e-3, end=None, sets=("prose",)),
        make_run(folder / "one", 1, end=None),
        make_run(folder / "short", 120),
    ]
    return write_report([finished, *others], folder / "all.html")[0]


def count(image: np.ndarray, colour: tuple[int, int, int]) -> int:
    """Pixels of about a colour."""
    return int((np.abs(image.astype(int) - colour).max(axis=2) < 40).sum())


def test_everything_is_drawn(page):
    """Every chart has axes and lines, lines of both colours are seen, and the console is silent."""
    with show(page, width=1280, height=1600) as tab:
        image, dom = tab.pixels(), tab.html()
        assert tab.said == []
    assert image.shape == (1600, 1280, 3)
    assert tuple(image[5, 5]) == (255, 255, 255)
    assert count(image, BLUE) > 1500
    assert count(image, ORANGE) > 300
    num_charts = dom.count("data-chart=")
    assert num_charts >= 7
    assert f'data-drawn="{num_charts}"' in dom
    lines = re.findall(r'<path d="([^"]*)" class="line c\d', dom)
    assert len(lines) == num_charts + 2
    assert all(line.startswith("M") and "NaN" not in line for line in lines)
    assert dom.count('class="flag warn') == 1


def test_policy_forbids_other_scripts(page, tmp_path):
    """A script that came into the page from elsewhere does not run, and the console says so."""
    text = page.read_text(encoding="utf-8").replace("</body>", "<script>document.title = 'mine'</script></body>")
    (tmp_path / "guarded.html").write_text(text, encoding="utf-8")
    with show(tmp_path / "guarded.html", width=800) as tab:
        assert tab.evaluate("document.title") == "base: training report"
        assert "Content Security Policy" in "".join(tab.said)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_reads_well_at_every_width(page, five, width, dark):
    """No text is cut off, broken inside a word, overlapping or tiny, nothing is pushed sideways, and a finger finds
    what there is to tap; with everything unfolded too."""
    for which in (page, five):
        with show(which, width=width, dark=dark) as tab:
            assert layout_faults(tab) == []
            tab.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
            assert layout_faults(tab) == []
            assert (tab.pixels()[5, 5].max() < 60) == dark
            assert tab.said == []


def test_controls(page):
    """Pointing tells values, dragging looks closer, a double click goes back; a finger reads and what it read stays;
    log scale, smoothing, hours, the last part and the legend change what is drawn."""
    with show(page, width=1280) as tab:
        found = tab.evaluate(CONTROLS)
        assert tab.said == []
    assert found["whole"] == found["back"] == found["again"] == found["finger"]
    assert len({found["whole"], found["zoomed"], found["last"], found["hours"]}) == 4
    for tip in (found["tip"], found["touched"]):
        assert "training" in tip
        assert "validation: prose" in tip
    for what in ("left", "stays", "gone", "log", "smooth"):
        assert found[what] is True, what
    assert found["hidden"] == 0


def test_a_single_validation_is_seen(tmp_path):
    """Also at the last step, at the edge of the chart: a whole dot, as large as a finger's nail is wide."""
    run = make_run(tmp_path / "run", 100, sets=("prose",))
    with show(write_report([run])[0], width=360) as tab:
        (dot,) = tab.evaluate(
            """[...document.querySelectorAll("figure.main circle.lone")].map((dot) => {
              const [own, chart] = [dot, dot.closest("svg")].map((each) => each.getBoundingClientRect());
              return [own.width, own.right <= chart.right, dot.closest("[clip-path]") === null]; })"""
        )
        image = tab.pixels(whole=True)
    assert dot[0] >= 12
    assert dot[1:] == [True, True]
    assert count(image, ORANGE) > 80


def test_a_single_early_validation_is_in_range(tmp_path):
    """One before the steps that the chart is scaled to stretches the chart instead of lying outside."""
    run = make_run(tmp_path / "run", 99, end=None)
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    early = {"time": lines[0]["time"] + 2, "event": "validation", "step": 1, "loss": 12.0, "seconds": 1.0}
    write_lines(run / "events.jsonl", [*lines, early])
    with show(write_report([run])[0], width=768) as tab:
        assert tab.evaluate('document.querySelectorAll("figure.main circle.lone").length') == 1


def test_spikes_of_several_runs_are_marked(five):
    """Each in its run's colour, on its line, with what it was under the pointer; a run switched off takes its own
    along."""
    with show(five, width=1440) as tab:
        marks = """[...document.querySelectorAll("figure.main path.spike")].map((each) => each.getAttribute("class"))"""
        assert tab.evaluate(marks) == ["spike c0", "spike c1", "spike c2"]
        tip = tab.evaluate(
            """(() => { const mark = document.querySelector("figure.main path.spike").getBoundingClientRect();
            const plot = document.querySelector(".plot"), at = mark.left + mark.width / 2;
            plot.dispatchEvent(new PointerEvent("pointermove", {clientX: at, clientY: mark.top, bubbles: true}));
            return plot.querySelector(".tip").textContent; })()"""
        )
        assert "base, step 150: loss 5.8165 after 0.8" in tip
        tab.evaluate("""document.querySelector('figure.main [data-key="run 0"]').click()""")
        assert tab.evaluate(marks) == ["spike c1", "spike c2"]


def test_a_flag_at_the_last_step_is_whole(five):
    """A stop ends a run, so its mark stands at the chart's right end: nothing cuts half of it off."""
    with show(five, width=1440) as tab:
        cut = """[...document.querySelectorAll("figure.main path.flag")].map((each) => {
            const flag = each.getBoundingClientRect(), frame = each.ownerSVGElement.getBoundingClientRect();
            return each.closest("[clip-path]") !== null || flag.right > frame.right; })"""
        assert tab.evaluate(cut) == [False] * 4  # three skipped steps and the stop


def test_a_legend_of_several_runs_names_each_once(five):
    """Five colours and two kinds of validation are seven keys beside the one of training, not thirteen."""
    with show(five, width=1440) as tab:
        keys = tab.evaluate('[...document.querySelectorAll("figure.main .key")].map((each) => each.textContent)')
        assert keys[5:] == ["training", "validation: prose", "validation: code"]
        assert len(keys) == 8
        count_lines = 'document.querySelectorAll("figure.main path.line").length'
        before = tab.evaluate(count_lines)
        tab.evaluate("""document.querySelector('figure.main [data-key="valid/code"]').click()""")
        assert tab.evaluate(count_lines) == before - 3


def test_prints(five):
    """On paper there are no controls, and every table is whole."""
    with show(five, width=1000, media="print") as tab:
        hidden = 'getComputedStyle(document.querySelector(".controls")).display'
        assert tab.evaluate(hidden) == "none"
        assert [fault for fault in layout_faults(tab) if fault.startswith("cut off")] == []
