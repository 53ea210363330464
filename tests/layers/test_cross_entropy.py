"""The chunked, vocabulary-parallel loss against torch's cross-entropy over whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.architecture.weights import vocab_rows_per_rank
from megalite.layers import cross_entropy
from megalite.layers.cross_entropy import Head, HeadSpec
from megalite.layers.documents import Documents, Targets
from megalite.layers.embedding import VocabParallelEmbedding
from megalite.layers.logits import columns_of
from megalite.parallel.axes import SINGLE, Axis, connect
from megalite.parallel.mesh import Mesh
from tests.kit.spawn import run_ranks
from tests.layers.parity import TOLERANCES, difference, draw, rows
from tests.layers.tracking import LargestTensor

VOCAB, WIDTH, NUM_TOKENS = 101, 12, 40
"""Over 2 ranks the second has 27 padded rows of 64; over 4 ranks the third and fourth have padding only."""

CHUNKS = {"one chunk": 1000, "chunks of 8": 8, "a last chunk of one": 13}
"""Tokens in a chunk; 40 is no multiple of 13."""

BF16_RELATIVE = 2.0**-7
"""Two roundings to bf16, of 2^-8 each: of the product of a chunk and of the result."""


def make_targets(num_tokens: int = NUM_TOKENS, seed: int = 5) -> Targets:
    """Labels on both sides of the borders between ranks, uneven weights, and a third of them zero with any label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(VOCAB, (num_tokens,), generator=generator)
    labels[:4] = torch.tensor([0, 63, 64, VOCAB - 1])
    weights = torch.rand(num_tokens, generator=generator) + 0.5
    ignored = torch.rand(num_tokens, generator=generator) < 0.3
    ignored[:4] = False
    return Targets(labels.masked_fill(ignored, -100), weights.masked_fill(ignored, 0.0))


def dense_loss(hidden: Tensor, weight: Tensor, targets: Targets) -> Tensor:
    """Weighted sum of torch's cross-entropies over whole logits."""
    nll = F.cross_entropy(hidden @ weight.t(), targets.labels.clamp(min=0), reduction="none")
    return (nll * targets.weights).sum()


def vocab_part(whole: Tensor, axis: Axis) -> Tensor:
    """This rank's rows of `[VOCAB, width]`, padded with zeros."""
    count = vocab_rows_per_rank(VOCAB, axis.size)
    return F.pad(whole, (0, 0, 0, count * axis.size - VOCAB))[axis.rank * count : (axis.rank + 1) * count]


PLAIN_HEAD = HeadSpec()


def make_head(axis: Axis, weight: Tensor, sequence_parallel: bool = False, spec: HeadSpec = PLAIN_HEAD) -> Head:
    """A head whose padded rows are NaN, so that any use of them shows."""
    head = Head(VOCAB, weight.shape[1], tp=axis, sequence_parallel=sequence_parallel, spec=spec).to(weight.dtype)
    with torch.no_grad():
        head.weight.copy_(vocab_part(weight, axis))
        head.weight[head.num_true_rows :] = float("nan")
    return head


def compare(axis: Axis, dtype: torch.dtype, sequence_parallel: bool, tokens_per_chunk: int) -> dict[str, float]:
    """Differences of loss, gradients and logits on this rank; the incoming gradient is not 1."""
    hidden, weight, targets = draw((NUM_TOKENS, WIDTH), dtype, 0), draw((VOCAB, WIDTH), dtype, 1), make_targets()
    true_hidden, true_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    truth = dense_loss(true_hidden, true_weight, targets)
    (truth * 0.7).backward()

    head = make_head(axis, weight, sequence_parallel, HeadSpec(tokens_per_chunk))
    own = (rows(hidden, axis) if sequence_parallel else hidden).clone().requires_grad_()
    loss = head(own, targets)
    (loss * 0.7).backward()
    with torch.no_grad():
        silent = head(own, targets)
    first = min(head.first_row, VOCAB)
    logits = true_hidden @ true_weight[first : first + head.num_true_rows].t()
    return {
        "loss": difference(loss.detach(), truth.detach()),
        "loss without gradient": difference(silent, truth.detach()),
        "hidden": difference(own.grad, rows(true_hidden.grad, axis) if sequence_parallel else true_hidden.grad),
        "weight": difference(head.weight.grad, vocab_part(true_weight.grad, axis)),
        "logits": difference(head.logits(own).detach(), logits.detach()),
    }


def compare_all() -> list[str]:
    axis = connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp
    wrong = []
    for dtype, tolerance in TOLERANCES.items():
        for sequence_parallel in (False, True):
            for name, tokens_per_chunk in CHUNKS.items():
                differences = compare(axis, dtype, sequence_parallel, tokens_per_chunk)
                where = f"rank {axis.rank}, {dtype}, sequence_parallel={sequence_parallel}, {name}"
                wrong += [f"{where}: {key} {value:.1e}" for key, value in differences.items() if not value <= tolerance]
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_parallel_loss_equals_dense_cross_entropy(world_size):
    """Loss, gradients of the stream and of the matrix, and logits are those of one process with whole logits: for
    labels on every rank, ignored labels out of range, ranks that hold padding only (NaN here, so it is never read),
    any chunk border (the same on ranks with other numbers of true rows, else their reductions would not meet), with
    and without sequence parallelism, and with gradients off."""
    wrong = [line for lines in run_ranks(compare_all, world_size) for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_loss_of_one_process_equals_dense_cross_entropy(chunk, dtype):
    """The same without tensor parallelism."""
    differences = compare(SINGLE, dtype, False, CHUNKS[chunk])
    assert max(differences.values()) <= TOLERANCES[dtype], differences


def tied_gradients() -> list[str]:
    """Compare the gradient of a table used as embedding and as head with a dense table's."""
    axis = connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp
    weight, targets = draw((VOCAB, WIDTH), torch.float64, 1), make_targets()
    tokens = torch.randint(VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(8))
    documents = Documents(torch.arange(NUM_TOKENS), torch.tensor([0, NUM_TOKENS]), NUM_TOKENS, tokens)
    table = weight.clone().requires_grad_()
    dense_loss(table[tokens].sin(), table, targets).backward()
    wrong = []
    for sequence_parallel in (False, True):
        shared = {"tp": axis, "sequence_parallel": sequence_parallel}
        embedding = VocabParallelEmbedding(VOCAB, WIDTH, **shared).double()
        head = Head(VOCAB, WIDTH, tied_to=embedding.weight, **shared)
        assert head.weight is embedding.weight
        with torch.no_grad():
            embedding.weight.copy_(vocab_part(weight, axis))
        head(embedding(tokens, documents).sin(), targets).backward()
        error = difference(embedding.weight.grad, vocab_part(table.grad, axis))
        if error > TOLERANCES[torch.float64]:
            wrong.append(f"rank {axis.rank}, sequence_parallel={sequence_parallel}: {error:.1e}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_tied_table_gets_both_gradients(world_size):
    """A table that is embedding and head at once has one parameter, whose gradient is the sum of both uses."""
    wrong = [line for lines in run_ranks(tied_gradients, world_size) for line in lines]
    assert not wrong, "\n".join(wrong)


def extreme_losses() -> list[float]:
    """Losses on each rank where a softmax without its maximum would overflow."""
    axis = connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp
    weight = torch.zeros(VOCAB, 1)
    weight[100, 0] = 1.0
    head = make_head(axis, weight)
    hidden = torch.tensor([[1e4], [-1e4], [1e4]])
    losses = []
    for row, label in ((0, 100), (1, 0), (2, 0)):
        targets = Targets(torch.tensor([label]), torch.ones(1))
        losses.append(head(hidden[row : row + 1], targets).item())
    return losses


def test_large_logits_do_not_overflow():
    """Logits of +-10000 on one rank give the exact loss on all: 0, log(100), and 10000."""
    for losses in run_ranks(extreme_losses, 2):
        assert losses == pytest.approx([0.0, torch.tensor(100.0).log().item(), 1e4], abs=1e-3)


def test_zero_weights_give_zero():
    """A micro-batch in which no token counts has loss 0 and gradients 0, not NaN."""
    head = make_head(SINGLE, draw((VOCAB, WIDTH), torch.float32, 1))
    hidden = draw((NUM_TOKENS, WIDTH), torch.float32, 0).requires_grad_()
    loss = head(hidden, Targets(torch.full((NUM_TOKENS,), -100), torch.zeros(NUM_TOKENS)))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad.count_nonzero() == 0
    assert head.weight.grad.count_nonzero() == 0


def bf16_stream(num_tokens: int) -> tuple[Head, Tensor, Targets]:
    """A stream of equal tokens in bf16, in chunks of one, whose contributions a bf16 sum would soon lose: 256 + 1 = 256
    there."""
    head = make_head(SINGLE, draw((VOCAB, WIDTH), torch.bfloat16, 1), spec=HeadSpec(chunk_tokens=1))
    hidden = torch.full((num_tokens, WIDTH), 0.5, dtype=torch.bfloat16).requires_grad_()
    return head, hidden, Targets(torch.full((num_tokens,), 3), torch.ones(num_tokens))


def test_bf16_accumulates_in_fp32():
    """In bf16 the loss is fp32, and 2048 chunks add up to 2048 times one chunk: a bf16 sum would stop at a quarter.
    The gradients come back in bf16."""
    num_tokens = 2048
    head, hidden, targets = bf16_stream(num_tokens)
    loss = head(hidden, targets)
    loss.backward()
    one_head, one_hidden, one_targets = bf16_stream(1)
    one = one_head(one_hidden, one_targets)
    one.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(num_tokens * one.item(), rel=num_tokens * 2.0**-24)  # a rounding a chunk
    assert (hidden.grad.dtype, head.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    found, expected = (x.weight.grad[:VOCAB].float() for x in (head, one_head))
    torch.testing.assert_close(found, num_tokens * expected, rtol=BF16_RELATIVE, atol=0.0)


def test_bf16_softmax_is_fp32():
    """The loss of a bf16 head is that of its bf16 logits in float64: nothing after the product is rounded to bf16."""
    weight = draw((VOCAB, WIDTH), torch.bfloat16, 1)
    hidden, targets = draw((NUM_TOKENS, WIDTH), torch.bfloat16, 0), make_targets()
    logits = (hidden @ weight.t()).double()
    nll = F.cross_entropy(logits, targets.labels.clamp(min=0), reduction="none")
    expected = (nll * targets.weights).sum().item()
    assert make_head(SINGLE, weight)(hidden, targets).item() == pytest.approx(expected, rel=1e-6)  # fp32 sums


def test_logits_are_never_larger_than_a_chunk():
    """Neither the forward nor the backward pass makes a tensor larger than the logits of one chunk, where the whole
    logits would be 32 times that."""
    vocab, width, num_tokens = 512, 4, 64 * 64
    head = Head(vocab, width, tp=SINGLE, spec=HeadSpec(chunk_tokens=128))
    nn.init.normal_(head.weight)
    hidden = draw((num_tokens, width), torch.float32, 0).requires_grad_()
    targets = Targets(torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens))
    with LargestTensor() as largest:
        head(hidden, targets).backward()
    assert largest.num_elements == 128 * vocab, largest.operation


def test_evaluation_makes_no_gradients():
    """With gradients off, no tensor as large as the matrix is made: its gradient is not computed in vain."""
    vocab, width = 1024, 256
    head = Head(vocab, width, tp=SINGLE)
    nn.init.normal_(head.weight)
    hidden, targets = draw((64, width), torch.float32, 0), Targets(torch.zeros(64, dtype=torch.int64), torch.ones(64))
    with torch.no_grad(), LargestTensor() as largest:
        loss = head(hidden, targets)
    assert not loss.requires_grad
    assert largest.num_elements < vocab * width, largest.operation
    with LargestTensor() as largest:
        head(hidden.requires_grad_(), targets)
    assert largest.num_elements == vocab * width


VARIANTS = {"z-loss": (0.03, None), "bounded": (0.0, 1.5), "bounded, z-loss": (0.03, 1.5)}
"""Coefficient of the z-loss, and bound of the logits."""


def variant_differences() -> dict[str, dict[str, float]]:
    """How far loss and gradients of a head with a z-loss or a bound are from the formula over whole logits, on this
    rank."""
    axis = connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp if dist.is_initialized() else SINGLE
    return {name: variant_difference(axis, *variant) for name, variant in VARIANTS.items()}


def variant_difference(axis: Axis, z_loss: float, soft_cap: float | None) -> dict[str, float]:
    whole, hidden = (
        2 * draw(shape, torch.float64, seed) for shape, seed in (((VOCAB, WIDTH), 1), ((NUM_TOKENS, WIDTH), 0))
    )
    targets = make_targets()
    dense_weight, dense_hidden = whole.clone().requires_grad_(), hidden.clone().requires_grad_()
    logits = dense_hidden @ dense_weight.t()
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    log_z = logits.logsumexp(dim=1)
    nll = F.cross_entropy(logits, targets.labels.clamp(min=0), reduction="none")
    plain = (nll * targets.weights).sum()
    (plain + z_loss * (log_z.square() * targets.weights).sum()).backward()
    head, mine = make_head(axis, whole, spec=HeadSpec(13, z_loss, soft_cap)), hidden.clone().requires_grad_()
    loss = head(mine, targets)
    loss.backward()
    rows_here = slice(head.first_row, head.first_row + head.num_true_rows)
    true_logits = logits.detach()[:, rows_here]
    return {
        "loss": float((loss - plain).abs()),
        "hidden": difference(mine.grad, dense_hidden.grad),
        "weight": difference(head.weight.grad[: head.num_true_rows], dense_weight.grad[rows_here])
        if head.num_true_rows
        else 0.0,
        "logits": difference(head.logits(hidden).detach(), true_logits) if head.num_true_rows else 0.0,
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_variants_equal_their_formulas(world_size):
    """Gradients are those of nll + z log(Z)^2 over whole logits, bounded or not, on every rank; the loss is the nll
    alone."""
    for found in run_ranks(variant_differences, world_size):
        for name, differences in found.items():
            assert max(differences.values()) <= 1e-10, (name, differences)  # float64


OFFSET = 1000.0
"""On all logits alike: it changes no probability, and takes three digits off whatever is not relative to it."""


def offset_errors() -> tuple[float, float]:
    """Errors of the tokens' losses and of the weight's gradient, against float64 of the same logits."""
    generator = torch.Generator().manual_seed(1)
    axis = connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp
    hidden, weight = (torch.randn(rows, WIDTH, generator=generator) for rows in (NUM_TOKENS, VOCAB))
    hidden[:, 0], weight[:, 0] = 1.0, OFFSET
    targets = make_targets()
    targets.losses = torch.zeros(NUM_TOKENS)
    head = make_head(axis, weight)
    head(hidden.clone().requires_grad_(), targets).backward()
    logits = (hidden @ weight.t()).double().requires_grad_()
    nll = F.cross_entropy(logits, targets.labels.clamp(min=0), reduction="none")
    (grad,) = torch.autograd.grad((nll * targets.weights).sum(), logits)
    wanted = vocab_part(grad.t() @ hidden.double(), axis)[: head.num_true_rows]
    counted = targets.weights > 0
    return (
        float((targets.losses - nll)[counted].abs().max()),
        float((head.weight.grad[: head.num_true_rows] - wanted).norm() / wanted.norm().clamp(min=1.0)),
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_large_logits_lose_no_digits(world_size):
    """Losses and gradients of logits around 1000 are as exact as the logits, which fp32 rounds to 6e-5."""
    for loss, weight in run_ranks(offset_errors, world_size):
        assert loss <= 2e-6
        assert weight <= 2e-6


def test_a_large_vocabulary_is_added_up_exactly():
    """Gradients of 200,000 columns add up to 0 in every row, as well as fp32 can say."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 200_000, generator=generator)
    wide = logits.double().requires_grad_()
    labels = torch.tensor([0, 17, 199_999, 5])
    (wanted,) = torch.autograd.grad(F.cross_entropy(wide, labels, reduction="sum"), wide)
    head = Head(200_000, 2, tp=SINGLE)
    cross_entropy._cross_entropy(head, columns_of(logits, labels, None), torch.ones(4), want_grad=True)
    assert float((logits / wanted - 1).abs().max()) <= 2e-6


def test_no_tokens_have_no_gradient():
    """Whatever lay in memory."""
    head = make_head(SINGLE, torch.randn(VOCAB, WIDTH))
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    head(hidden, Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0))).backward()
    assert not head.weight.grad.any()
