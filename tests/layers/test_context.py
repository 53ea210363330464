"""Attention of context-parallel ranks against that of one rank, with documents that cross every cut."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.layers import scores
from megalite.layers.attention import ScoreOptions, attend_by_document, attend_spelled_out, attend_varlen
from megalite.layers.attention_blocks import attend_in_blocks
from megalite.layers.context import choose_context
from megalite.layers.documents import share_of
from megalite.parallel import context
from megalite.parallel.axes import connect
from megalite.parallel.context import deal, in_a_row
from megalite.parallel.mesh import Mesh
from tests.kit.spawn import run_ranks
from tests.layers.parity import draw
from tests.layers.test_attention import dense_attention, documents, random_lengths

TOKENS, HEADS, DIM = 192, 4, 8


def kernel_by_hand(
    q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, most_q: int, most_k: int, **options: Any
) -> Tensor:
    """What torch's variable-length kernel is documented to do: causal to the lower right, each piece alone."""
    left, right = options["window_size"]
    assert right == 0
    assert most_q == int(of_q.diff().max())
    assert most_k == int(of_k.diff().max())
    assert (int(of_q[-1]), int(of_k[-1])) == (q.shape[0], k.shape[0])
    found = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(of_q.tolist()), itertools.pairwise(of_k.tolist()), strict=True):
        rows = torch.arange(k1 - k0 - (q1 - q0), k1 - k0).unsqueeze(1)
        columns = torch.arange(k1 - k0)
        seen = (columns <= rows) & ((columns >= rows - left) if left >= 0 else True)
        keys, values = (x[k0:k1].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q[q0:q1], keys) / q.shape[2] ** 0.5
        found.append(torch.einsum("nqk,knd->qnd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
    return torch.cat(found)


KERNELS = {
    "blocks": attend_in_blocks,
    "by document": attend_by_document,
    "varlen": partial(attend_varlen, kernel_by_hand),
    "capped": partial(attend_spelled_out, ScoreOptions(2.0)),
}


def compare(kinds: list[str], windows: list[int | None]) -> list[str]:
    """What differs by more than rounding from dense attention over the whole stream."""
    context.LEAST_BLOCK = 4
    scores.BLOCK_ROWS, scores.BLOCK_TOKENS = 12, 5
    cp = connect(Mesh(cp=dist.get_world_size()), dist.get_rank()).cp
    rng, wrong = random.Random(3), []
    for kv_heads, window, keeps_all in itertools.product((4, 2, 1), windows, (True, False)):
        lengths = random_lengths(TOKENS, rng)
        shapes = [(TOKENS, count, DIM) for count in (HEADS, kv_heads, kv_heads)]
        whole = [draw(shape, torch.float64, seed) for seed, shape in enumerate(shapes)]
        grad = draw(shapes[0], torch.float64, 9)
        for kind, name in itertools.product(kinds, KERNELS):
            if kind == "ring" and name != "blocks":
                continue  # it has a kernel of its own
            truth = [x.clone().requires_grad_() for x in whole]
            wanted = dense_attention(*truth, lengths, window, 2.0 if name == "capped" else None)
            wanted.backward(grad)
            cut = in_a_row(TOKENS, cp.size) if kind == "ulysses" else deal([0, *itertools.accumulate(lengths)], cp.size)
            share = share_of(documents(lengths), cut, cp.rank, keys_go_round=kind == "ring")
            own = share.share.own
            mine = [x[own].requires_grad_() for x in whole]
            attend = choose_context(cp, kind, keeps_all=keeps_all)(KERNELS[name])
            found = attend(*mine, share, window)
            found.backward(grad[own])
            pairs = [(found, wanted[own]), *((a.grad, b.grad[own]) for a, b in zip(mine, truth, strict=True))]
            worst = max(float((a - b).abs().max()) for a, b in pairs)
            if worst > 1e-12:
                wrong.append(f"{kind}, {name}, {kv_heads} kv heads, window {window}, lengths {lengths}: {worst:.1e}")
    return wrong


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kind", ["allgather", "ulysses", "ring"])
def test_attention_equals_dense_attention(kind, cp):
    """Output and gradients in float64, for every kernel, grouped heads and windows."""
    wrong = [line for lines in run_ranks(compare, cp, [kind], [None, 1, 5, 50]) for line in lines]
    assert not wrong, "\n".join(wrong)
