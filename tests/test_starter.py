"""`megalite init` lays out a folder that works, takes nothing away, and can be called again."""

from __future__ import annotations

import os
import shutil

import pytest

from megalite import starter
from megalite.cli.main import main
from megalite.errors import UnavailableError, UserError
from tests.kit.paths import ROOT


def init(capsys, folder) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    with pytest.raises(SystemExit) as ended:
        main(["init", str(folder)])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def contents(folder) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_init(tmp_path, capsys, monkeypatch):
    """Configs, recipes, profiles, scripts and docs as the repository has them; a config is valid where it lies."""
    code, said, _ = init(capsys, tmp_path / "my demo")
    assert code == 0
    assert "cd 'my demo'" in said.replace(f"{tmp_path}/", "")
    found = contents(tmp_path / "my demo")
    for tree in ("configs", "launch", "docs"):
        for path in (path for path in (ROOT / tree).rglob("*") if path.is_file() and "__pycache__" not in path.parts):
            assert found.pop(path.relative_to(ROOT).as_posix()) == path.read_bytes()
    assert found.keys() == {"docs/CHANGELOG.md", "docs/LICENSE"}
    monkeypatch.chdir(tmp_path / "my demo")
    for command in ("data prepare", "train"):
        config = next(line.split()[-1] for line in said.splitlines() if f"megalite {command} " in line)
        assert os.path.isfile(config)
    with pytest.raises(SystemExit) as ended:
        main(["config", "check", "configs/demo.yaml", "--json"])
    assert not ended.value.code


def test_again_and_into_a_folder_with_other_files(tmp_path, capsys):
    """What is there byte for byte stays, what is missing comes back, and a folder's own files are not touched."""
    (tmp_path / "README.md").write_text("mine")
    init(capsys, tmp_path)
    whole = contents(tmp_path)
    shutil.rmtree(tmp_path / "configs/data")
    times = (tmp_path / "configs/demo.yaml").stat().st_mtime_ns
    assert init(capsys, tmp_path)[0] == 0
    assert contents(tmp_path) == whole
    assert (tmp_path / "configs/demo.yaml").stat().st_mtime_ns == times
    assert whole["README.md"] == b"mine"


def changed(folder):
    (folder / "configs").mkdir()
    (folder / "configs/demo.yaml").write_text("mine")


def dangling(folder):
    (folder / "configs").mkdir()
    (folder / "configs/demo.yaml").symlink_to(folder / "nowhere")


def in_the_way(folder):
    (folder / "configs").write_text("a file")


@pytest.mark.parametrize(
    ("prepare", "named"), [(changed, "configs/demo.yaml"), (dangling, "demo.yaml"), (in_the_way, "configs")]
)
def test_overwrites_nothing(tmp_path, capsys, prepare, named):
    """A file of one's own, a link to nowhere, a file where a folder would be: named, and nothing is written at all."""
    prepare(tmp_path)
    before = sorted(os.walk(tmp_path))
    code, _, error = init(capsys, tmp_path)
    assert code == 2
    assert f"starter files go: {'configs/' if named == 'demo.yaml' else ''}{named}; nothing was written" in error
    assert sorted(os.walk(tmp_path)) == before


def test_a_file_is_no_folder(tmp_path, capsys):
    """Nor is what lies in one."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        code, _, error = init(capsys, folder)
        assert code == 2
        assert "is no folder; name another one" in error


def test_nothing_half_written(tmp_path, monkeypatch):
    """A disk that fills up in the middle: a message, no partial file, and the next call goes on."""
    replace, done = os.replace, []

    def until_full(source, target):
        if len(done) == 10:
            raise OSError(28, "No space left on device")
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", until_full)
    with pytest.raises(UserError, match=r"cannot be written .*No space left on device.*; name a folder that can"):
        starter.lay_out(tmp_path)
    files = starter.starter_files()
    for name, there in contents(tmp_path).items():
        assert there == files[name].read_bytes()
    monkeypatch.setattr(os, "replace", replace)
    starter.lay_out(tmp_path)
    assert contents(tmp_path).keys() == files.keys()


def test_an_installation_without_them(tmp_path, monkeypatch):
    """Is told, with how to get them."""
    monkeypatch.setattr(starter, "PACKAGED", tmp_path / "starter_files")
    monkeypatch.setattr(starter, "CLONE", tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/of-others.yaml").write_text("")
    with pytest.raises(UnavailableError, match="no starter files; install it from its wheel"):
        starter.lay_out(tmp_path / "demo")
