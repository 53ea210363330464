"""Runs in fp32 whose products may round: torch is told so on every rank, and the curve stays near the exact one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.engine.runtime import let_products_round
from megalite.errors import EXIT_DONE
from megalite.host import cpu_flags
from megalite.train.loop import TrainingLoop
from tests.kit.runs import metrics, write_run
from tests.train.forked import launch

STEPS = 6
NEAR = 2.0**-8
"""Relative, of losses whose products have 8 bits."""


def note_precision() -> None:
    """On every rank: what torch has been told is written down as training begins."""
    train = TrainingLoop.train

    def noting(self: TrainingLoop) -> int:
        rank, folder = torch.distributed.get_rank(), self.run.config.run.dir
        (folder / f"precision{rank}").write_text(torch.get_float32_matmul_precision())
        return train(self)

    TrainingLoop.train = noting


def config_of(folder: Path, products: str) -> Config:
    sections = {
        "parallel": {"tp": 2, "dp": 1},
        "precision": {"dtype": "fp32", "products": products},
        "train": {"steps": STEPS},
    }
    return load_config(write_run(folder, **sections))


@pytest.mark.parametrize(("products", "told"), [("tf32", "high"), ("bf16", "medium")])
def test_runs_whose_products_round(products: str, told: str, tmp_path: Path):
    """By the config alone, on every rank."""
    losses = []
    for name in ("fp32", products):
        config = config_of(tmp_path / name, name)
        assert launch(config, 2, prepare=note_precision) == EXIT_DONE
        losses.append(torch.tensor([line["loss"] for line in metrics(config.run.dir)]))
        if name != "fp32":
            assert [(config.run.dir / f"precision{rank}").read_text() for rank in range(2)] == [told] * 2
    exact, rounded = losses
    assert len(exact) == STEPS
    assert ((rounded - exact).abs() < NEAR * exact).all()


@pytest.fixture
def former():
    """Leaves torch's precision as it was."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_products_round_where_that_is_faster(former: None):
    """To bf16 on CPUs that multiply tiles of it; elsewhere they stay exact. fp32 leaves torch alone."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    let_products_round("bf16")
    error = ((left @ right).double() - exact).norm() / exact.norm()
    assert (1e-3 < error < 4e-3) if "amx_bf16" in cpu_flags() else error < 1e-5
    let_products_round("fp32")
    assert torch.get_float32_matmul_precision() == "medium"
