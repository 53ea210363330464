"""x"""

from __future__ import annotations


def write_ladder_page(plan, runs, law, foretold, best):
    p = plan.folder / "ladder.html"
    p.write_text("x")
    return p
