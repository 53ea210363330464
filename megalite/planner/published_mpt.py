"""Runs of llm-foundry on H100s: its benchmark table of MPT models in bf16, every row of 1B to 70B parameters with
sequences of 1024 to 8192 tokens.

Torch's FSDP over all ranks, FlashAttention, and full recomputation where the table says so. A step's seconds are its
global batch over the table's tokens a second, so no convention of FLOPs comes in. The table does not say what connects
the nodes; it is taken to be the machine's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SOURCE = "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md, H100 80GB BF16"
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

    @property
    def name(self) -> str:
        """What tells it from the others."""
        return f"{self.model.upper()} on {self.ranks}, {self.seq_len} tokens"

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
        }
        return batch * self.seq_len / self.tokens_per_second, self.ranks, sections


ROWS = tuple(
    Row(*numbers)
    for numbers in (
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
