"""Attention document by document against one dense masked product."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from megalite.layers import attention, attention_blocks, scores
from megalite.layers.attention import ScoreOptions, attend_by_document, attend_spelled_out, choose_attention
from megalite.layers.attention_blocks import FlashFrom, attend_in_blocks
from megalite.layers.documents import Documents
from tests.layers.parity import TOLERANCES, difference, draw
from tests.layers.tracking import LargestTensor

ATTENTIONS = [attend_by_document, attend_in_blocks]
"""All that take any format on any device."""


def documents(lengths: list[int], padding: int = 0) -> Documents:
    """Documents of these lengths, end to end, with `padding` repeated borders."""
    borders = torch.tensor([0, *lengths]).cumsum(0)
    borders = torch.cat((borders, borders[-1:].expand(padding))).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Documents(positions, borders, max(lengths), torch.arange(len(positions)))


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    window: int | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax of all scores, those of other documents, of later tokens and outside the window set to -inf."""
    num_tokens, groups = q.shape[0], q.shape[1] // k.shape[1]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ahead = torch.arange(num_tokens).unsqueeze(1) - torch.arange(num_tokens)
    seen = (owner.unsqueeze(1) == owner) & (ahead >= 0)
    if window is not None:
        seen &= ahead < window
    keys, values = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qnd,knd->nqk", q, keys) / q.shape[2] ** 0.5
    scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((sinks.view(-1, 1, 1).expand(-1, num_tokens, 1), scores), dim=-1)
    weights = scores.softmax(dim=-1)[..., -num_tokens:]
    return torch.einsum("nqk,knd->qnd", weights, values)


def random_lengths(total: int, rng: random.Random) -> list[int]:
    cuts = sorted(rng.sample(range(1, total), rng.randrange(0, 6)))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


def tensors(
    num_tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, value_dim: int | None = None
) -> list[Tensor]:
    widths = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim or dim))
    shapes = [(num_tokens, count, width) for count, width in widths]
    return [draw(shape, dtype, seed).requires_grad_() for seed, shape in enumerate(shapes)]


def assert_equals_dense(
    lengths: list[int],
    window: int | None,
    kv_heads: int,
    dtype: torch.dtype,
    padding: int = 0,
    soft_cap: float | None = None,
    value_dim: int | None = None,
    has_sinks: bool = False,
):
    """Output and all three gradients against the dense truth."""
    total = sum(lengths)
    found_inputs, true_inputs = (tensors(total, 4, kv_heads, 8, dtype, value_dim) for _ in range(2))
    kinds = ATTENTIONS if soft_cap is None else [partial(attend_spelled_out, ScoreOptions(soft_cap))]
    sinks = [draw((4,), dtype, 7).mul_(2).requires_grad_() if has_sinks else None for _ in range(2)]
    truth = dense_attention(*true_inputs, lengths, window, soft_cap, sinks[1])
    grad = draw(tuple(truth.shape), dtype, 9)
    truth.backward(grad)
    for attend in kinds:
        for x in (*found_inputs, *(sinks[:1] if has_sinks else ())):
            x.grad = None
        besides = {"sinks": sinks[0]} if has_sinks else {}
        found = attend(*found_inputs, documents(lengths, padding), window, **besides)
        found.backward(grad)
        worst = max(
            difference(found.detach(), truth.detach()),
            *(difference(a.grad, b.grad) for a, b in zip(found_inputs, true_inputs, strict=True)),
            difference(sinks[0].grad, sinks[1].grad) if has_sinks else 0.0,
        )
        where = f"{attend}, lengths {lengths}, window {window}, kv heads {kv_heads}"
        assert worst <= TOLERANCES[dtype], f"{where}: {worst:.1e}"


@pytest.mark.parametrize("most_joint", [0, 7, 128], ids=["each by itself", "some joint", "all joint"])
@pytest.mark.parametrize("few", [0, attention_blocks.FEW_SCORES])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 7, 16, 100])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_random_packings_equal_dense_attention(window, dtype, few, most_joint, monkeypatch):
    """Output and gradients for random packings, one-token documents included, and windows shorter than, as long as
    and longer than the documents, with as many or fewer key heads than query heads."""
    monkeypatch.setattr(attention_blocks, "FEW_SCORES", few)
    monkeypatch.setattr(attention_blocks, "BLOCK_ROWS", most_joint)
    rng = random.Random(window or 0)
    for kv_heads in (4, 2, 1):
        for _ in range(3):
            assert_equals_dense(random_lengths(29, rng), window, kv_heads, dtype)


@pytest.mark.parametrize("few", [0, attention_blocks.FEW_SCORES])
@pytest.mark.parametrize(
    ("lengths", "products"),
    [
        ([5, 3, 9, 1, 20], [38]),
        ([100, 20, 8, 9], [128, 9]),  # no more than a block of rows
        ([200, 4, 5, 300, 3, 1], [200, 9, 300, 4]),
        ([4] * 50 + [3], [4, 3]),  # those of one length are a batch, which makes no product for nothing
    ],
)
def test_tiny_documents_are_made_as_one(lengths, products, few, monkeypatch):
    """Of which lengths kernels are called."""
    monkeypatch.setattr(attention_blocks, "FEW_SCORES", few)
    q, k, v = tensors(sum(lengths), 4, 2, 2, torch.float32)
    seen = []

    def noting(real, count_at):
        def note(*given):
            seen.append(given[0].shape[0] // given[count_at])
            return real(*given)

        return note

    for name, count_at in (("by_head", 1), ("_attend_by_torch", 5)):
        monkeypatch.setattr(attention_blocks, name, noting(getattr(attention_blocks, name), count_at))
    with torch.no_grad():
        attend_in_blocks(q, k, v, documents(lengths), None)
    assert seen == products


@pytest.mark.parametrize("window", [None, 3, 8, 20])
def test_equal_lengths_equal_dense_attention(window):
    """Documents of one length, which share a kernel call, are still apart."""
    for lengths in ([8, 8, 8], [24], [1] * 6):
        assert_equals_dense(lengths, window, 2, torch.float64)


@pytest.mark.parametrize("few", [0, attention_blocks.FEW_SCORES])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_narrow_values_equal_dense_attention(dtype, soft_cap, few, monkeypatch):
    """Values of fewer channels than keys, as latent attention has them, by all kernels."""
    monkeypatch.setattr(attention_blocks, "FEW_SCORES", few)
    for window in (None, 3):
        for value_dim in (5, 8):
            assert_equals_dense([5, 1, 9, 9, 3], window, 2, dtype, soft_cap=soft_cap, value_dim=value_dim)


FLASH_BY_DIRECTION = pytest.mark.parametrize(
    "flash_from", [FlashFrom(40, 40), FlashFrom(40, 50)], ids=["both passes", "forward sooner"]
)


@FLASH_BY_DIRECTION
@pytest.mark.parametrize("few", [0, attention_blocks.FEW_SCORES])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_sinks_equal_dense_attention(dtype, soft_cap, few, flash_from, monkeypatch):
    """A score of each head that softmax counts besides: results, and gradients of the sinks too, by blocks and by
    torch's kernel, with heads that share keys or not."""
    monkeypatch.setattr(attention_blocks, "FEW_SCORES", few)
    monkeypatch.setattr(attention_blocks, "FLASH_FROM", dict.fromkeys(TOLERANCES, flash_from))
    monkeypatch.setattr(scores, "BLOCK_ROWS", 12)
    for window in (None, 3, 50):
        for kv_heads in (4, 2, 1):
            lengths = [5, 1, 9, 9, 45, 60]
            assert_equals_dense(lengths, window, kv_heads, dtype, soft_cap=soft_cap, has_sinks=True)


def test_padded_borders_equal_dense_attention():
    """Repeated borders at the end, which the pipeline adds to keep shapes, change nothing."""
    assert_equals_dense([5, 9, 3], None, 2, torch.float64, padding=4)
    assert_equals_dense([6, 6], 4, 2, torch.float64, padding=11)


@pytest.mark.parametrize("window", [None, 1, 5, 60, 128, 200])
@pytest.mark.parametrize("small", [False, True], ids=["usual blocks", "small blocks"])
def test_blocks_equal_dense_attention(window, small, monkeypatch):
    """Documents of several blocks, with a last one that is cut short, heads that do not fit into one buffer, and one
    that alone is larger than that."""
    if small:
        for name, size in {"BLOCK_ROWS": 12, "BLOCK_TOKENS": 5, "BLOCK_SCORES": 1000}.items():
            monkeypatch.setattr(scores, name, size)
    monkeypatch.setattr(attention_blocks, "FEW_SCORES", 0)
    for kv_heads in (4, 2, 1):
        assert_equals_dense([300, 5, 130, 130, 257, 1], window, kv_heads, torch.float64)


@FLASH_BY_DIRECTION
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_long_documents_equal_dense_attention(dtype, flash_from, monkeypatch):
    """Those that are left to torch's kernel, side by side or not, among short ones, and what has a window."""
    monkeypatch.setattr(attention_blocks, "FEW_SCORES", 0)
    monkeypatch.setattr(attention_blocks, "FLASH_FROM", dict.fromkeys(TOLERANCES, flash_from))
    for kv_heads in (4, 2, 1):
        for window in (None, 30, 50, 200):
            assert_equals_dense([40, 40, 7, 39, 120, 40], window, kv_heads, dtype)


@pytest.mark.parametrize(("flags", "left"), [({"amx_bf16"}, [200, 80, 900]), ({"avx512f"}, [])], ids=["AMX", "none"])
def test_a_cpu_that_multiplies_tiles_leaves_bf16_to_torch(flags, left, monkeypatch):
    """All of the forward pass; of the backward pass what is long. What a window cuts and tiny documents side by side
    stay with blocks. Results are near the exact ones by either."""
    monkeypatch.setattr(attention_blocks, "_has_amx", lambda: "amx_bf16" in flags)
    seen = {"_attend_by_torch": [], "_gradients_by_torch": []}
    for name, lengths in seen.items():
        real = getattr(attention_blocks, name)

        def note(into, *given, real=real, lengths=lengths):
            lengths.append((into[0] if isinstance(into, tuple) else into).shape[0])
            return real(into, *given)

        monkeypatch.setattr(attention_blocks, name, note)
    sizes = [200, 80, 900, 3, 4, 5]
    exact = tensors(sum(sizes), 4, 2, 8, torch.float64)
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    for window, expected in ((100, left[1:2]), (None, left)):
        for lengths in seen.values():
            lengths.clear()
        results = []
        for given in (exact, rounded):
            found = attend_in_blocks(*given, documents(sizes), window)
            results.append([found, *torch.autograd.grad(found, given, torch.ones_like(found))])
        for wanted, found in zip(*results, strict=True):
            assert (found - wanted).norm() < 0.01 * wanted.norm()
        assert seen["_attend_by_torch"] == expected
        assert seen["_gradients_by_torch"] == [length for length in expected if length >= 768]


@pytest.mark.parametrize("attend", ATTENTIONS)
def test_a_document_attends_alike_alone_and_packed(attend):
    """A document's output is bit-equal whatever stands before and after it in the stream."""
    q, k, v = (x.detach() for x in tensors(824, 4, 2, 8, torch.float32))
    packed = attend(q, k, v, documents([7, 311, 306, 200]), None)
    alone = attend(q[7:318], k[7:318], v[7:318], documents([311]), None)
    assert torch.equal(packed[7:318], alone)


LONG, DOCUMENT, HEADS, DIM = 16384, 512, 2, 8


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        ([DOCUMENT] * (LONG // DOCUMENT), None),
        ([DOCUMENT - 1, *[DOCUMENT] * (LONG // DOCUMENT - 1), 1], None),
        ([LONG], 256),
    ],
    ids=["equal documents", "unequal documents", "one document with a window"],
)
def test_a_long_stream_never_makes_a_square_of_its_length(lengths, window, attend):
    """For 16384 tokens, no operation of the forward or backward pass returns anything near t x t elements: at most
    the scores of a document, or of a window, for each token and head."""
    q, k, v = tensors(LONG, HEADS, 1, DIM, torch.float32)
    with LargestTensor() as largest:
        attend(q, k, v, documents(lengths), window).sum().backward()
    assert q.grad is not None
    limit = LONG * HEADS * DOCUMENT
    assert limit < LONG * LONG / 10
    assert largest.num_elements <= limit, f"{largest.operation} made {largest.num_elements} elements"


@pytest.mark.parametrize("attend", ATTENTIONS)
def test_one_long_document_makes_no_square_either(attend):
    """A single document of 8192 tokens without a window: nothing of t x t elements."""
    q, k, v = tensors(8192, 1, 1, DIM, torch.float32)
    with LargestTensor() as largest:
        attend(q, k, v, documents([8192]), None).sum().backward()
    assert largest.num_elements <= 8192 * 8192 / 60, f"{largest.operation} made {largest.num_elements} elements"


def test_choice_of_attention():
    """A CPU attends by blocks; CUDA in fp32 document by document, which every device has."""
    assert choose_attention("cpu", torch.bfloat16) is attend_in_blocks
    assert choose_attention("cuda", torch.float32) is attend_by_document


BF16_OUTPUT = 2.0**-7
"""Relative: a rounding of the probabilities to bf16 and one of the result, of up to 2^-9 each, with room for sums."""


@pytest.mark.parametrize("attend", ATTENTIONS)
def test_a_bf16_softmax_is_fp32(attend):
    """Sums over 2000 keys with logits up to 100: attention in bf16 is that of float64 on the same numbers but for two
    roundings, where a softmax in bf16 would lose most of the sum (256 + 1 = 256)."""
    torch.manual_seed(0)
    length = 2000
    q, k, v = (torch.randn(length, 2, 16).to(torch.bfloat16) for _ in range(3))
    q = 4 * q
    found = attend(q, k, v, documents([length]), None)
    expected = dense_attention(*(x.double() for x in (q, k, v)), [length], None)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - expected).abs().max() / expected.abs().max()) <= BF16_OUTPUT
    flat = attend(torch.zeros_like(q), k, torch.ones_like(v), documents([length]), None)
    assert float((flat.float() - 1).abs().max()) <= BF16_OUTPUT  # 2000 equal probabilities add up to one


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("window", [None, 5])
def test_bounded_scores_equal_dense(window, dtype):
    """The same with scores that are bounded, also where a document takes several blocks of queries."""
    for lengths in ([7, 1, 12], [300, 3, 270]):
        assert_equals_dense(lengths, window, 2, dtype, padding=2, soft_cap=1.5)


def test_who_attends_forward_attends_backward():
    """Torch's products may be told to round between the two passes, which changes who is faster."""
    inputs = tensors(16, 4, 2, 8, torch.float32)
    former = torch.get_float32_matmul_precision()
    found = []
    try:
        for first, second in (("highest", "highest"), ("medium", "highest"), ("highest", "medium")):
            for x in inputs:
                x.grad = None
            torch.set_float32_matmul_precision(first)
            out = attend_in_blocks(*inputs, documents([8, 8]), None)
            torch.set_float32_matmul_precision(second)
            out.square().sum().backward()
            found.append([x.grad for x in inputs])
    finally:
        torch.set_float32_matmul_precision(former)
    for others in found[1:]:
        assert max(difference(a, b) for a, b in zip(others, found[0], strict=True)) <= 1e-5


@pytest.mark.parametrize(("version", "heads_seen"), [((2, 10), 4), ((2, 11), 2), ((2, 13), 2)])
def test_a_kernel_without_a_word_for_groups(monkeypatch, version: tuple[int, int], heads_seen: int):
    """Torch 2.11's takes fewer key and value heads as they are, 2.10's gets repeated ones; neither is told of them."""
    monkeypatch.setattr(attention, "TORCH", version)

    def kernel(q, k, v, *others, window_size):
        assert k.shape[1] == v.shape[1] == heads_seen
        return q

    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    assert attention._with_groups(kernel)(q, k, v, window_size=(-1, 0), enable_gqa=True) is q


def test_a_kernel_that_is_told_of_groups():
    def kernel(q, k, v, *, enable_gqa=False):
        return enable_gqa

    assert attention._with_groups(kernel) is kernel
