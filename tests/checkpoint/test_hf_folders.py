"""Where conversions write: OUT is there whole or not at all, and nothing beside it is touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.hf import folders
from megalite.checkpoint.hf.folders import CONVERTING, building
from megalite.cli.main import main
from megalite.errors import ConversionError
from tests.checkpoint.foreign import save_foreign
from tests.checkpoint.hf_kit import tiny_model, train_tokenizers, write_checkpoint


def convert(out: Path, text: str, *, overwrite: bool = False) -> None:
    """The least that passes for a model's folder."""
    with building(out, inputs=[], overwrite=overwrite) as folder:
        (folder / "config.json").write_text(text)


def _write(folder: Path, text: str, *, dies: bool) -> None:
    (folder / "config.json").write_text(text)
    if dies:
        raise KeyboardInterrupt


def tree(folder: Path) -> dict[str, str]:
    """What stands in the files below a folder."""
    found = (each for each in folder.rglob("*") if each.is_file())
    return {each.relative_to(folder).as_posix(): each.read_text() for each in found}


def left(folder: Path) -> list[Path]:
    """Folders of conversions, living or dead."""
    return list(folder.glob(f"{CONVERTING}*"))


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch):
    """A conversion that ends as by SIGKILL: nothing is cleared away, and the kernel lets go of its lock."""

    def end(out: Path, text: str, *, at: str, overwrite: bool = False) -> None:
        rename = Path.rename

        def die(path: Path, target: Path) -> Path:
            if target == out and at == "renaming":
                raise KeyboardInterrupt
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(folders, "_clear", lambda *_: None)
            patch.setattr(Path, "rename", die)
            with pytest.raises(KeyboardInterrupt), building(out, inputs=[], overwrite=overwrite) as folder:
                _write(folder, text, dies=at == "building")
        assert left(out.parent)

    return end


@pytest.mark.parametrize("overwrite", [False, True])
def test_neighbours_are_kept(tmp_path: Path, overwrite: bool):
    """OUT.old and OUT.partial are somebody's; one that fails leaves them, too."""
    mine = {f"hf.{name}/config.json": name for name in ("old", "partial")}
    for name, text in mine.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    if overwrite:
        convert(tmp_path / "hf", "first")
    convert(tmp_path / "hf", "second", overwrite=overwrite)
    assert tree(tmp_path) == {**mine, "hf/config.json": "second"}
    with pytest.raises(ZeroDivisionError), building(tmp_path / "hf", inputs=[], overwrite=True) as folder:
        (folder / "config.json").write_text(str(1 / 0))
    assert tree(tmp_path) == {**mine, "hf/config.json": "second"}
    assert not left(tmp_path)


def test_two_at_once(tmp_path: Path):
    """Each builds for itself; the later one finds the place taken, or replaces what it may replace."""
    slow = building(tmp_path / "hf", inputs=[], overwrite=False)
    (slow.__enter__() / "config.json").write_text("slow")
    convert(tmp_path / "hf", "quick")
    with pytest.raises(ConversionError, match="already there"):
        slow.__exit__(None, None, None)
    assert tree(tmp_path) == {"hf/config.json": "quick"}
    with building(tmp_path / "hf", inputs=[], overwrite=True) as folder:
        (folder / "config.json").write_text("slow")
        convert(tmp_path / "hf", "quicker", overwrite=True)
        assert tree(folder) == {"config.json": "slow"}
    assert tree(tmp_path) == {"hf/config.json": "slow"}
    assert not left(tmp_path)


def test_what_a_killed_one_left(tmp_path: Path, killed):
    """It goes with the next conversion to the same place, not with one to another; other names are nobody's."""
    killed(tmp_path / "hf", "half", at="building")
    (tmp_path / f"{CONVERTING}hf-mine").mkdir()
    convert(tmp_path / "h", "another")
    assert len(left(tmp_path)) == 2
    convert(tmp_path / "hf", "whole")
    assert [each.name for each in left(tmp_path)] == [f"{CONVERTING}hf-mine"]
    assert tree(tmp_path) == {"h/config.json": "another", "hf/config.json": "whole"}


def test_a_model_that_was_about_to_be_replaced(tmp_path: Path, killed):
    """Killed between two renames, the old one is nowhere under its name: the next conversion puts it back, and asks."""
    convert(tmp_path / "hf", "first")
    killed(tmp_path / "hf", "second", at="renaming", overwrite=True)
    assert not (tmp_path / "hf").exists()
    with pytest.raises(ConversionError, match="already there"):
        convert(tmp_path / "hf", "third")
    assert tree(tmp_path) == {"hf/config.json": "first"}
    convert(tmp_path / "hf", "third", overwrite=True)
    assert tree(tmp_path) == {"hf/config.json": "third"}


def test_a_failed_rename_puts_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    convert(tmp_path / "hf", "first")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "hf" and target == tmp_path / "hf":
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ConversionError, match="not written"):
        convert(tmp_path / "hf", "second", overwrite=True)
    assert tree(tmp_path) == {"hf/config.json": "first"}
    assert not left(tmp_path)


def test_a_disk_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed):
    """Conversions go on as ever; what dead ones left cannot be told from what is at work, and stays."""

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    killed(tmp_path / "hf", "half", at="building")
    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    convert(tmp_path / "hf", "whole")
    assert (tmp_path / "hf/config.json").read_text() == "whole"
    assert len(left(tmp_path)) == 1


def test_the_folder_may_be_read_by_whom_the_umask_lets(tmp_path: Path):
    umask = os.umask(0o022)
    try:
        convert(tmp_path / "hf", "whole")
    finally:
        os.umask(umask)
    assert (tmp_path / "hf").stat().st_mode & 0o777 == 0o755


def refused(capsys: pytest.CaptureFixture, *command: Any) -> str:
    """What a conversion says that ends with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, command), "--overwrite"])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_no_conversion_replaces_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Nor what has it in it, also by another name of it; all is there as before."""
    base, run, imported = tmp_path / "base", tmp_path / "run", tmp_path / "imported"
    save_foreign(base)
    adapted = tiny_model(num_layers=2, num_kv_heads=2, lora={"rank": 2})
    write_checkpoint(run, adapted)
    dense = write_checkpoint(tmp_path / "fresh", tiny_model(), step=0)
    dense.parent.rename(imported)
    words = train_tokenizers(imported, ["byte-bpe"]) / "byte-bpe"
    (words / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(base)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for command, where in (
        (("from-hf", base, base), "is"),
        (("from-hf", base, tmp_path / "link"), "is"),
        (("from-hf", tmp_path / "link", run / ".." / "base"), "is"),
        (("to-hf", imported, imported), "has in it"),
        (("to-hf", imported / dense.name, imported / dense.name), "is"),
        (("to-hf", imported, words, "--tokenizer", words), "is"),
        (("to-peft", run, base, "--base", base), "is"),
        (("upcycle", imported, imported), "has in it"),
    ):
        assert f"{command[2]}: {where} what is read here" in refused(capsys, *command), command
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_place_in_what_is_read(tmp_path: Path):
    """As where somebody stands in the folder that is converted."""
    with building(tmp_path / "hf", inputs=[tmp_path], overwrite=False) as folder:
        (folder / "config.json").touch()
    assert (tmp_path / "hf/config.json").is_file()


@pytest.mark.parametrize("target", ["nowhere", "out"], ids=["dangling", "loop"])
@pytest.mark.parametrize(
    "verb", ["convert to-hf", "convert from-hf", "convert upcycle", "checkpoint merge", "data pack"]
)
def test_links_that_lead_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture, verb: str, target: str):
    """A folder cannot be renamed to one, which is said before any work; one that leads to itself has no place."""
    (tmp_path / "out").symlink_to(target)
    out = ["--out", str(tmp_path / "out")] if verb.startswith("data") else [str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main([*verb.split(), str(tmp_path / "absent"), *out])
    assert ended.value.code == 2
    assert f"out: is a link to {target}, where nothing is" in capsys.readouterr().err
    with pytest.raises(ConversionError), building(tmp_path / "out", inputs=[tmp_path / "out"], overwrite=False):
        pass


def test_where_a_disk_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As a container's volume: no folder can get that name, which is said before the work."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(folders.os.path, "ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(ConversionError, match=r"out: a disk is mounted there, .* give .*out/NAME"):
        convert(tmp_path / "out", "whole")
    convert(tmp_path / "out" / "NAME", "whole")
