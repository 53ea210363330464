"""Settings of the stations that remove parts of documents, or documents because of a part."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, PositiveInt

from megalite.config.schema import Section

MAX_PARTITIONS = 65_536

NumPartitions = Annotated[int | None, Field(ge=1, le=MAX_PARTITIONS)]
"""Parts of a shuffle; null derives them from the corpus, see `with_partitions`."""

FEWEST_PARTITIONS = 16

SMALL_PARTITION_BYTES, MANY_PARTITIONS = 8 * 10**6, 1024
LARGE_PARTITION_BYTES = 256 * 10**6
"""Text in a part: few megabytes as long as there are not too many parts, since each part is a read of every shard."""


class SubstringConfig(Section):
    """Passages that stood earlier in the corpus (Lee et al. 2022), in the order of the documents."""

    min_bytes: int = Field(100, ge=8)
    """Shortest passage that counts, in bytes of UTF-8. 50 tokens of English are about 200."""
    action: Literal["cut", "drop"] = "cut"
    """`cut` removes the repeated passages; `drop` removes whole documents only, by `max_repeated_share`."""
    max_repeated_share: float = Field(0.5, ge=0.0, le=1.0)
    """A document of whose bytes a larger share is repeated is removed whole, whatever the action; 1 keeps all."""
    num_partitions: NumPartitions = None
    """Parts in which passages are compared; null takes as many as keep a part between 8 and 256 MB of text. More parts
    take less memory and never change the result: a part needs about 1 byte for each byte of text in the corpus, and 5
    for each repeated byte, divided by this number."""


class LineDedupConfig(Section):
    """Lines that stand in many documents: menus, notices, "share this page". All their occurrences are removed."""

    min_occurrences: int = Field(10, ge=2)
    """A line is removed when at least this many documents hold it; twice in one document counts once."""
    min_chars: PositiveInt = 10
    """Shorter lines stay, in bytes without the blanks around: a closing brace is no boilerplate."""
    fold_digits: bool = False
    """Any digit equals any other, so that "page 3 of 7" is the same line as "page 4 of 7"."""
    scope: Literal["corpus", "shard"] = "corpus"
    """Count over the whole corpus, or over each shard by itself (as CCNet does), which needs one pass less."""
    num_partitions: NumPartitions = None
    """Parts in which lines are counted; null derives them from the corpus. More parts take less memory and never
    change the result."""


class UrlDedupConfig(Section):
    """Documents from the same page: the first one is kept."""

    url_field: str = "url"
    """Field that holds the address; the sources must keep it (`keep_fields: [url]`). Documents without one are all
    kept."""
    ignore_query: bool = False
    """Leave out everything behind the `?`. Merges pages that differ in `?id=` too."""
    tracking_parameters: tuple[str, ...] = (
        "utm_*",
        "fbclid",
        "gclid",
        "dclid",
        "msclkid",
        "mc_cid",
        "mc_eid",
        "igshid",
        "yclid",
        "_ga",
        "ref_src",
    )
    """Parameters of the query that name the visitor, not the page; `*` stands for any ending."""
    num_partitions: NumPartitions = None
    """Parts in which addresses are compared; null derives them from the corpus. More parts take less memory and never
    change the result."""


class DecontaminateConfig(Section):
    """Evaluation sets that must not be trained on: documents that share a run of words with an example of one."""

    paths: tuple[Path, ...] = Field(min_length=1)
    """Files of the evaluation sets: .jsonl, .parquet, .arrow, plain text, also .gz or .zst."""
    text_field: str = "text"
    """Field or column of these files that holds the text of an example."""
    ngram: int = Field(13, ge=2, le=100)
    """Words in a run that counts as a match (13 in Brown et al. 2020). Examples with fewer words cannot be found; their
    number is reported."""
    min_overlap: float = Field(0.0, ge=0.0, le=1.0)
    """Least share of a document's runs of words that must match; at 0 a single match suffices. The share is small when
    a long document quotes one example, so raise it with care."""
    action: Literal["drop", "cut"] = "drop"
    """`drop` removes the document; `cut` only the matching runs of words."""


ShuffleConfig = TypeVar("ShuffleConfig", SubstringConfig, LineDedupConfig, UrlDedupConfig)


def with_partitions(config: ShuffleConfig, num_bytes: float) -> ShuffleConfig:
    """The settings with the number of partitions filled in.

    Args:
        config: settings, which may have one.
        num_bytes: text of the corpus; equal at every start of a station, or it could not go on where it was.
    """
    return config.model_copy(update={"num_partitions": partitions_of(config, num_bytes)})


def partitions_of(config: ShuffleConfig, num_bytes: float = 0.0) -> int:
    """The number of partitions, given or derived from the text's size."""
    if config.num_partitions is not None:
        return config.num_partitions
    few = min(MANY_PARTITIONS, math.ceil(num_bytes / SMALL_PARTITION_BYTES))
    count = max(FEWEST_PARTITIONS, few, math.ceil(num_bytes / LARGE_PARTITION_BYTES))
    return min(count, MAX_PARTITIONS)
