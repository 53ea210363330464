"""requirements.lock: the versions that the tests ran with, and the hash of every file that may be installed for them.

    environment (tested versions)  \\
    setup.py (names, extras)        ->  uv, once for each Python and processor  ->  requirements.lock
    torch (its own requirements)   /

torch itself is left out: which build fits is a matter of the machine, and a build from elsewhere has another hash. It
is installed first. Files are named by their hashes alone, so any index serves.

    make lock                                     write it anew, from the environment in .venv
    .venv/bin/python tools/packaging/lock.py --check    say where it no longer satisfies setup.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"

EXTRAS = ("dev", "data", "fast", "ray", "wandb", "sweep", "quantized", "semantic")
"""Of setup.py, which `make install` takes."""

BUILD_TOOLS = ("setuptools", "wheel")
"""First in the file, up to BUILD_END: what the packages without a wheel are built with."""

BUILD_END = "# To run with:"

LEFT_OUT = {"torch", "megalite", "pip"}

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")

Locked = dict[str, tuple[str, set[str]]]
"""Version and hashes of each package."""


def declared() -> list[Requirement]:
    """What setup.py asks for, the extras of `make install` among it."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    asked = setup.call_args.kwargs
    extras = asked["extras_require"]
    return [Requirement(each) for each in (*asked["install_requires"], *(r for e in EXTRAS for r in extras[e]))]


def read(text: str) -> Locked:
    """The packages of a lock file."""
    found = re.findall(r"^([a-z0-9-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    return {name: (version, set(re.findall("[0-9a-f]{64}", hashes))) for name, version, hashes in found}


def complaints(text: str, wanted: list[Requirement]) -> list[str]:
    """Why a lock file does not stand for what setup.py asks for; empty if it does."""
    locked = read(text)
    found = [f"{line}: not understood" for line in text.splitlines() if not _is_known(line)]
    if len(locked) != len(re.findall(r"^[a-z0-9-]+==", text, re.MULTILINE)):
        found.append("a package without a hash, or twice")
    found += [f"{name}: must not be locked" for name in LEFT_OUT & locked.keys()]
    found += [f"{name}: missing, packages are built with it" for name in BUILD_TOOLS if name not in locked]
    asked = [("setup.py", each) for each in wanted]
    asked += [(name, each) for name, (version, _) in locked.items() for each in _required_by(name, version)]
    for who, requirement in asked:
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT:
            continue
        if name not in locked:
            found.append(f"{requirement}: not locked, but {who} asks for it")
        elif not requirement.specifier.contains(locked[name][0], prereleases=True):
            found.append(f"{name}=={locked[name][0]}: {who} asks for {requirement}")
    return sorted(set(found))


def _is_known(line: str) -> bool:
    return re.fullmatch(r"(#.*)?|[a-z0-9-]+==\S+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line) is not None


def _required_by(name: str, version: str) -> list[Requirement]:
    """What a locked package asks for itself; known of those that are installed in the same version."""
    try:
        if metadata.version(name) != version:
            return []
    except metadata.PackageNotFoundError:
        return []
    asked = map(Requirement, metadata.requires(name) or ())
    return [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]


def make(uv: str) -> str:
    """The lock file's text, from this environment."""
    locked: Locked = {}
    with tempfile.TemporaryDirectory() as folder:
        for python in PYTHONS:
            for machine in PLATFORMS:
                for name, (version, hashes) in _resolve(uv, Path(folder), python, machine).items():
                    assert locked.setdefault(name, (version, set()))[0] == version, f"{name}: two versions"
                    locked[name][1].update(hashes)
    first = {name: locked[name] for name in BUILD_TOOLS}
    rest = {name: each for name, each in sorted(locked.items()) if name not in first}
    head = (
        "# Everything that `make install LOCKED=1` installs behind torch, as tested with torch "
        f"{metadata.version('torch').split('+')[0]} on Python {platform.python_version()}.\n"
        f"# For Python {PYTHONS[0]} to {PYTHONS[-1]} on Linux, x86_64 and aarch64. Made by `make lock`, not by hand.\n"
    )
    return f"{head}# To build with:\n{_lines(first)}{BUILD_END}\n{_lines(rest)}"


def _lines(locked: Locked) -> str:
    return "".join(
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{each}" for each in sorted(hashes))]) + "\n"
        for name, (version, hashes) in locked.items()
    )


def _resolve(uv: str, folder: Path, python: str, machine: str) -> Locked:
    """The tested versions for one Python on one kind of machine, with the hashes of their files there."""
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]  # setuptools brings packages of its own
    here = {canonicalize_name(each.metadata["Name"]): each.version for each in metadata.distributions(path=places)}
    torch = here["torch"].split("+")[0]
    asked = [each for each in metadata.requires("torch") or () if "extra ==" not in each]
    wanted = [*(str(each) for each in declared()), *BUILD_TOOLS]
    pins = [f"{name}=={version}" for name, version in here.items() if name not in LEFT_OUT]
    known = f"[[dependency-metadata]]\nname = 'torch'\nversion = '{torch}'\nrequires-dist = {json.dumps(asked)}\n"
    for name, lines in (("in", wanted), ("pins", [*pins, f"torch=={torch}"]), ("uv.toml", [known])):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    out = folder / "pylock.toml"
    out.unlink(missing_ok=True)
    command = [uv, "pip", "compile", "--quiet", str(folder / "in"), "--constraint", str(folder / "pins")]
    command += ["--config-file", str(folder / "uv.toml"), "--no-emit-package", "torch", "--output-file", str(out)]
    command += ["--format", "pylock.toml", "--python-version", python, "--python-platform", machine]
    done = subprocess.run(command, env=_with_pips_index(), capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{python}, {machine}: no lock of the tested versions:\n{done.stderr}")
    import tomllib  # of Python 3.11; checking works on 3.10 too

    packages = tomllib.loads(out.read_text(encoding="utf-8"))["packages"]
    return {each["name"]: (each["version"], _hashes(each)) for each in packages}


def _hashes(package: dict[str, Any]) -> set[str]:
    """Of a package's wheels, or of its source where it has none."""
    return {each["hashes"]["sha256"] for each in package.get("wheels") or [package["sdist"]]}


def _with_pips_index() -> dict[str, str]:
    """The index that pip is told to use is uv's too."""
    ask = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    found = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    return {**({"UV_DEFAULT_INDEX": found} if found else {}), **os.environ}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write requirements.lock, or check it against setup.py.")
    parser.add_argument("--check", action="store_true", help="only say what is wrong with it; exit 1 if anything is")
    parser.add_argument("--uv", default="uv", help="the program that resolves (default: %(default)s of PATH)")
    options = parser.parse_args()
    if not options.check:
        if shutil.which(options.uv) is None:
            parser.error(f"{options.uv}: no such program; `make lock` fetches it")
        LOCK.write_text(make(options.uv), encoding="utf-8")
    wrong = complaints(LOCK.read_text(encoding="utf-8") if LOCK.is_file() else "", declared())
    for each in wrong:
        print(f"{LOCK.name}: {each}", file=sys.stderr)
    if wrong:
        sys.exit(f"{LOCK.name} does not satisfy setup.py; write it anew: make lock")
    print(f"{LOCK.name}: {len(read(LOCK.read_text(encoding='utf-8')))} packages, as setup.py asks for")


if __name__ == "__main__":
    main()
