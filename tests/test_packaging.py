"""What goes into the source distribution and the wheel: all that README's commands need, without a clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def tracked() -> list[str]:
    """Files of the repository, new ones that are not ignored among them."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"no git repository here to build from: {done.stderr.strip()}")
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def build(kind: str, source: Path, out: Path) -> Path:
    """An sdist or a wheel, as `pip` and `build` make them."""
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[set[str], Path]:
    """Names in the sdist, and the unpacked wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    for name in tracked():
        (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "clone" / name)
    sdist = build("build_sdist", folder / "clone", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    wheel = build("build_wheel", source, folder)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}, folder / "site"


def test_the_sdist_is_the_repository(built):
    """Configs, docs, tests, CHANGELOG and licence are in it, as everything that is tracked."""
    names, _ = built
    assert set(tracked()) - names <= {".gitignore"}


def test_the_wheel_has_its_licence_and_no_tests(built):
    """The text beside the metadata that declares it; nothing but the package and its metadata lies at the top."""
    _, site = built
    (info,) = site.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    assert "Apache-2.0" in (metadata["License-Expression"] or metadata["License"])
    assert metadata["License-File"] == "LICENSE"
    assert (info / "licenses/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert {path.name for path in site.iterdir()} == {"megalite", info.name}
    assert not list(site.rglob("*.pyc"))


def test_init_from_the_wheel(built, tmp_path):
    """Lays out what it lays out in a clone, where no clone can be seen, and a config of it is valid."""
    _, site = built
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = "import megalite; print(megalite.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(site)
    for arguments in (["init", "demo"], ["config", "check", "demo/configs/demo.yaml", "--json"]):
        command = [sys.executable, "-m", "megalite", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
    for name in tracked():
        if name.startswith(("configs/", "launch/", "docs/")):
            assert (tmp_path / "demo" / name).read_bytes() == (ROOT / name).read_bytes()
    assert (tmp_path / "demo/docs/CHANGELOG.md").is_file()


def test_the_time_of_the_demo_is_said_alike():
    """By `make help`, and in the docs as in the Makefile, where it is measured anew."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    said = re.search(r"^DEMO_TIME := (.+)$", makefile, re.MULTILINE)[1]
    assert said in (ROOT / "docs/install.md").read_text(encoding="utf-8")
    help_text = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert f"from raw text to a Hugging Face model: {said}" in help_text
    assert "transformers-4" in help_text
