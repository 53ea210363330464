"""Whatever is in a string of the user's, Slurm and shells read it back as it was, or it is refused before any work."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.errors import UserError
from megalite.slurm.cluster import SHELL_LINES, ClusterConfig, dump_cluster, load_cluster
from megalite.slurm.evaluate import render_evaluation
from megalite.slurm.folder import LaunchFolder
from megalite.slurm.launch import plan_launch
from megalite.slurm.placement import place
from megalite.slurm.render import job_name, render, sbatch_options
from megalite.slurm_quoting import check_options, directive, option_of_logs, split_command
from megalite.stations.runners import slurm_queue
from megalite.stations.runners.slurm import SlurmArray
from tests.kit.paths import ROOT

HOSTILE = (
    *("two words", "it's", 'a "word"', "$(touch CANARY)", "`touch CANARY`", ";touch CANARY;", "| touch CANARY"),
    *("&& touch CANARY #", "#SBATCH --wrap=x", "%j %% %A", "back\\slash\\", "ünï-漢", "$HOME ${PATH}", "~", "*", "!x"),
    *("line\nbreak", "\n#SBATCH --array=0-9\ntouch CANARY\n", "tab\tin it", "carriage\rreturn", "\x1b[31m", "-n 5"),
    *("--", "' ; touch CANARY ; '", '" ; touch CANARY ; "', "\udce9"),
)
"""Spaces, quotes, shells' and Slurm's own characters, line breaks, other controls, and bytes that are not UTF-8."""

REFUSED = "\n\r\t\x1b\udce9\\"
"""What no quotes carry into a path of logs."""

UNSEEN = {
    "name": "for people",
    "network_interface": "a variable of the ranks, which no shell sees",
    "container.image": "an argument of a program, which no shell sees",
    "container.mounts": "the same",
    "container.runtime": "one of two words",
}
"""Texts of the profile that are in no script."""

PACKAGES = ("megalite/slurm", "megalite/stations/runners")
"""Where Slurm's commands are put together."""


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(ROOT / "configs/debug.yaml", [])


@pytest.fixture
def stub(tmp_path, monkeypatch) -> None:
    """In the place of Python, under a name of its own kind: says what it was called with, and with which variables."""
    for path in (tmp_path / "stub", tmp_path / "it's a $(touch CANARY) stub"):
        path.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\nenv -0\n')
        path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def text_fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of a profile that holds text, and what it may hold."""
    for name, field in section.model_fields.items():
        inner = [each for each in (field.annotation, *get_args(field.annotation)) if isinstance(each, type)]
        nested = [each for each in inner if issubclass(each, BaseModel)]
        for each in nested:
            yield from text_fields(each, f"{prefix}{name}.")
        if not nested and "str" in str(field.annotation):
            yield f"{prefix}{name}", field.annotation


def profile_with(key: str, annotation: Any, text: str) -> list[dict[str, Any]]:
    """Profiles with a text where it may stand."""
    if "dict" in str(annotation):
        values: list[Any] = [{"A": text}, {text: "value"}]
    elif "tuple" in str(annotation):
        values = [[text], [f"--comment={text}"]] if key.endswith("sbatch") else [[text]]
    else:
        values = [text]
    section, _, name = key.rpartition(".")
    needed = {"container": {"image": "i"}, "evaluation": {"command": "true"}}.get(section, {})
    return [{section: {**needed, name: value}} if section else {name: value} for value in values]


def words_of(script: str) -> list[str]:
    """The words that sbatch takes from a script, by its rules: a backslash before anything, two kinds of quotes, and
    comments outside of them."""
    found = []
    for line in script.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("#SBATCH"):
            continue
        rest, word, quote, is_open, is_escaped = line.removeprefix("#SBATCH"), "", "", False, False
        for char in rest:
            if is_escaped or not (char in "\\'\"#" or char.isspace()):
                word, is_open, is_escaped = word + char, True, False
            elif char == "\\":
                is_escaped = True
            elif char == quote or (not quote and char in "'\""):
                quote, is_open = "" if quote else char, True
            elif quote:
                word += char
            elif char == "#" and not word:
                break
            elif char.isspace():
                found += [word] if is_open else []
                word, is_open = "", False
            else:
                word += char
        found += [word] if is_open else []
    return found


def run_script(script: str, folder: Path, *arguments: str) -> list[str]:
    """Run a script as Slurm does; what the stub says, and nothing else happened."""
    path = folder / "script"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run(["bash", path, *arguments], cwd=folder, capture_output=True, check=True, timeout=60)
    assert not (folder / "CANARY").exists(), script
    assert not done.stderr, done.stderr
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")]


@pytest.mark.parametrize("key", [key for key, _ in text_fields(ClusterConfig)])
def test_every_text_of_a_profile(key, config, stub, tmp_path):
    """In the job's script and in an evaluation's: sbatch reads each option as it was meant, no shell runs any of it,
    and what cannot be carried through is refused when the profile is read. The keys are those of the code."""
    if key.rpartition(".")[2] in SHELL_LINES:
        return  # shell, as the user writes it
    annotation, carried = dict(text_fields(ClusterConfig))[key], 0
    for text in HOSTILE:
        for profile in profile_with(key, annotation, text):
            path = tmp_path / "profile.yaml"
            try:
                cluster = ClusterConfig(**profile)
            except ValueError:
                continue
            path.write_text(dump_cluster(cluster), encoding="utf-8")
            assert load_cluster(path) == cluster
            cluster = cluster.model_copy(update={"gpus_per_node": 0})
            run_dir = tmp_path / "run"
            script = render(run_dir, cluster, place(config, cluster))
            assert words_of(script) == sbatch_options(LaunchFolder(run_dir), cluster, place(config, cluster))
            said = run_script(script, tmp_path)
            assert said[:3] == ["-m", "megalite.slurm.supervise", str(run_dir)]
            assert {f"{name}={value}" for name, value in cluster.environment.items()} <= set(said)
            carried += key in UNSEEN or any(text in each for each in (*words_of(script), *said))
            if cluster.evaluation is not None:
                words = words_of(render_evaluation(run_dir, cluster, cluster.evaluation))
                carried += any(text in word for word in words)
    assert carried or key in ("time_limit", "evaluation.time_limit", "container.runtime"), "all of them refused?"


@pytest.mark.parametrize("text", HOSTILE)
def test_the_folder_of_a_run(text, config, stub, tmp_path):
    """Its path is read back by the supervisor, by sbatch as a pattern of Slurm's, and by the shell of an evaluation; a
    line break or a backslash in it is refused, by --dry-run too."""
    run_dir = tmp_path / f"a{text}z"
    changed = config.model_copy(update={"run": config.run.model_copy(update={"dir": run_dir})})
    cluster = ClusterConfig(gpus_per_node=0, evaluation={"command": "./stub {run} {checkpoint} {step}"})
    if any(char in text for char in REFUSED):
        with pytest.raises(UserError, match=r"run.dir: found "):
            plan_launch(changed, cluster)
        return
    script = plan_launch(changed, cluster).script
    assert run_script(script, tmp_path)[:3] == ["-m", "megalite.slurm.supervise", str(run_dir)]
    (logs,) = (word for word in words_of(script) if word.startswith("--output="))
    assert logs.removeprefix("--output=").replace("%%", "\0").replace("%j", "7").replace("\0", "%") == (
        f"{run_dir}/slurm/jobs/7.log"
    )
    script = render_evaluation(run_dir, cluster, cluster.evaluation)
    said = run_script(script, tmp_path, str(tmp_path), "5")
    assert said[:3] == [str(run_dir), str(tmp_path), "5"]


def test_names_of_jobs(tmp_path):
    """Nothing in them is special to Slurm, and no two folders share one."""
    folders = [*(tmp_path / text.replace("/", "-") for text in HOSTILE), tmp_path / "a,b", tmp_path / ("x" * 200)]
    names = [job_name(folder) for folder in folders]
    assert len(set(names)) == len(folders)
    for name in names:
        assert name.isascii()
        assert len(name) < 64
        assert not set(name) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert job_name(Path("/runs/llama-8b")).startswith("megalite-llama-8b-")


@pytest.mark.parametrize("text", HOSTILE)
def test_the_data_tools_workers(text, stub, tmp_path, monkeypatch):
    """The output's folder and the command of `--slurm-command` reach the shell of a worker as they are, or are refused
    before a folder is made."""
    submitted: list[list[str]] = []

    def ask(command: list[str]) -> str:
        submitted.append(list(command))
        return "MaxArraySize = 100\n" if command[0] == "scontrol" else "7\n"

    monkeypatch.setattr(slurm_queue, "ask", ask)
    monkeypatch.setattr(slurm_queue.shutil, "which", lambda name: name)
    home = tmp_path / f"a{text}z" / "slurm"
    if any(char in text for char in REFUSED):
        with pytest.raises(UserError, match=r"out: found "):
            SlurmArray(2, home, [], ["./stub", text])
        assert not submitted
        return
    array = SlurmArray(2, home, [], ["./stub", text])
    array._queue.submit(2, array._worker_script(), options=[], logs=home / "logs")
    (sbatch,) = (command for command in submitted if command[0] == "sbatch")
    assert sbatch[0:2] == ["sbatch", "--parsable"]
    assert all(word.startswith("--") for word in sbatch[1:])
    (script,) = (word.removeprefix("--wrap=") for word in sbatch if word.startswith("--wrap="))
    assert run_script(f"#!/bin/sh\n{script}\n", tmp_path)[:5] == [text, "data", "work", str(home), "--name"]
    assert option_of_logs(home / "logs", "%A_%a.log") in sbatch


def test_commands_that_users_give():
    """Of a shell's own rules for quotes, which may be broken."""
    assert split_command("apptainer exec 'an image.sif' megalite", "--slurm-command")[2] == "an image.sif"
    with pytest.raises(UserError, match=r"--slurm-command: .* is no command line \(No closing quotation\)"):
        split_command("a 'b", "--slurm-command")


def test_a_long_word_and_an_option_cut_short():
    """sbatch would cut the one, and take the other for what it begins."""
    with pytest.raises(UserError, match="9,010 bytes, and sbatch reads 4,000"):
        directive(f"--comment={'ü' * 4500}")
    for given in ("--nodes=3", "-N3", "--node=3", "--outp=x", "-ox"):
        with pytest.raises(UserError, match="is set by megalite"):
            check_options([given], {"--nodes": "", "-N": "", "--output": "", "-o": ""})
    check_options(["--nodelist=a", "--exclusive", "-xnode[01-04]"], {"--nodes": "", "-N": "", "--output": ""})


def test_options_are_spelt_nowhere_else():
    """An option that is put together by hand, a script's line, or a shell: a new one would not be quoted."""
    complaints = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                complaints += [f"{path.relative_to(ROOT)}:{node.lineno}: {why}" for why in _by_hand(node)]
    assert not complaints, "\n".join(complaints)


def _by_hand(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
        start = str(node.values[0].value)
        is_option = start.startswith("-") and not re.match(r"--[a-z-]+: ", start)  # a message about one
        if is_option or "#SBATCH" in start or "export " in start:
            yield f"{ast.unparse(node)}: use slurm_quoting"
    if isinstance(node, ast.BinOp) and ast.unparse(node.left).startswith(("'-", "'#SBATCH", "'export ")):
        yield f"{ast.unparse(node)}: use slurm_quoting"
    if isinstance(node, (ast.Import, ast.ImportFrom)) and "shlex" in ast.unparse(node):
        yield "shlex: use slurm_quoting"
    if isinstance(node, ast.keyword) and node.arg == "shell":
        yield "shell=...: give a list of words"
    if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.system", "os.popen"):
        yield f"{ast.unparse(node)}: give a list of words to subprocess"
