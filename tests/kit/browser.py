"""Pages in a real browser: one headless Chromium for a whole session of tests, driven over its debugging pipe.

    show(page, width=360)  ->  Tab  ->  evaluate(script), pixels(), said
    layout_faults(tab)     ->  what a reader would stumble over: text that is cut, overlaps, breaks or is tiny

A process for each look costs a second and cannot be narrower than 500 pixels; a tab costs a tenth, and is a phone.
"""

from __future__ import annotations

import atexit
import base64
import fcntl
import functools
import io
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ANSWER_SECONDS = 120.0
PHONE_WIDTH = 600
"""Up to here a window is a phone's: it heeds the page's viewport and is touched."""

WIDTHS = (360, 768, 1440)
"""A phone, a tablet, a desk."""

FIRST_FREE_FD = 20
"""The browser reads commands from 3 and answers on 4; our own ends stay clear of them."""


def find_browser() -> str:
    """The browser's path; a test that needs one is left out, with the reason, where there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is on PATH")
    return found


def show(page: Path, *, width: int, height: int = 900, dark: bool = False, media: str = "screen") -> Tab:
    """Open a page in a tab of the session's browser; use it as a context manager."""
    return Tab(_browser(find_browser()), page, width=width, height=height, dark=dark, media=media)


class Tab:
    """One page at one size."""

    def __init__(self, browser: Browser, page: Path, *, width: int, height: int, dark: bool, media: str):
        self.width, self._browser = width, browser
        self.said: list[str] = []
        """Lines of the console, errors and refusals of the page's policy among them."""
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width <= PHONE_WIDTH}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._call("Page.navigate", url=page.as_uri())
        browser.wait_for(self._session, "Page.loadEventFired")
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, which its policy does not stop; promises are waited for."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def pixels(self, *, whole: bool = False) -> np.ndarray:
        """The window, or the whole page, uint8 [height, width, 3]."""
        clip = {}
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {**size, "scale": 1}, "captureBeyondViewport": True}
        data = self._call("Page.captureScreenshot", format="png", **clip)["data"]
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))

    def html(self) -> str:
        """The elements that there are after the page's scripts have run."""
        return self.evaluate("document.documentElement.outerHTML")

    def _call(self, method: str, **parameters: Any) -> dict:
        answer = self._browser.call(method, self._session, **parameters)
        self.said += self._browser.take_said(self._session)
        return answer


class Browser:
    """A headless browser; commands go in and answers come out over two pipes, JSON with a zero byte behind."""

    def __init__(self, path: str):
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)  # it may still write
        (commands, self._in), (self._out, answers) = _pipe(), _pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]

        def hand_over() -> None:
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [path, *flags, "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}"],
            preexec_fn=hand_over,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._unread, self._last_id = b"", 0
        self._events: list[dict] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict:
        """Send a command and wait for its answer; events that come meanwhile are kept."""
        self._last_id += 1
        command = {"id": self._last_id, "method": method, "params": parameters}
        os.write(self._in, json.dumps(command | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last_id:
            self._events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def wait_for(self, session: str, event: str) -> None:
        """Until a tab has told of something."""
        while not any(each.get("method") == event and each.get("sessionId") == session for each in self._events):
            self._events.append(self._next())

    def take_said(self, session: str) -> list[str]:
        """What a tab's console has said since the last time."""
        mine = [each for each in self._events if each.get("sessionId") == session]
        self._events = [each for each in self._events if each.get("sessionId") not in (session, None)]
        said = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [json.dumps(each["params"]) for each in mine if each["method"] in said]

    def close(self) -> None:
        """End it, however it is."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _next(self) -> dict:
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {ANSWER_SECONDS:.0f} s"
            read = os.read(self._out, 1 << 20)
            assert read, f"the browser ended with exit status {self._process.wait(10)}"
            self._unread += read
        message, self._unread = self._unread.split(b"\0", 1)
        return json.loads(message)


@functools.cache
def _browser(path: str) -> Browser:
    browser = Browser(path)
    atexit.register(browser.close)
    return browser


def _pipe() -> list[int]:
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD) for end in ends]
    for end in ends:
        os.close(end)
    return moved


def layout_faults(tab: Tab) -> list[str]:
    """What a reader would stumble over at this size, each as a line that names the place."""
    return tab.evaluate(f"({FAULTS})({tab.width})")


FAULTS = (Path(__file__).with_name("layout_faults.js")).read_text(encoding="utf-8")
