"""The vocabulary-parallel embedding against a plain table."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.architecture.weights import vocab_rows_per_rank
from megalite.layers.documents import Documents
from megalite.layers.embedding import VocabParallelEmbedding
from megalite.layers.weight_gradients import WeightGradient
from megalite.parallel.axes import SINGLE, Axis
from tests.layers.parity import NUM_TOKENS, Case, assert_equal_to_one_process, complaints, draw, whole

VOCAB, WIDTH, NUM_POSITIONS = 101, 12, 16
"""Over 4 ranks of 64 rows each, the third and fourth hold padding only."""

TOKENS = torch.randint(VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
TOKENS[:4] = torch.tensor([0, 63, 64, VOCAB - 1])  # both sides of the borders between ranks
POSITIONS = torch.arange(NUM_TOKENS) % 10
DOCUMENTS = Documents(POSITIONS, torch.tensor([0, 10, 20, NUM_TOKENS]), 10, torch.arange(NUM_TOKENS))


def vocab_rows(x: Tensor, axis: Axis) -> Tensor:
    """The rows a rank holds of a table padded to equal runs; the padding is zero."""
    count = vocab_rows_per_rank(VOCAB, axis.size)
    padded = F.pad(x[:VOCAB], (0, 0, 0, count * axis.size - VOCAB))
    return padded[axis.rank * count : (axis.rank + 1) * count]


def case(num_positions: int | None) -> Case:
    return Case(
        build=lambda axis, sp: VocabParallelEmbedding(
            VOCAB, WIDTH, tp=axis, num_positions=num_positions, sequence_parallel=sp
        ),
        cuts={"weight": vocab_rows, "positions": whole},
        input_shape=(NUM_TOKENS, 1),
        output_shape=(NUM_TOKENS, WIDTH),
        input_cut=lambda sp: whole,
        run=lambda layer, x: layer(TOKENS, DOCUMENTS),
        has_input_grad=False,
    )


CASES = {"tokens": case(None), "tokens and positions": case(NUM_POSITIONS)}


def check() -> list[str]:
    return complaints(CASES)


@pytest.mark.parametrize("world_size", [2, 4])
def test_embedding_equals_one_process(world_size):
    """Output and gradients of both tables are those of the whole layer, with and without sequence parallelism, also
    on ranks whose rows are padding only."""
    assert_equal_to_one_process(check, world_size)


def test_one_rank_is_a_table_and_positions():
    """The result is the token's row plus the row of the position in its document."""
    layer = VocabParallelEmbedding(VOCAB, WIDTH, tp=SINGLE, num_positions=NUM_POSITIONS).double()
    with torch.no_grad():
        layer.weight.copy_(draw(tuple(layer.weight.shape), torch.float64, 0))
        layer.positions.copy_(draw(tuple(layer.positions.shape), torch.float64, 1))
    assert torch.equal(layer(TOKENS, DOCUMENTS), layer.weight[TOKENS] + layer.positions[POSITIONS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_handed_over_are_autograds_gradient(dtype: torch.dtype):
    """Added to a sum in fp32, where autograd's is rounded to the format of the weights; one of each lookup."""
    layer = VocabParallelEmbedding(VOCAB, WIDTH, tp=SINGLE).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(draw(tuple(layer.weight.shape), torch.float32, 0))
    grad = draw((NUM_TOKENS, WIDTH), torch.float32, 1).to(dtype)
    layer(TOKENS, DOCUMENTS).backward(grad)
    taken: list[tuple[nn.Parameter, WeightGradient]] = []
    wide = torch.zeros(layer.weight.shape, dtype=torch.float32).index_add(0, TOKENS, grad.float())
    torch.testing.assert_close(layer.weight.grad, wide.to(dtype))
    layer.weight.grad, layer.take_gradient = None, lambda *both: taken.append(both)
    for _ in range(2):
        layer(TOKENS, DOCUMENTS).backward(grad)
    assert layer.weight.grad is None
    assert [parameter for parameter, _ in taken] == [layer.weight] * 2
    total = torch.full(layer.weight.shape, torch.nan)
    taken[0][1].begin(total)
    assert torch.equal(total, wide)
    taken[1][1].add_to(total)
    assert torch.allclose(total, 2 * wide)
    torch.testing.assert_close(taken[0][1].make(), wide.to(dtype))
