"""Documents that a station learns from, with an account of what could not be read of them.

They go into no folder of documents, whose `rejected/` would name the others; so the counts and the summary do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import DocumentBatch
from megalite.corpus.shards import Shard, ShardReading, lost_counts, refuse_unreadable


class SampleReading:
    """The documents of a corpus, batch by batch, from its beginning, as far as they are wanted.

    Args:
        corpus: what to read.
    """

    def __init__(self, corpus: Corpus):
        self._shards, self._passed_over = corpus.shards(), corpus.passed_over
        self._readings: list[ShardReading] = []
        self._rejected: Counter[str] = Counter()
        self._first_rejected = ""

    def __iter__(self) -> Iterator[DocumentBatch]:
        for shard in self._shards:
            reading = ShardReading(shard)
            self._readings.append(reading)
            for batch in reading:
                if batch.rejected and not self._first_rejected:
                    self._first_rejected = batch.rejected[0].id
                self._rejected.update(record.reason for record in batch.rejected)
                yield batch

    def account(self) -> dict[str, Any]:
        """JSON-ready: what could not be read, and the sources that were not reached; both only where there are any.

        Raises:
            DataError: nothing could be read of a source that was reached.
        """
        reports = [reading.report() for reading in self._readings]
        refuse_unreadable([(reading.shard, report) for reading, report in zip(self._readings, reports, strict=True)])
        reached = {_root(reading.shard) for reading in self._readings}
        left = [_name(root) for root in dict.fromkeys(map(_root, self._shards)) if root not in reached]
        account: dict[str, Any] = lost_counts([{"reading": report} for report in reports], self._passed_over)
        if self._rejected:
            account |= {"rejected": dict(sorted(self._rejected.items())), "first_rejected": self._first_rejected}
        return account | ({"not_reached": left} if left else {})


def account_in_words(account: dict[str, Any], sample: str = "") -> str:
    """What was not read, for the line that sums a station up; empty where all was.

    Args:
        account: from `SampleReading.account`.
        sample: which of several, as in "the good sample".
    """
    of_sample = f" of {sample}" if sample else ""
    words = ""
    if rejected := account.get("rejected"):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
        words += f"; not read{of_sample}: {reasons} (the first is {account['first_rejected']})"
    if lost := account.get("lost"):
        parts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in lost.items())
        words += f"; lost{of_sample}: {parts}"
    if others := account.get("passed_over"):
        parts = ", ".join(f"{count:,} with {suffix}" for suffix, count in others.items())
        words += f"; files{of_sample} of kinds that are not read: {parts}"
    if left := account.get("not_reached"):
        words += f"; train_mb was full before these files{of_sample}: {', '.join(left)}"
    return words


def _root(shard: Shard) -> str:
    """Where the source of a shard lies."""
    return shard["root"] if "root" in shard else str(Path(shard["station"]).parent)


def _name(root: str) -> str:
    """The last part of it: manifests hold no absolute paths."""
    return root.rstrip("/").rpartition("/")[2]
