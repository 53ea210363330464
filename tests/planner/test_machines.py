"""Machines' files: those that come along, and what is refused of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megalite.config.sections.precision import PrecisionConfig
from megalite.errors import UserError
from megalite.planner.machines import known_machines, load_machine
from megalite.studies.calibrate import SPAN_OF_PASSES


def test_files_that_come_along():
    """Each can be loaded by its name, with a source for each number."""
    assert {
        "a100-40g",
        "a100-80g",
        "h100-sxm",
        "h100-96g",
        "h100-pcie",
        "h200",
        "b200",
        "cpu",
    } <= known_machines().keys()
    for name in known_machines():
        machine = load_machine(name)
        assert machine.link > machine.network
        assert machine.rate("bf16") == machine.flops["bf16"] * machine.constants.products


def test_rates_of_products_that_round():
    """TF32's on GPUs, whichever format is allowed; fp32's without leave, and on CPUs, of which nothing is measured."""
    h100, cpu = load_machine("h100-sxm"), load_machine("cpu")
    for products, rate in (("fp32", "fp32"), ("tf32", "tf32"), ("bf16", "tf32")):
        precision = PrecisionConfig(dtype="fp32", products=products)
        assert h100.product_rate(precision) == h100.rate(rate)
        assert cpu.product_rate(precision) == cpu.rate("fp32")
    assert h100.rate("tf32") == pytest.approx(h100.rate("bf16") / 2, rel=1e-3)
    assert h100.product_rate(PrecisionConfig(dtype="bf16")) == h100.rate("bf16")


def edited(path: Path, **changes: object) -> Path:
    content = {**yaml.safe_load(known_machines()["h100-sxm"].read_text()), **changes}
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value != "gone"}))
    return path


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"memory_gib": "gone"}, "memory_gib"),
        ({"memory_gib": -80}, "memory_gib"),
        ({"network": float("nan")}, "network"),
        ({"memory_gib": "80"}, 'memory_gib: found "80", expected a number above 0'),
        ({"flops": {"bf16": "9.0e+14"}}, 'flops.bf16: found "9.0e.14", expected a number above 0'),
        (
            {"constants": {"products": "0.8", "passes": 1, "links": 1, "overhead": 1e-5}},
            'constants.products: found "0.8", expected a number',
        ),
        ({"hides_messages": "yes"}, 'hides_messages: found "yes", expected true or false'),
        ({"network": 400e6}, "network: 4e.08 bytes a second cannot be where link is 4.5e.11; at least 9e.08, or"),
        ({"link": 5e9}, "network: 5e.10 bytes a second cannot be where link is 5e.09; at most 2.5e.10, or another"),
        ({"flops": {"bf16": 989e12, "fp8": 198e12}}, "flops.fp8: 1.98e.14 a second cannot be where bf16 is 9.89e.14"),
        ({"flops": {"bf16": 989e12, "fp32": 67e12, "tf32": 49e12}}, "flops.tf32: 4.9e.13 a second cannot be where fp"),
        (
            {"constants": {"products": 0.8, "passes": 1, "links": 7, "overhead": 1e-5}},
            "constants.links: 7 of the bandwidth cannot be; at most 4",
        ),
        (
            {"constants": {"products": 0.8, "passes": 90, "links": 1, "overhead": 1e-5}},
            "constants.passes: 90 of the bandwidth cannot be; at most 10",
        ),
        ({"colour": "green"}, "colour"),
        ({"flops": {"int8": 1e15}}, "flops"),
        ({"flops": {}}, "flops"),
        (
            {"constants": {"products": 1.2, "passes": 1, "links": 1, "overhead": 1e-5}},
            "products: 1.2 of the peak cannot be; at most 1",
        ),
        ({"sources": {}}, "memory_bandwidth has no source; add one"),
        ({"link": 1e-300}, "1e-300 bytes a second cannot be; at least 1e.06"),
        ({"flops": {"bf16": 10.0}}, "10 a second cannot be; at least 1e.06"),
        ({"flops": {"bf16": 1e300}}, "flops.bf16: 1e.300 a second cannot be; at most 1e.19"),
        ({"memory_gib": 8.6e10}, "memory_gib: 8.6e.10 GiB a rank cannot be; at most 100000"),
        ({"ranks_per_node": 10**18}, "ranks_per_node: 1e.18 ranks a node cannot be; at most 1024"),
        (
            {"constants": {"products": 0.6, "passes": 1, "links": 1, "overhead": 1e9}},
            "constants.overhead: 1e.09 s a block cannot be; at most 1",
        ),
        (
            {"others": {"x": {"products": 7, "passes": 1, "links": 1, "overhead": 1e-5}}},
            "others.x.products: 7 of the peak cannot be; at most 1",
        ),
    ],
)
def test_refused(tmp_path: Path, changes: dict, sentence: str):
    """A number that is missing, impossible, unknown or without a source is named, with the file."""
    path = edited(tmp_path / "mine.yaml", **changes)
    with pytest.raises(UserError, match=sentence) as error:
        load_machine(str(path))
    assert "mine.yaml" in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"link": 32e9, "network": 0.125e9},  # PCIe 4.0, and gigabit Ethernet
        {"network": 12.5e9 / 8},  # an adapter of 100 Gb/s for eight GPUs
        {"link": 16e9, "network": 50e9},  # PCIe that GPUs share, and an adapter for each
        {"flops": {"fp8": 989e12, "bf16": 989e12}},
    ],
)
def test_unusual_machines_are_taken(tmp_path: Path, changes: dict):
    assert load_machine(str(edited(tmp_path / "mine.yaml", **changes))).model_dump().items() >= changes.items()


def test_calibrated_constants_are_taken(tmp_path: Path):
    """Whatever `calibrate` may find."""
    for passes in SPAN_OF_PASSES["cpu"]:
        constants = {"products": 1.0, "passes": passes, "links": 1.0, "overhead": 1e-9}
        assert load_machine(str(edited(tmp_path / "mine.yaml", constants=constants))).constants.passes == passes


def test_no_such_machine(tmp_path: Path):
    with pytest.raises(UserError, match=r"no file h101, and no machine of this name; use a100-40g, .* or h200"):
        load_machine("h101")
    with pytest.raises(UserError, match="fp32 or fp8"):
        load_machine(str(edited(tmp_path / "x.yaml", flops={"fp8": 1e15, "fp32": 1e13}))).rate("bf16")


def test_an_empty_source_is_none(tmp_path: Path):
    given = yaml.safe_load(known_machines()["h100-sxm"].read_text("utf-8"))
    path = edited(tmp_path / "x.yaml", sources={**given["sources"], "link": " "})
    with pytest.raises(UserError, match="says nothing; name where the number is from"):
        load_machine(str(path))
