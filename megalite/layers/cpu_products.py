"""Which library multiplies fp32 numbers on a CPU, by its class: measured once and written down here, so that every rank
of such a machine and every restart has the same.

    class      oneDNN over torch's BLAS      taken
    zen3       1.05, within the noise        BLAS: without AVX-512 torch does not go to oneDNN
    zen4       1.04                          oneDNN, which is exact there
    zen5       1.87                          oneDNN, which is exact there
    xeon-amx   1.65                          BLAS: oneDNN would round to bf16 (`precision.products`)
    other                                    as a trial shows at the start (`layers.gemm`)

BLAS is what torch was built with, on x86 MKL.
"""

from __future__ import annotations

from dataclasses import dataclass

ONEDNN, BLAS = "oneDNN", "torch's BLAS"


@dataclass(frozen=True)
class MeasuredProducts:
    """What was measured on a class of CPUs."""

    taken: str
    """`ONEDNN` or `BLAS`."""
    ratio: float
    """Speed of compiled plain PyTorch, one process, where products are left to oneDNN ("medium"), over what it is
    where they are not."""
    page: str
    """In docs/."""
    heading: str
    """Of the section there, its beginning."""


PAGE, EARLIER = "benchmarks/train_cpu.md", "benchmarks/train_cpu_earlier.md"

MEASURED = {
    "zen3": MeasuredProducts(BLAS, 1.05, EARLIER, "2026-11-23, Zen 3"),
    "zen4": MeasuredProducts(ONEDNN, 1.04, PAGE, "2026-11-26, Zen 4"),
    "zen5": MeasuredProducts(ONEDNN, 1.87, PAGE, "2026-11-25, Zen 5"),
    "xeon-amx": MeasuredProducts(BLAS, 1.65, PAGE, "2026-11-29, a Xeon with AMX"),
}
"""By class of CPU (`host.CPU_CLASSES`)."""

NEWEST_TORCH = (2, 13)
"""That was measured with: what a later one lets oneDNN round is not known."""


def measured_products(cpu_class: str, torch_version: str) -> str | None:
    """`ONEDNN` or `BLAS`; None where nothing was measured, on this class or with a torch as new as this."""
    major, minor, *_ = torch_version.split(".")
    row = MEASURED.get(cpu_class)
    return None if row is None or (int(major), int(minor)) > NEWEST_TORCH else row.taken
