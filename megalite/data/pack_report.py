"""What a packing costs and saves: padding, cuts, documents in a sequence, the work of attention.

    padding        free places at the ends of sequences, in percent of all places; windows make it grow, so the least
                   possible number of sequences stands beside it
    cuts           borders put inside documents. A document of three pieces is one document split, and two cuts
    documents      how many share a sequence: the length of cu_seqlens, which attention kernels loop over
    attention      pairs of tokens that attention looks at, in percent of the whole triangle of each sequence: with
                   document masks a sequence of n spans costs the sum of their triangles, and padding is a span too

The numbers are added up window by window, so a report needs no memory for the pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class PackStatistics:
    """Sums over sequences.

    Args:
        seq_len: tokens in a sequence.
    """

    seq_len: int
    num_sequences: int = 0
    num_tokens: int = 0
    num_pieces: int = 0
    most_documents: int = 0
    """Documents in the sequence that has the most."""
    num_pairs: int = 0
    """Pairs of tokens under document masks: n x (n + 1) / 2 for a span of n."""
    num_by_documents: dict[int, int] = field(default_factory=dict)
    """Sequences by the power of two that first reaches their number of documents."""

    def add(self, lengths: np.ndarray, borders: np.ndarray) -> None:
        """Count some whole sequences.

        Args:
            lengths: [pieces] tokens of each, sequence by sequence.
            borders: int64 [sequences + 1] in it, from 0.
        """
        if borders.size < 2:
            return
        lengths = lengths.astype(np.int64)
        spans = np.append(lengths, self.seq_len - np.add.reduceat(lengths, borders[:-1]))
        num_documents = np.diff(borders)
        self.num_sequences += num_documents.size
        self.num_tokens += int(lengths.sum())
        self.num_pieces += lengths.size
        self.num_pairs += int((spans * (spans + 1) // 2).sum())
        self.most_documents = max(self.most_documents, int(num_documents.max()))
        for bucket, count in enumerate(np.bincount(np.ceil(np.log2(num_documents)).astype(np.int64)).tolist()):
            if count:
                self.num_by_documents[1 << bucket] = self.num_by_documents.get(1 << bucket, 0) + count

    @property
    def padding_percent(self) -> float:
        """Free places in percent of all."""
        return 100 * (1 - self.num_tokens / (self.num_sequences * self.seq_len))

    def report(self, num_documents: int) -> dict[str, Any]:
        """The numbers as they stand in the manifest.

        Args:
            num_documents: documents that hold a token.
        """
        least = -(-self.num_tokens // self.seq_len)
        triangles = self.num_sequences * (self.seq_len * (self.seq_len + 1) // 2)
        ranges = {_range(power): self.num_by_documents[power] for power in sorted(self.num_by_documents)}
        return {
            "padding_tokens": self.num_sequences * self.seq_len - self.num_tokens,
            "sequences_above_least": self.num_sequences - least,
            "cuts": self.num_pieces - num_documents,
            "documents_per_sequence": round(self.num_pieces / self.num_sequences, 2),
            "most_documents_in_a_sequence": self.most_documents,
            "sequences_by_documents": ranges,
            "attention_percent": round(100 * self.num_pairs / triangles, 2),
        }


def render(counts: dict[str, Any], title: str) -> Table:
    """The report of a pack station as a table for people.

    Args:
        counts: of its manifest.
        title: above the table.
    """
    from megalite.page.terminal import FittingTable

    report = counts["report"]
    table = FittingTable("", "", title=title, title_justify="left", show_header=False)
    samples = counts["samples"]
    sequences = f"{samples:,}, {report['sequences_above_least']:,} above the least possible"
    if "windows" in report:
        sequences += f", in {report['windows']:,} windows of {report['window_documents']:,} documents"
    table.add_row("sequences", sequences)
    table.add_row("padding", f"{report['padding_tokens']:,} tokens, {counts['padding_percent']:.4f} %")
    split = f"{counts['documents_split']:,} of {counts['documents']:,}, {report['cuts']:,} cuts"
    table.add_row("documents split", f"{split} ({counts['documents_longer_than_seq_len']:,} do not fit in a sequence)")
    average = f"{report['documents_per_sequence']:.2f} on average"
    table.add_row("documents in a sequence", f"{average}, {report['most_documents_in_a_sequence']:,} at most")
    for name, count in report["sequences_by_documents"].items():
        table.add_row(f"  {name}", f"{count:,} sequences, {100 * count / samples:.1f} %")
    table.add_row("attention", f"{report['attention_percent']:.2f} % of the work without document masks")
    return table


def _range(power: int) -> str:
    """The numbers above half of a power of two, up to it: 1, 2, 3-4, 5-8, ..."""
    return str(power) if power <= 2 else f"{power // 2 + 1}-{power}"
