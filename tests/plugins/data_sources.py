"""Sums that are right, as many as wanted: documents that nobody had to write."""

import random
from collections.abc import Iterator

from megalite import extend


@extend.data_source("sums", num_shards=4)
def sums(shard: int, num_shards: int, *, documents: int = 1000, seed: int = 0) -> Iterator[dict[str, str]]:
    for number in range(shard, documents, num_shards):
        draw = random.Random(f"{seed} {number}")
        pairs = [(draw.randrange(1000), draw.randrange(1000)) for _ in range(20)]
        yield {"id": f"sums-{number}", "text": "\n".join(f"{a} + {b} = {a + b}" for a, b in pairs)}
