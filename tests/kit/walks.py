"""The walks of docs/plan.md: commands, and what they print.

python -m tests.kit.walks      writes what they print now; read the prose around it again
"""

from __future__ import annotations

import contextlib
import io
import re

from megalite.cli.main import main
from tests.kit.paths import ROOT

PAGE = ROOT / "docs" / "plan.md"
SHOWN = re.compile(r"^\$ megalite (plan configs/\S+ .*)\n((?:(?!```|\$ ).*\n)+)", re.MULTILINE)
NOT_SHOWN = "hours are those of training steps"


def shown() -> list[tuple[str, str]]:
    """Commands of the page that have something under them, and that."""
    return SHOWN.findall(PAGE.read_text(encoding="utf-8"))


def printed(command: str) -> str:
    """What a command prints, its errors behind it; without empty lines and the note that all of them have."""
    out, errors = io.StringIO(), io.StringIO()
    said = contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors)
    with contextlib.chdir(ROOT), said[0], said[1], contextlib.suppress(SystemExit):
        main(command.split())
    lines = (out.getvalue() + errors.getvalue()).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip() and not line.startswith(NOT_SHOWN))


def _write() -> None:
    text = PAGE.read_text(encoding="utf-8")
    now = SHOWN.sub(lambda found: f"$ megalite {found[1]}\n{printed(found[1])}", text)
    PAGE.write_text(now, encoding="utf-8")


if __name__ == "__main__":
    _write()
