"""Exact duplicates by other tools, and what no tool can undercut, as cases of the benchmark (`data_measure.py`).

Whoever reads a text from Parquet must unpack it, and whoever writes it must pack it. `zstd` does only that, with pages
that lie in memory: no file is opened, nothing is compared.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from data_inputs import Inputs
from data_measure import Outcome, Run, SetUp

ZSTD_LEVEL = 1
"""As all Parquet files of this benchmark."""

PAGE_BYTES = 1 << 20
"""Of Arrow's pages, unpacked."""


def polars_exact(inputs: Inputs, setting: str) -> Run:
    """The first of each text. Setting: bytes for the ids of those that stay, station to write them whole."""
    import polars

    def run(out: Path) -> Outcome:
        first = polars.scan_parquet([str(path) for path in inputs.shards])
        first = first.unique(subset="text", keep="first", maintain_order=True)
        if setting == "bytes":
            first.select("id").collect()
        else:
            first.collect().write_parquet(out / "kept.parquet", compression="zstd", compression_level=ZSTD_LEVEL)
        return Outcome(inputs.megabytes)

    return run


def duckdb_exact(inputs: Inputs, setting: str) -> Run:
    """The least id of each text."""
    import duckdb

    def run(_: Path) -> Outcome:
        connection = duckdb.connect()
        connection.execute("SET threads = 1")
        paths = [str(path) for path in inputs.shards]
        connection.execute("SELECT min(id) FROM read_parquet(?) GROUP BY text", [paths]).fetchnumpy()
        return Outcome(inputs.megabytes)

    return run


def pyarrow_exact(inputs: Inputs, setting: str) -> Run:
    """The least id of each text."""

    def run(_: Path) -> Outcome:
        table = pa.concat_tables(pq.read_table(path, columns=["id", "text"]) for path in inputs.shards)
        table.group_by("text", use_threads=False).aggregate([("id", "min")])
        return Outcome(inputs.megabytes)

    return run


def text_dedup_exact(inputs: Inputs, setting: str) -> Run:
    """text-dedup's loop over texts with its fastest hash, without the copies of the data set around it."""
    from text_dedup.utils.hashfunc import xxh3_128_digest

    def run(_: Path) -> Outcome:
        hashes: set[bytes] = set()
        removed = 0
        for text in inputs.column("text"):
            digest = xxh3_128_digest(text.encode("utf-8"))
            removed += digest in hashes
            hashes.add(digest)
        return Outcome(inputs.megabytes, {"removed": removed})

    return run


def zstd(inputs: Inputs, setting: str) -> Run:
    """Unpack all texts. Setting: bytes for no more, station to pack them again too."""
    codec = pa.Codec("zstd", compression_level=ZSTD_LEVEL)
    texts = inputs.texts()
    data = memoryview(texts.buffer)[texts.offsets[0] : texts.offsets[-1]]
    pages = [data[first : first + PAGE_BYTES] for first in range(0, len(data), PAGE_BYTES)]
    packed = [(codec.compress(page), len(page)) for page in pages]

    def run(_: Path) -> Outcome:
        for page, size in packed:
            unpacked = codec.decompress(page, size)
            if setting == "station":
                codec.compress(unpacked)
        return Outcome(inputs.megabytes)

    return run


EXACT_PEERS: dict[str, SetUp] = {
    "polars": polars_exact,
    "duckdb": duckdb_exact,
    "pyarrow": pyarrow_exact,
    "text-dedup exact": text_dedup_exact,
    "zstd": zstd,
}
