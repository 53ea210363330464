"""Documents from the same page, by the address they came from: the first one is kept.

Two crawls of a page differ in a date or a comment, so their texts differ, and one page has many spellings of its
address. `normalise_url` gives all of them one form, and the forms are compared by a 128-bit hash, out of core:

    shards      0          1                  per shard: hash of every address, sorted by partition
    partition   all documents of one hash: the first stays, the others are repeats
    shards      which rows of a shard are repeats   (`load_repeats`)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import xxhash

from megalite.corpus.spans.partitioned import Partitions, read_partition, save_array
from megalite.corpus.spans.reading import Shard, read_field
from megalite.corpus.spans.settings import UrlDedupConfig, partitions_of, with_partitions
from megalite.errors import DataError
from megalite.progress import ProgressReporter
from megalite.stations.tasks import WORK_FOLDER, Report, Runner, Task, add_counts, run_tasks

KEYS_PHASE = "urls-keys"
REPEATS_PHASE = "urls-repeats"
ROWS_PHASE = "urls-rows"

URL_KEY = np.dtype([("low", np.uint64), ("high", np.uint64), ("shard", np.int32), ("row", np.int64)])
"""Hash of an address, and the document that came from it."""

ROW = np.dtype(np.int64)

ABSOLUTE = re.compile(r"([a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
"""How an address begins; what does not is taken to begin with the host."""

DEFAULT_PORTS = {"http": 80, "https": 443, "": 80}


def normalise_url(url: str, config: UrlDedupConfig) -> str:
    """One form for the spellings of an address.

    Left out are the scheme, the user, `www.`, the scheme's default port, slashes at the end of the path, the fragment,
    tracking parameters, and the order of the others. The host is in lower case; the path is not, since servers may
    tell its cases apart. What is no address (a broken port) is only stripped.

    Args:
        url: as the crawl spelled it.
        config: settings.
    """
    url = url.strip()
    try:
        parts = urlsplit(url if ABSOLUTE.match(url) else f"//{url}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return url
    host = host.rstrip(".").removeprefix("www.")
    if port is not None and port != DEFAULT_PORTS.get(parts.scheme):
        host = f"{host}:{port}"
    path = parts.path.rstrip("/")
    if config.ignore_query or not parts.query:
        return host + path
    tracking = _tracking(config.tracking_parameters)
    kept = sorted(item for item in parts.query.split("&") if item and not tracking.fullmatch(item.partition("=")[0]))
    return f"{host}{path}?{'&'.join(kept)}" if kept else host + path


def find_repeated_urls_in_shards(
    folder: Path, shards: Sequence[Shard], config: UrlDedupConfig, *, runner: Runner, progress: ProgressReporter
) -> list[Report]:
    """Which documents come from an address that an earlier one came from, as resumable tasks.

    Args:
        folder: the station's folder; `load_repeats` finds the result there.
        shards: files that `read_field` reads, in the order of the corpus.
        config: settings, their number of partitions filled in (`with_partitions`) by the size of the corpus.
        runner: where the tasks run.
        progress: told of the tasks done.

    Returns:
        A report for each shard: `repeats`.
    """
    config = with_partitions(config, 0)
    settings = config.model_dump(mode="json")
    tasks = [{"shard": shard, "settings": settings} for shard in shards]
    hashed = run_tasks(folder, KEYS_PHASE, hash_urls, tasks, runner=runner, progress=progress)
    if add_counts(hashed, "documents") and not add_counts(hashed, "addresses"):
        raise DataError(
            f"url_field={config.url_field!r}: none of {add_counts(hashed, 'documents'):,} documents has that in its "
            "metadata; carry it along where the documents are read: `keep_fields: [url]` of a source, or `clean "
            "--keep-field url`"
        )
    comparisons = [{"num_shards": len(shards)}] * partitions_of(config)
    run_tasks(folder, REPEATS_PHASE, compare_urls, comparisons, runner=runner, progress=progress)
    merges = [{"num_partitions": partitions_of(config)}] * len(shards)
    return run_tasks(folder, ROWS_PHASE, collect_rows, merges, runner=runner, progress=progress)


def load_repeats(folder: Path, shard: int) -> np.ndarray:
    """The rows of a shard that repeat an earlier document's address, int64, sorted."""
    return np.load(_work(folder, ROWS_PHASE) / f"{shard:05d}.npy")


def hash_urls(task: Task, number: int, folder: Path) -> Report:
    """Task: hash the addresses of one shard."""
    config = UrlDedupConfig.model_validate(task["settings"])
    parts, row, num_addresses = Partitions(URL_KEY, partitions_of(config)), 0, 0
    for urls in read_field(task["shard"], config.url_field):
        keys = _keys(urls, number, row, config)
        parts.add(keys, keys["low"])
        row += len(urls)
        num_addresses += len(keys)
    parts.save(_work(folder, KEYS_PHASE) / f"{number:05d}.rows")
    return {"documents": row, "addresses": num_addresses}


def compare_urls(task: Task, number: int, folder: Path) -> Report:
    """Task: find the repeated addresses of one partition; write them by shard."""
    work, num_shards = _work(folder, KEYS_PHASE), task["num_shards"]
    paths = [work / f"{shard:05d}.rows" for shard in range(num_shards)]
    repeats = _repeats(read_partition(paths, URL_KEY, number))
    by_shard = Partitions(ROW, num_shards)
    by_shard.add(repeats["row"], repeats["shard"].astype(np.uint64))
    by_shard.save(_work(folder, REPEATS_PHASE) / f"{number:05d}.rows")
    return {"repeats": len(repeats)}


def collect_rows(task: Task, number: int, folder: Path) -> Report:
    """Task: gather the repeated rows of one shard from all partitions."""
    work = _work(folder, REPEATS_PHASE)
    paths = [work / f"{partition:05d}.rows" for partition in range(task["num_partitions"])]
    rows = np.sort(read_partition(paths, ROW, number))
    save_array(_work(folder, ROWS_PHASE) / f"{number:05d}.npy", rows)
    return {"repeats": len(rows)}


def _keys(urls: Sequence[str | None], shard: int, first_row: int, config: UrlDedupConfig) -> np.ndarray:
    """URL_KEY of every document that has an address."""
    given = [(row, url) for row, url in enumerate(urls) if url and not url.isspace()]
    keys = np.empty(len(given), URL_KEY)
    digests = b"".join(xxhash.xxh3_128_digest(normalise_url(url, config).encode()) for _, url in given)
    halves = np.frombuffer(digests, ">u8").reshape(-1, 2)
    keys["high"], keys["low"] = halves[:, 0], halves[:, 1]
    keys["shard"], keys["row"] = shard, np.array([row for row, _ in given], np.int64) + first_row
    return keys


def _repeats(keys: np.ndarray) -> np.ndarray:
    """All but the first of the rows with one hash; they come in the order of the corpus."""
    order = np.lexsort((keys["high"], keys["low"]))  # stable
    keys = keys[order]
    same = (keys["low"][1:] == keys["low"][:-1]) & (keys["high"][1:] == keys["high"][:-1])
    return keys[1:][same]


@lru_cache
def _tracking(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One pattern for all names; one that matches nothing when there are none."""
    return re.compile("|".join(translate(pattern) for pattern in patterns) or r"(?!)", re.IGNORECASE)


def _work(folder: Path, phase: str) -> Path:
    return folder / WORK_FOLDER / phase
