"""The benchmarks say what is wrong with their options before they measure anything: exit code 2, and no traceback."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

from tests.kit.commands import script_modules
from tests.kit.paths import ROOT

TOOLS = ROOT / "tools" / "benchmarks"

NO_FOLDER, NO_FILE = "nowhere is not there; make it", "is not there, or cannot be read"
WHOLE, POSITIVE = "a whole number from 1 on was expected", "a number larger than 0 was expected"

WRONG = {
    "checkpoint": {
        "--scratch nowhere": NO_FOLDER,
        "--scratch file": "file is no folder",
        "--out nowhere/x.json": NO_FOLDER,
        "--out folder": "folder is a folder; name a file",
        "--cases megalite,dpc": "found 'dpc', there are megalite, ",
        "--worlds 1,0": WHOLE,
        "--rounds 0": WHOLE,
        "--layers x": WHOLE,
    },
    "checkpoint_storage": {
        "saving --folder nowhere": NO_FOLDER,
        "saving --mb 0": WHOLE,
        "changes nowhere": NO_FILE,
        "packing nowhere": NO_FILE,
    },
    "corpus": {
        "--out file": "file is no folder",
        "--out folder --mb 0": POSITIVE,
        "--out folder --max-share 2": "a number from 0 to 1 was expected",
        "--out folder --per-kind nan": "a number from 0 to 1 was expected",
    },
    "attention_documents": {"--lengths 512,0": WHOLE, "--tokens x": WHOLE, "--out nowhere/x": NO_FOLDER},
    "corpus_score": {"nowhere file x": NO_FILE, "folder nowhere x": NO_FILE},
    "data": {
        "--only clean,neer": "found 'neer', there are clean, ",
        "--out nowhere/x.json": NO_FOLDER,
        "--work file/below": "file is no folder",
        "--mb inf": POSITIVE,
        "--vocab 0": WHOLE,
    },
    "data_memory": {"--mb 25,0": POSITIVE, "--out nowhere/x": NO_FOLDER, "--work file": "file is no folder"},
    "data_scale": {"--tb x": POSITIVE, "--nodes 0": WHOLE, "--rates nowhere": NO_FILE, "--disk-gbs 0": POSITIVE},
    "experts": {
        "--only megalight": "found 'megalight', there are megalite, ",
        "--experts 2 --top-k 3": "--top-k: found 3, of 2 experts",
        "--rounds 0": WHOLE,
        "--out nowhere/x": NO_FOLDER,
    },
    "export": {"--folder nowhere": NO_FOLDER, "--json nowhere/x": NO_FOLDER, "--rounds 0": WHOLE},
    "fp4_loss": {"--cases nvfp5": "found 'nvfp5', there are fp32, ", "--json nowhere/x": NO_FOLDER, "--steps 0": WHOLE},
    "fp8_loss": {
        "--layouts tp2,dp": "found 'dp', there are tp2, ",
        "--recipes bf17": "found 'bf17', there are bf16, ",
        "--dir file": "file is no folder",
        "--lr 0": POSITIVE,
    },
    "gpu": {
        "steps --device cpu --models 7b": "found '7b', there are 125m, ",
        "steps --device nonsense": "found 'nonsense'; ",
        "steps --device cpu --documents 0": WHOLE,
        "steps --device cpu --set offload=true": "found 'offload=true', SECTION.KEY=VALUE was expected",
        "steps --device cpu --tiny --set foo.bar=1": "--set: ",
        "steps --device cpu --tiny --set train.nothere=1": "--set: ",
        "steps --device cpu --tiny --set batch.seq_len=3": "--set batch: sizes are those of --models",
        "gemm --device cpu --tiny --set train.steps=3": "are for steps, found gemm",
        "steps --device cpu --recipes bf17": "found 'bf17', there are bf16, ",
        "steps --device cpu --peers plane": "found 'plane', there are plain, ",
        **({} if torch.cuda.is_available() else {"steps": "found 'cuda', which is not here"}),
    },
    "wire_loss": {
        "--cases int2": "found 'int2', there are exact, ",
        "--seeds 1,0": WHOLE,
        "--dir file": "file is no folder",
    },
    "qat_loss": {"--cases int4": "found 'int4', there are fp32, ", "--dir file": "file is no folder"},
    "gpu_smoke": {"speed --device nonsense": "found 'nonsense'; ", "speed --device meta": "which is not here"},
    "long_context": {
        "--kinds allgather,rings": "found 'rings', there are allgather, ",
        "--cp 1,0": WHOLE,
        "--out nowhere/x": NO_FOLDER,
        "--documents 9 --tokens 8": "--documents: found 9, which 8 tokens are too few for",
        "--cp 3": "--tokens: found 32768, which 2 x 3 does not divide",
        "--kinds ulysses --cp 16": "--kinds: ulysses wants a number of ranks that divides 8 heads",
    },
    "lr_find": {
        "--out x": "data/demo/packed is not there",
        "--out nowhere/x --data folder": NO_FOLDER,
        "--out file --data folder": "file is there and no file of runs",
        "--out x --data folder --steps 0": WHOLE,
    },
    "mup_transfer": {
        "--out x": "data/small/packed is not there",
        "--out x --data folder --widths 64,96": "found '96', there are 64, 128, 256, 512",
        "--out nowhere/x --data folder": NO_FOLDER,
        "--out x --data folder --figure folder": "folder is a folder; name a file",
        "--out x --data folder --dir file": "file is no folder",
        "--out x --data folder --jobs 0": WHOLE,
    },
    "monitoring": {"--steps 0": WHOLE, "--out nowhere/x": NO_FOLDER},
    "optimizers": {"--steps 0": WHOLE, "--out nowhere/x": NO_FOLDER, "--out file": "file is there and no file of runs"},
    "pipeline": {
        "--against nowhere": NO_FOLDER,
        "--only zb-w": "found 'zb-w', there are 1f1b, ",
        "--pp 0": WHOLE,
        "--out folder": "folder is a folder; name a file",
    },
    "plan_memory": {
        "--only one,tpp": "found 'tpp', there are one, ",
        "--steps 0": WHOLE,
        "--out nowhere/x": NO_FOLDER,
        "--out folder": "folder is a folder; name a file",
    },
    "plan_seconds": {
        "--only one,tpp": "found 'tpp', there are one, ",
        "--passes 0": WHOLE,
        "--out nowhere/x": NO_FOLDER,
        "--out folder": "folder is a folder; name a file",
    },
    "recipe_costs": {"--steps 0": WHOLE, "--out nowhere/x": NO_FOLDER},
    "rules_agreement": {"--documents 0": WHOLE},
    "spikes": {"nowhere": NO_FILE, "file --sigma 0": POSITIVE, "file --window 0": WHOLE},
    "startup": {"nowhere.yaml": NO_FILE, "file --rounds 0": WHOLE},
    "train_cpu": {
        "--only one,dp4": "found 'dp4', there are one, ",
        "--cases megatlite": "found 'megatlite', there are plain eager, ",
        "--out nowhere/x": NO_FOLDER,
        "--vocab 0": WHOLE,
        "--steps 0": WHOLE,
    },
}

WITHOUT_OPTIONS = {"cases", "data_cases"}
"""They are started by the others."""


@pytest.fixture(autouse=True)
def as_scripts(monkeypatch, tmp_path):
    """They import each other by bare names, in a folder with a file and a folder; what was imported goes again."""
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with script_modules(TOOLS):
        yield


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_told(name, monkeypatch, capsys, tmp_path):
    """Folders that are not there, names of no case, counts of none; and nothing was made."""
    for arguments, said in WRONG[name].items():
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")
        error = capsys.readouterr().err
        assert ended.value.code == 2, (arguments, error)
        assert said in error, (arguments, error)
        assert "Traceback" not in error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_every_benchmark_is_here():
    """A new one has its options looked at too."""
    with_options = {path.stem for path in TOOLS.glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8")}
    assert with_options - WITHOUT_OPTIONS == WRONG.keys()
