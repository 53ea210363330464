"""Manifests: what is checked of a station's folder, and what is refused."""

from __future__ import annotations

import json

import pytest

from megalite.errors import DataError
from megalite.stations.manifest import check_input, find_manifest
from tests.kit.data import run_demo_station as run


def test_check_input_compares_contents(tmp_path):
    """A changed byte is found by its hash, a changed size without reading."""
    out = tmp_path / "out"
    run(out)
    assert check_input(out, "demo").counts == {"characters": 5}
    (out / "result.txt").write_text("jello")
    check_input(out, "demo", contents=False)
    with pytest.raises(DataError, match=r"result\.txt: its contents have changed"):
        check_input(out, "demo")
    (out / "result.txt").write_text("longer")
    with pytest.raises(DataError, match=r"result\.txt: 6 bytes found, 5 expected"):
        check_input(out, "demo", contents=False)


def test_check_input_wants_the_right_station(tmp_path):
    """No manifest, or another station's."""
    run(tmp_path / "out")
    with pytest.raises(DataError, match="made by station 'demo'; a folder of 'pack' is needed here"):
        check_input(tmp_path / "out", "pack")
    with pytest.raises(DataError, match=r"there is no manifest\.json; run `megalite data pack` first"):
        check_input(tmp_path / "nothing", "pack")


@pytest.mark.parametrize("change", [{"format": 99}, {"inputs": [{"where": "x"}]}, {"extra": 1}])
def test_manifests_of_others_are_refused(tmp_path, change):
    """Another format version, or fields that we do not know."""
    run(tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match="run its station again"):
        find_manifest(tmp_path / "out")
