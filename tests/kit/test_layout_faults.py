"""The probe that judges pages finds each kind of fault, and leaves a page without any alone."""

from __future__ import annotations

import pytest

from tests.kit.browser import layout_faults, show

PAGE = (
    '<!doctype html><meta name="viewport" content="width=device-width"><body style="margin:8px;font:15px sans-serif">'
)

FAULTS = {
    "cut off": '<div style="width:80px;overflow:hidden;white-space:nowrap">a line that is longer than its box</div>',
    "cut off ": '<svg width="90" height="20"><text x="40" y="15">under 0.1 %</text></svg>',
    "a word broken": '<p style="width:40px;overflow-wrap:anywhere">validation</p>',
    "text of": '<svg viewBox="0 0 760 20" width="300"><text x="0" y="15" font-size="13">small</text></svg>',
    "overlaps": '<svg width="90" height="30"><text x="0" y="20">12,000</text><text x="20" y="20">14,000</text></svg>',
    "overlaps ": '<div style="display:flex;width:90px"><span style="width:20px">12,000</span><span>14,000</span></div>',
    "the page is": '<div style="width:500px">wide</div>',
    "pixels to tap": '<button style="height:20px">tap</button>',
}


@pytest.mark.parametrize("fault", FAULTS)
def test_finds(tmp_path, fault):
    """What was planted, by its name."""
    (tmp_path / "page.html").write_text(PAGE + FAULTS[fault], encoding="utf-8")
    with show(tmp_path / "page.html", width=360) as tab:
        found = layout_faults(tab)
    assert any(fault.strip() in each for each in found), found


def test_a_good_page_has_none(tmp_path):
    """Long words that cannot but break, hidden text and a tall button are no faults."""
    good = f'<p style="overflow-wrap:anywhere">{"x" * 90}</p><p hidden>a</p><button style="height:40px">tap</button>'
    (tmp_path / "page.html").write_text(PAGE + good, encoding="utf-8")
    with show(tmp_path / "page.html", width=360) as tab:
        assert layout_faults(tab) == []
