"""Time of attention over packed documents on this CPU: it should go with the squares of their lengths.

    python tools/benchmarks/attention_documents.py [--tokens 32768] [--lengths 512,2048,8192,32768] [--heads 4]
        [--head-dim 64] [--rounds 3] [--between 4,24] [--dtype float32] [--out F.json]

A stream of so many tokens, cut into documents of one length, forward and backward pass of the attention that training
takes, fp32. `pairs` is how many pairs of a query and a key there are, as a share of those of a single document;
`seconds` the fastest round; `a pair` the nanoseconds of one, which stay alike where time goes with the work.

With `--between`, documents of random lengths instead, and what tiny ones side by side gain by being made as one: rounds
with it and without take turns, seconds of CPU time.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from unittest.mock import patch

import torch
from arguments import count, listed, out_file
from train_cpu import write_record

from megalite.layers import attention_blocks
from megalite.layers.attention import choose_attention
from megalite.layers.documents import Documents


def documents_of(total: int, length: int) -> Documents:
    """A stream of documents of one length."""
    borders = torch.tensor([*range(0, total, length), total], dtype=torch.int32)
    positions = torch.arange(total) % length
    return Documents(positions, borders, total, torch.arange(total), borders=borders)


def measure(given: argparse.Namespace, length: int) -> dict[str, float]:
    """One length."""
    attend, documents = choose_attention("cpu", torch.float32), documents_of(given.tokens, length)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, given.tokens, given.heads, given.head_dim).requires_grad_().unbind()
    best = float("inf")
    for _ in range(given.rounds):
        began = time.perf_counter()
        attend(q, k, v, documents, None).sum().backward()
        best = min(best, time.perf_counter() - began)
    pairs = sum(size * (size + 1) // 2 for size in documents.lengths)
    return {"length": length, "pairs": pairs, "seconds": round(best, 4), "a pair": round(1e9 * best / pairs, 3)}


def measure_joint(given: argparse.Namespace) -> dict[str, float | str]:
    """Random lengths between two bounds."""
    shortest, longest = given.between
    chance, lengths = random.Random(1), []
    while (missing := given.tokens - sum(lengths)) > 0:
        lengths.append(min(chance.randint(shortest, longest), missing))
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    documents = Documents(positions, borders, longest, torch.arange(given.tokens), borders=borders)
    torch.manual_seed(0)
    attend, dtype = choose_attention("cpu", torch.float32), getattr(torch, given.dtype)
    q, k, v = torch.randn(3, given.tokens, given.heads, given.head_dim, dtype=dtype).requires_grad_().unbind()
    best = {"joint": float("inf"), "apart": float("inf")}
    for _ in range(given.rounds):
        for kind, rows in (("joint", attention_blocks.BLOCK_ROWS), ("apart", 0)):
            with patch.object(attention_blocks, "BLOCK_ROWS", rows):
                began = time.process_time()
                attend(q, k, v, documents, None).sum().backward()
                best[kind] = min(best[kind], time.process_time() - began)
    ratio = round(best["joint"] / best["apart"], 2)
    return {"between": f"{shortest} to {longest}", "documents": len(lengths), **best, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=count, default=32768)
    parser.add_argument("--lengths", type=listed(count), default=[512, 1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--heads", type=count, default=4)
    parser.add_argument("--head-dim", type=count, default=64)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--between", type=listed(count))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=out_file)
    given = parser.parse_args()
    if given.between is not None and (len(given.between) != 2 or given.between[0] > given.between[1]):
        parser.error("--between takes the shortest and the longest document, such as 4,24")
    rows = [] if given.between is None else [measure_joint(given)]
    if rows:
        print(json.dumps(rows[0]))
        given.lengths = []
    for length in given.lengths:
        rows.append(measure(given, min(length, given.tokens)))
        print(json.dumps(rows[-1]), flush=True)
    if given.out is not None:
        write_record(given.out, {"tokens": given.tokens, "heads": given.heads, "head_dim": given.head_dim}, rows)


if __name__ == "__main__":
    main()
