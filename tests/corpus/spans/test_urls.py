"""Documents from one page: spellings of an address become one, and the first document is kept."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megalite.corpus.spans.settings import UrlDedupConfig
from megalite.corpus.spans.urls import find_repeated_urls_in_shards, load_repeats, normalise_url
from megalite.progress import NoProgress
from tests.corpus.spans.kit import ON_THE_SPOT, write_shards

CONFIG = UrlDedupConfig()

PAGE = "example.org/A/page?id=3&lang=en"

SPELLINGS = (
    "https://example.org/A/page?id=3&lang=en",
    "http://www.example.org:80/A/page?id=3&lang=en",
    "HTTPS://WWW.Example.ORG:443/A/page/?lang=en&id=3#top",
    "https://user:secret@example.org./A/page?utm_source=x&id=3&UTM_Medium=y&lang=en&fbclid=1",
    "  //example.org/A/page?id=3&&lang=en ",
    "www.example.org/A/page?id=3&lang=en",
)

LINK_IN_QUERY = "example.org/to?url=http://other.org/page"

OTHERS = (
    "https://example.org/a/page?id=3&lang=en",
    "https://example.org/A/page?id=4&lang=en",
    "https://example.org:8443/A/page?id=3&lang=en",
    "http://example.org:443/A/page?id=3&lang=en",
    "https://sub.example.org/A/page?id=3&lang=en",
    "https://example.org/A?id=3&lang=en",
    "https://example.org/A/page",
    "https://example.org:port/A/page?id=3&lang=en",
)


@pytest.mark.parametrize("url", SPELLINGS)
def test_spellings_become_one(url):
    """Scheme, user, www., case of the host, default port, slash, fragment, tracking and order do not matter."""
    assert normalise_url(url, CONFIG) == PAGE


def test_other_pages_stay_apart():
    """What may name another page keeps its own form, and so does an address inside an address."""
    assert normalise_url(LINK_IN_QUERY, CONFIG) == normalise_url(f"https://{LINK_IN_QUERY}", CONFIG) == LINK_IN_QUERY
    assert len({normalise_url(url, CONFIG) for url in (*OTHERS, PAGE)}) == len(OTHERS) + 1


def test_settings():
    """The query can be left out whole, and the list of tracking parameters is the user's."""
    assert normalise_url(SPELLINGS[0], UrlDedupConfig(ignore_query=True)) == "example.org/A/page"
    assert normalise_url("a.org/?utm_x=1&id=2", UrlDedupConfig(tracking_parameters=("id",))) == "a.org?utm_x=1"
    assert normalise_url("a.org/?id=2", UrlDedupConfig(tracking_parameters=())) == "a.org?id=2"


def search_by_hand(urls):
    """Whether the normal form of each address stood before it."""
    seen, repeats = set(), []
    for url in urls:
        form = normalise_url(url, CONFIG) if url and not url.isspace() else ""
        repeats.append(bool(form) and form in seen)
        seen.add(form)
    return repeats


def search(folder, urls, *, num_shards, num_partitions):
    """The same by the tasks; their reports add up to it."""
    shards = write_shards(folder / "in", [""] * len(urls), num_shards=num_shards, rows=9, urls=urls)
    config = UrlDedupConfig(num_partitions=num_partitions)
    reports = find_repeated_urls_in_shards(folder / "out", shards, config, runner=ON_THE_SPOT, progress=NoProgress())
    found = np.zeros(len(urls), bool)
    for number, part in enumerate(np.array_split(np.arange(len(urls)), num_shards)):
        found[part[load_repeats(folder / "out", number)]] = True
    assert sum(report["repeats"] for report in reports) == np.count_nonzero(found)
    return found.tolist()


def test_first_is_kept(tmp_path):
    """Every spelling but the first is a repeat; documents without an address never are."""
    urls = [None, SPELLINGS[1], "", *SPELLINGS, None, *OTHERS, "  "]
    expected = search_by_hand(urls)
    assert sum(expected) == len(SPELLINGS)  # all of them repeat the one in front
    assert search(tmp_path, urls, num_shards=1, num_partitions=1) == expected


@pytest.mark.parametrize(("num_shards", "num_partitions"), [(1, 1), (4, 7)])
def test_files_and_partitions_change_nothing(tmp_path, num_shards, num_partitions):
    """Files and partitions do not change which documents are repeats."""
    rng = random.Random(3)
    urls = [rng.choice([None, f"https://site{rng.randrange(40)}.org/{rng.randrange(3)}/"]) for _ in range(200)]
    assert search(tmp_path, urls, num_shards=num_shards, num_partitions=num_partitions) == search_by_hand(urls)
