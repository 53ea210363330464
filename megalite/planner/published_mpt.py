"""Runs of llm-foundry: its benchmark tables of MPT models in bf16 on H100 and A100, every row of 1B to 70B parameters
with sequences of 1024 to 8192 tokens and weights divided over all ranks.

Torch's first FSDP, FlashAttention in Triton, which makes scores of later tokens too, and full recomputation where the
table says so. A step's seconds are its global batch over the table's tokens a second, so no convention of FLOPs comes
in. What connects the nodes is 1600 Gb/s for A100; for H100 it is not said, and taken to be the machine's.

Beside its messages that FSDP reads and writes gradients of whole weights: out of autograd into one tensor (4 bytes a
number), into fp32 (6) and divided by the number of ranks (8); where gradients travel in bf16, in that format.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from megalite.planner.practice import Practice

SOURCE = "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
IN_FP32 = Practice(
    skips_hidden=False,
    copied_bytes=4.0 + 6.0 + 8.0,
    axes=frozenset({"dp"}),
    divides_weights=True,
    recomputes=frozenset({"none", "full"}),
    offloads=False,
)
IN_BF16 = replace(IN_FP32, copied_bytes=4.0 + 4.0)
"""By the format that gradients travel in."""
ALIKE = {
    "vocab_size": 50368,
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "tie_embeddings": True,
}
"""ALiBi takes the time of no positions at all, as learned ones nearly do."""

SHAPES = {
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Hidden size, blocks, heads."""


class Row(NamedTuple):
    """Of the table."""

    model: str
    seq_len: int
    ranks: int
    micro_batch_size: int
    num_micro_batches: int
    recomputes: bool
    tokens_per_second: int
    sends_bf16: bool = False
    """Gradients travel in bf16 (the table's mode PURE), not in fp32."""

    @property
    def name(self) -> str:
        """What tells it from the others."""
        return f"{self.model.upper()} on {self.ranks}, {self.seq_len} tokens"

    @property
    def practice(self) -> Practice:
        """Of its software."""
        return IN_BF16 if self.sends_bf16 else IN_FP32

    @property
    def as_run(self) -> tuple[float, int, dict[str, Any]]:
        """Seconds of a step, ranks, and sections of a config."""
        hidden, layers, heads = SHAPES[self.model]
        batch = self.micro_batch_size * self.num_micro_batches * self.ranks
        model = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "ffn_hidden_size": 4 * hidden}
        sections = {
            "model": {**model, **ALIKE, "max_positions": self.seq_len},
            "parallel": {"dp": self.ranks, "zero_stage": 3, "engine": "fsdp2"},
            "batch": {
                "micro_batch_size": self.micro_batch_size,
                "global_batch_size": batch,
                "seq_len": self.seq_len,
            },
            "train": {"steps": 1, "compile": "off", "recompute": "full" if self.recomputes else "none"},
            "precision": {"reduce_dtype": "bf16" if self.sends_bf16 else "fp32"},
        }
        return batch * self.seq_len / self.tokens_per_second, self.ranks, sections


# Of each: model, tokens of a sequence, ranks, micro-batch, micro-batches, recomputation, tokens a second
H100 = tuple(
    Row(*numbers)
    for numbers in (
        ("70b", 2048, 512, 8, 1, True, 515636),
        ("70b", 2048, 256, 8, 1, True, 265149),
        ("70b", 2048, 128, 8, 1, True, 135490),
        ("30b", 2048, 512, 8, 1, True, 1083366),
        ("30b", 2048, 256, 8, 1, True, 550022),
        ("30b", 2048, 128, 8, 1, True, 281491),
        ("13b", 2048, 512, 16, 1, True, 2535811),
        ("13b", 2048, 256, 16, 1, True, 1277214),
        ("13b", 2048, 128, 16, 1, True, 650264),
        ("7b", 2048, 512, 6, 1, False, 4951479),
        ("7b", 2048, 256, 6, 1, False, 2590548),
        ("7b", 2048, 128, 6, 1, False, 1340830),
        ("70b", 2048, 64, 8, 4, True, 66523),
        ("70b", 2048, 32, 2, 16, True, 28242),
        ("30b", 8192, 8, 1, 21, True, 11072),
        ("30b", 4096, 8, 1, 21, True, 14419),
        ("30b", 2048, 32, 14, 3, True, 73860),
        ("30b", 2048, 16, 10, 3, True, 36209),
        ("30b", 2048, 8, 3, 21, True, 16022),
        ("30b", 1024, 8, 6, 21, True, 16672),
        ("13b", 4096, 8, 10, 3, True, 37740),
        ("13b", 2048, 64, 2, 1, False, 307209),
        ("13b", 2048, 32, 2, 1, False, 153960),
        ("13b", 2048, 16, 2, 1, False, 76280),
        ("13b", 2048, 8, 2, 1, False, 38336),
        ("13b", 1024, 8, 40, 3, True, 44019),
        ("7b", 8192, 8, 8, 2, True, 55481),
        ("7b", 4096, 8, 16, 2, True, 68893),
        ("7b", 2048, 8, 6, 1, False, 85144),
        ("7b", 1024, 8, 64, 2, True, 81628),
        ("3b", 8192, 8, 3, 6, False, 132626),
        ("3b", 4096, 8, 5, 6, False, 167712),
        ("3b", 2048, 64, 6, 3, False, 1441663),
        ("3b", 2048, 32, 6, 3, False, 736701),
        ("3b", 2048, 16, 10, 3, False, 386285),
        ("3b", 1024, 8, 20, 6, False, 216369),
        ("1b", 8192, 8, 3, 4, False, 233256),
        ("1b", 4096, 8, 7, 4, False, 308282),
        ("1b", 2048, 64, 20, 1, False, 2841754),
        ("1b", 2048, 32, 20, 1, False, 1444184),
        ("1b", 2048, 16, 20, 1, False, 736596),
        ("1b", 2048, 8, 14, 1, False, 363645),
        ("1b", 1024, 8, 18, 4, False, 391287),
    )
)

A100_80G = tuple(
    Row(*numbers)
    for numbers in (
        ("70b", 2048, 64, 8, 4, True, 26274, True),
        ("70b", 2048, 32, 2, 16, True, 11962, True),
        ("30b", 8192, 8, 1, 21, True, 4594),
        ("30b", 4096, 8, 1, 21, True, 6513),
        ("30b", 2048, 8, 3, 21, True, 7330),
        ("30b", 1024, 8, 6, 21, True, 7571),
        ("13b", 8192, 8, 5, 3, True, 14362),
        ("13b", 4096, 8, 10, 3, True, 16482),
        ("13b", 2048, 8, 2, 3, False, 18097),
        ("13b", 1024, 8, 40, 3, True, 18647),
        ("7b", 8192, 8, 8, 2, True, 25655),
        ("7b", 4096, 8, 16, 2, True, 29472),
        ("7b", 2048, 8, 6, 2, False, 37130),
        ("7b", 1024, 8, 64, 2, True, 34857),
        ("3b", 8192, 8, 3, 6, False, 61567),
        ("3b", 4096, 8, 5, 6, False, 75658),
        ("3b", 2048, 8, 10, 2, False, 86491),
        ("3b", 1024, 8, 20, 6, False, 92643),
        ("1b", 8192, 8, 3, 4, False, 110516),
        ("1b", 4096, 8, 7, 4, False, 142457),
        ("1b", 2048, 8, 14, 4, False, 164109),
        ("1b", 1024, 8, 18, 4, False, 176898),
    )
)

A100_40G = tuple(
    Row(*numbers, sends_bf16=True)
    for numbers in (
        ("70b", 2048, 128, 4, 1, True, 48194),
        ("70b", 2048, 64, 2, 1, True, 17672),
        ("30b", 2048, 128, 6, 1, True, 110803),
        ("30b", 2048, 32, 4, 1, True, 27431),
        ("13b", 8192, 8, 1, 16, True, 11258),
        ("13b", 4096, 8, 2, 16, True, 12830),
        ("13b", 2048, 128, 16, 1, True, 252444),
        ("13b", 2048, 64, 16, 1, True, 126479),
        ("13b", 2048, 32, 14, 1, True, 63946),
        ("13b", 2048, 16, 10, 1, True, 31900),
        ("13b", 2048, 8, 4, 16, True, 13347),
        ("13b", 1024, 8, 8, 16, True, 13817),
        ("7b", 8192, 8, 3, 4, True, 23098),
        ("7b", 4096, 8, 6, 4, True, 26930),
        ("7b", 2048, 128, 18, 1, True, 463749),
        ("7b", 2048, 64, 18, 1, True, 234614),
        ("7b", 2048, 32, 18, 1, True, 119202),
        ("7b", 2048, 16, 16, 1, True, 58322),
        ("7b", 2048, 8, 12, 4, True, 29436),
        ("7b", 1024, 8, 24, 4, True, 30833),
        ("3b", 8192, 8, 1, 8, False, 57193),
        ("3b", 4096, 8, 2, 8, False, 70223),
        ("3b", 2048, 128, 6, 1, False, 1220885),
        ("3b", 2048, 64, 6, 1, False, 623167),
        ("3b", 2048, 32, 6, 1, False, 317261),
        ("3b", 2048, 16, 5, 1, False, 156013),
        ("3b", 2048, 8, 5, 8, False, 80520),
        ("3b", 1024, 8, 10, 8, False, 85854),
        ("1b", 8192, 8, 2, 8, False, 107799),
        ("1b", 4096, 8, 4, 8, False, 134851),
        ("1b", 2048, 128, 10, 1, False, 2386897),
        ("1b", 2048, 64, 10, 1, False, 1216104),
        ("1b", 2048, 32, 10, 1, False, 497782),
        ("1b", 2048, 16, 8, 1, False, 305372),
        ("1b", 2048, 8, 8, 8, False, 154171),
        ("1b", 1024, 8, 16, 8, False, 167677),
    )
)
