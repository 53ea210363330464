"""Runs in fp32 whose products may round: torch is told so on every rank, and the curve stays near the exact one."""

from __future__ import annotations

from collections.abc import Iterator
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
ROUNDS = "amx_bf16" in cpu_flags()
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


@pytest.mark.parametrize("products", ["tf32", "bf16"])
def test_runs_whose_products_round(products: str, tmp_path: Path):
    """By the config and the kind of CPU alone, on every rank."""
    losses, told = [], []
    for name in ("fp32", products):
        config = config_of(tmp_path / name, name)
        assert launch(config, 2, prepare=note_precision) == EXIT_DONE
        losses.append(torch.tensor([line["loss"] for line in metrics(config.run.dir)]))
        told.append({(config.run.dir / f"precision{rank}").read_text() for rank in range(2)})
    rounds = products == "bf16" and ROUNDS
    assert told[1] == ({"medium"} if rounds else told[0])
    exact, rounded = losses
    assert torch.equal(exact, rounded) is not rounds
    assert len(exact) == STEPS
    assert ((rounded - exact).abs() < NEAR * exact).all()


@pytest.fixture
def former() -> Iterator[None]:
    """Leaves torch's precision as it was."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_products_round_where_that_is_faster(former: None):
    """To bf16 on CPUs that multiply tiles of it; elsewhere they stay exact."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    for rounded_to in ("fp32", "tf32", "bf16"):
        let_products_round(rounded_to, "cpu")
        error = ((left @ right).double() - exact).norm() / exact.norm()
        assert (1e-3 < error < 4e-3) if rounded_to == "bf16" and ROUNDS else error < 1e-5


@pytest.mark.parametrize(("products", "told"), [("fp32", "highest"), ("tf32", "high"), ("bf16", "high")])
def test_a_gpu_is_told_what_is_meant(products: str, told: str, former: None):
    """Whatever its environment began with."""
    torch.set_float32_matmul_precision("medium")
    let_products_round(products, "cuda")
    assert torch.get_float32_matmul_precision() == told
