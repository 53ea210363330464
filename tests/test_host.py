"""What the machine says of its processor."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megalite import host

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC
flags\t\t: fpu avx512f avx512_bf16
bugs\t\t: amx_bf16

processor\t: 1
flags\t\t: fpu
"""
ARM = "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "flags"),
    [(X86, {"AuthenticAMD", "fpu", "avx512f", "avx512_bf16"}), (ARM, {"fp", "asimd", "bf16"}), ("", set())],
    ids=["x86", "ARM", "empty"],
)
def test_flags_of_a_processor(cpuinfo, flags, tmp_path, monkeypatch):
    """Those of the first one, by its own line alone."""
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(host, "PROC", tmp_path)
    assert host.cpu_flags() == flags


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "name"),
    [
        ("AuthenticAMD", 25, "avx2", "zen3"),
        ("AuthenticAMD", 25, "avx2 avx512f avx512_bf16", "zen4"),
        ("AuthenticAMD", 26, "avx2 avx512f avx512_bf16", "zen5"),
        ("AuthenticAMD", 26, "avx512f avx512_bf16 avx512_fp16", "other-AuthenticAMD-26-avx512f"),
        ("AuthenticAMD", 23, "avx2", "other-AuthenticAMD-23-avx2"),
        ("GenuineIntel", 6, "avx2 avx512f avx512_bf16 amx_bf16", "xeon-amx"),
        ("GenuineIntel", 6, "avx2 avx512f avx512_bf16", "other-GenuineIntel-6-avx512f"),
        ("GenuineIntel", 19, "avx512f amx_bf16", "other-GenuineIntel-19-amx_bf16"),
    ],
)
def test_classes_of_x86(vendor, family, flags, name, tmp_path, monkeypatch):
    """By maker, family and the units that the machine shows: what it hides it has not."""
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: {flags}\n\n")
    monkeypatch.setattr(host, "PROC", tmp_path)
    assert host.cpu_class() == name


def test_class_of_arm(tmp_path, monkeypatch):
    """By the core."""
    (tmp_path / "cpuinfo").write_text(f"{ARM}CPU implementer\t: 0x41\nCPU part\t: 0xd40\n")
    monkeypatch.setattr(host, "PROC", tmp_path)
    assert host.cpu_class() == "other-0x41-0xd40-asimd"


def test_a_machine_that_does_not_say(tmp_path, monkeypatch):
    """No file, no flags."""
    monkeypatch.setattr(host, "PROC", tmp_path / "none")
    assert host.cpu_flags() == set()
    assert host.cpu_class() == "other"


def test_a_program_has_a_peak_of_its_own():
    """Whatever the one held that started it."""
    ballast = b"1" * 2**28
    asked = [sys.executable, "-c", "from megalite.host import peak_process_bytes; print(peak_process_bytes())"]
    found = int(subprocess.check_output(asked, text=True))
    assert 2**20 < found < len(ballast) < host.peak_process_bytes()
