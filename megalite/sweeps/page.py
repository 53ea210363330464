"""x"""

from __future__ import annotations


def write_sweep_page(loaded, book):
    p = loaded.dir / "sweep.html"
    p.write_text("x")
    return p
