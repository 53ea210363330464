"""A page as a browser shows it: pixels, what its scripts complained of, and the elements they made."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER_TIMEOUT_SECONDS = 120.0
SETTLE_MILLISECONDS = 3000
"""Of the page's own clock, which runs as fast as it can."""


def find_browser() -> str:
    """The browser's path; a test that needs one is left out, with the reason, where there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is on PATH")
    return found


def screenshot(
    page: Path, folder: Path, *, width: int, height: int, dark: bool = False
) -> tuple[np.ndarray, list[str]]:
    """Show a page.

    Returns:
        The window's pixels, uint8 [height, width, 3], and every line of the console.
    """
    out = folder / f"{page.stem}-{width}{'-dark' if dark else ''}.png"
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    said = _run([f"--screenshot={out}", f"--window-size={width},{height}", *scheme, page.as_uri()], folder)
    return np.asarray(Image.open(io.BytesIO(out.read_bytes())).convert("RGB")), said


def elements(page: Path, folder: Path, *, width: int = 1280) -> str:
    """The page's HTML after its scripts have run."""
    return _run(["--dump-dom", f"--window-size={width},900", page.as_uri()], folder, stdout=True)[0]


def _run(arguments: list[str], folder: Path, *, stdout: bool = False) -> list[str]:
    command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += ["--enable-logging=stderr", "--log-level=0", f"--user-data-dir={folder / 'browser'}"]
    command += [f"--virtual-time-budget={SETTLE_MILLISECONDS}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BROWSER_TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    return [done.stdout] if stdout else re.findall(r"CONSOLE.*", done.stderr)
