"""The whole way, Parquet files to masks: against comparing all pairs, in batches, in parallel."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.near.phases import INDEX_FOLDER, MASKS_FOLDER
from megalite.corpus.near.settings import NearDedupConfig
from megalite.corpus.near.station import NearMask, default_partitions, find_near_duplicates, read_mask
from megalite.errors import DataError
from megalite.progress import NoProgress
from megalite.stations.runners import InProcess, LocalPool
from megalite.stations.tasks import WORK_FOLDER
from tests.corpus.near.truth import alike_pairs, components, family_corpus, write_shards
from tests.kit.data import all_bytes

SURE = NearDedupConfig(verify="jaccard", bands=256, rows=1)
"""Every pair at the threshold meets, but for one in .3^256, and each is checked exactly."""


def run(folder: Path, texts: list[str], config: NearDedupConfig, *, num_shards: int = 2, **options):
    """The report, and the masks of all shards end to end."""
    shards = write_shards(folder / "texts", texts, num_shards=num_shards)
    for name in ("scores", "sources"):
        if values := options.pop(name, None):
            for number, part in enumerate(np.array_split(np.array(values), num_shards)):
                shards[number][name] = str(folder / f"{name}-{number}.npy")
                np.save(shards[number][name], part)
    options = {"runner": InProcess(), "progress": NoProgress(), **options}
    report = find_near_duplicates(shards, folder / "out", config, **options)
    masks = [read_mask(folder / "out", number) for number in range(num_shards)]
    return report, NearMask(
        *(np.concatenate(arrays) for arrays in zip(*((m.keep, m.cluster) for m in masks), strict=True))
    )


def true_clusters(texts: list[str], threshold: float, ngram: int = 5) -> list[int]:
    """Of each document, the first of its cluster; -1 for one alone."""
    first = components(len(texts), alike_pairs(texts, ngram, threshold))
    sizes = np.bincount(first)
    return [root if sizes[root] > 1 else -1 for root in first]


small_texts = st.lists(
    st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), min_size=0, max_size=9).map(" ".join), min_size=1, max_size=12
)


@given(small_texts, st.sampled_from([0.4, 0.7, 1.0]), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_clusters_of_any_texts_equal_all_pairs(tmp_path_factory, texts, threshold, ngram, num_shards):
    """With a band for each value and the exact check, the clusters are those of the true similarities."""
    config = SURE.model_copy(update={"threshold": threshold, "ngram": ngram})
    num_shards = min(num_shards, len(texts))
    report, mask = run(tmp_path_factory.mktemp("run"), texts, config, num_shards=num_shards, num_partitions=3)
    clusters = true_clusters(texts, threshold, ngram)
    assert mask.cluster.tolist() == clusters
    assert mask.keep.tolist() == [cluster in (-1, number) for number, cluster in enumerate(clusters)]
    assert report.removed == len(texts) - sum(mask.keep)


def test_usual_bands_find_what_the_curve_promises(tmp_path):
    """With 32 bands of 8 and the exact check, no false pair joins clusters, and pairs from .8 on are found."""
    texts = family_corpus(80)
    _, mask = run(tmp_path, texts, NearDedupConfig(verify="jaccard"))
    label = np.where(mask.cluster < 0, np.arange(len(texts)), mask.cluster)
    at_threshold = components(len(texts), alike_pairs(texts, 5, 0.7))
    for number in range(len(texts)):
        assert at_threshold[label[number]] == at_threshold[number]
    sure_pairs = alike_pairs(texts, 5, 0.8)
    assert len(sure_pairs) > 40
    found = sum(label[a] == label[b] for a, b in sure_pairs)
    assert found / len(sure_pairs) >= 0.99


def test_signature_check_is_close_to_the_true_one(tmp_path):
    """The default check joins no pair below .7 less five standard errors, and finds those from .8 on."""
    texts = family_corpus(80)
    _, mask = run(tmp_path, texts, NearDedupConfig())
    label = np.where(mask.cluster < 0, np.arange(len(texts)), mask.cluster)
    widest = components(len(texts), alike_pairs(texts, 5, 0.7 - 5 * 0.029))
    assert all(widest[label[number]] == widest[number] for number in range(len(texts)))
    sure_pairs = alike_pairs(texts, 5, 0.8)
    assert sum(label[a] == label[b] for a, b in sure_pairs) / len(sure_pairs) >= 0.99


def test_no_check_takes_every_meeting(tmp_path):
    """Without a check pairs below the threshold are joined too, and nothing found with it is lost."""
    texts = family_corpus(80)
    config = NearDedupConfig(bands=128, rows=2)
    _, checked = run(tmp_path / "checked", texts, config)
    _, unchecked = run(tmp_path / "unchecked", texts, config.model_copy(update={"verify": "none"}))
    assert set(np.flatnonzero(~checked.keep)) < set(np.flatnonzero(~unchecked.keep))
    assert not list((tmp_path / "unchecked/out" / INDEX_FOLDER).glob("*.signatures.npy"))


@pytest.mark.parametrize("verify", ["signature", "jaccard", "none"])
def test_batches_keep_the_same_new_documents(tmp_path, verify):
    """Of each of three batches, compared with the indexes of those before, the same documents stay as if all data so
    far came at once."""
    texts = family_corpus(60, copies=6)
    config = NearDedupConfig(verify=verify)
    older = []
    for number, part in enumerate(np.array_split(np.arange(len(texts)), 3)):
        folder = tmp_path / f"batch-{number}"
        report, mask = run(folder, [texts[i] for i in part], config, older=older)
        _, whole = run(tmp_path / f"whole-{number}", texts[: part[-1] + 1], config, num_shards=3)
        assert mask.keep.tolist() == whole.keep[part].tolist()
        assert 0 < mask.keep.sum() < part.size
        assert report.documents == part.size
        # a removed document names an earlier one, by its number among all data so far
        assert (mask.cluster[~mask.keep] < part[~mask.keep]).all()
        older.append(folder / "out" / INDEX_FOLDER)


@pytest.mark.parametrize("keep", ["longest", "best"])
def test_earlier_data_wins_over_longer_and_better(tmp_path, keep):
    """Whatever the rule, a new document like an earlier one is removed."""
    text = family_corpus(1, copies=1)[0]
    config = NearDedupConfig(keep=keep)
    run(tmp_path / "old", [text], config, num_shards=1, scores=[0.0])
    _, mask = run(
        tmp_path / "new",
        [text + " more", "else"],
        config,
        scores=[9.0, 9.0],
        older=[tmp_path / "old/out" / INDEX_FOLDER],
    )
    assert mask.keep.tolist() == [False, True]
    assert mask.cluster.tolist() == [0, -1]


@pytest.mark.parametrize("keep", ["first", "longest", "best"])
def test_who_stays_follows_the_rule(tmp_path, keep):
    """Of each true cluster the first, longest or best stays, the earlier of equals."""
    texts = family_corpus(40)
    scores = np.random.default_rng(1).integers(0, 3, len(texts)).astype(float).tolist()
    _, mask = run(tmp_path, texts, SURE.model_copy(update={"keep": keep}), scores=scores)
    value = {"first": [0] * len(texts), "longest": [len(text.encode()) for text in texts], "best": scores}[keep]
    clusters = true_clusters(texts, 0.7)
    for number, cluster in enumerate(clusters):
        if cluster < 0:
            assert mask.keep[number]
            continue
        members = [i for i, other in enumerate(clusters) if other == cluster]
        winner = max(members, key=lambda i: (value[i], -i))
        assert mask.cluster[number] == winner
        assert mask.keep[number] == (number == winner)


def results(folder: Path) -> dict[str, bytes]:
    """Every byte that stays."""
    shutil.rmtree(folder / WORK_FOLDER)
    return all_bytes(folder)


def test_partitions_and_workers_change_no_byte(tmp_path):
    """1 or 7 partitions, one process or two, or another go after an interruption: the same files and report."""
    texts = family_corpus(60)
    config = NearDedupConfig()
    report, _ = run(tmp_path / "plain", texts, config, num_shards=3, num_partitions=1)
    expected = results(tmp_path / "plain/out")
    assert {Path(name).parts[0] for name in expected} == {INDEX_FOLDER, MASKS_FOLDER}

    other, _ = run(tmp_path / "seven", texts, config, num_shards=3, num_partitions=7)
    assert other == report
    with LocalPool(2) as pool:
        other, _ = run(tmp_path / "pool", texts, config, num_shards=3, num_partitions=7, runner=pool)
    assert other == report
    (tmp_path / "pool/out" / WORK_FOLDER / "mask/00001.json").unlink()
    (tmp_path / "pool/out" / WORK_FOLDER / "match-7/00003.json").unlink()
    other, _ = run(tmp_path / "pool", texts, config, num_shards=3, num_partitions=7)
    assert other == report
    assert results(tmp_path / "seven/out") == expected
    assert results(tmp_path / "pool/out") == expected


def test_many_partitions_need_few_open_files(tmp_path):
    """200 partitions and 20 shards with 24 files open at most."""
    texts = family_corpus(30)
    find_with = {"num_shards": 20, "config": NearDedupConfig()}
    _, expected = run(tmp_path / "few", texts, **find_with)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, 24, None)), limits[1]))
    try:
        _, mask = run(tmp_path / "many", texts, num_partitions=200, **find_with)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    np.testing.assert_array_equal(mask.keep, expected.keep)


def test_report_counts_what_the_masks_say(tmp_path):
    """Counts, sizes, sources and examples follow from the masks."""
    texts = [*family_corpus(40), "!!! ... ???", "!!! ... ???"]
    sources = [number % 3 for number in range(len(texts))]
    names = ("books", "web", "code")
    report, mask = run(tmp_path, texts, NearDedupConfig(), sources=sources, source_names=names)
    removed = np.flatnonzero(~mask.keep)
    sizes = [int((mask.cluster == root).sum()) for root in set(mask.cluster.tolist()) - {-1}]
    assert report.documents == len(texts)
    assert report.kept == mask.keep.sum()
    assert report.text_bytes == sum(len(text.encode()) for text in texts)
    assert report.kept_bytes == sum(len(text.encode()) for text, keep in zip(texts, mask.keep, strict=True) if keep)
    assert report.without_words == 2
    assert mask.keep[-2:].all()
    assert (report.clusters, report.largest_cluster) == (len(sizes), max(sizes))
    assert sum(report.cluster_sizes.values()) == len(sizes)
    counts = np.bincount(np.array(sources)[removed], minlength=3).tolist()
    assert report.removed_by_source == dict(zip(names, counts, strict=True))
    for example in report.examples:
        numbers = [int(name.removeprefix("document-")) for name in example]
        assert len(numbers) == min(8, int((mask.cluster == mask.cluster[numbers[0]]).sum()))
        assert len(set(mask.cluster[numbers].tolist())) == 1


def test_examples_say_what_is_earlier_data(tmp_path):
    """An index has no ids; its documents are named as such, and do not count as documents."""
    text = family_corpus(1, copies=1)[0]
    run(tmp_path / "old", [text, "other words entirely"], NearDedupConfig())
    report, _ = run(tmp_path / "new", [text, text], NearDedupConfig(), older=[tmp_path / "old/out" / INDEX_FOLDER])
    assert report.examples == [["earlier data", "document-0", "document-1"]]
    assert (report.documents, report.kept, report.largest_cluster, report.clusters) == (2, 0, 3, 1)


def test_empty_shards_and_corpora(tmp_path):
    """No documents, or none in a shard, is no error."""
    report, mask = run(tmp_path / "some", ["a text of six words here"], NearDedupConfig(), num_shards=3)
    assert (report.documents, mask.keep.tolist(), report.examples) == (1, [True], [])
    report = find_near_duplicates([], tmp_path / "none", NearDedupConfig(), runner=InProcess(), progress=NoProgress())
    assert (report.documents, report.kept, report.clusters) == (0, 0, 0)


def test_partitions_follow_the_documents():
    """A billion documents at 32 bands are cut so that no partition has more than 2^23 entries."""
    assert default_partitions(1000, NearDedupConfig()) == 8
    assert default_partitions(10**9, NearDedupConfig()) == 3815


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"seed": 1}, "seed=0, and seed=1"), ({"ngram": 4}, "ngram=5"), ({"verify": "jaccard"}, "verify=signature")],
)
def test_an_index_of_other_settings_is_refused(tmp_path, changes, message):
    """Signatures of other settings cannot be compared, and the error says which one differs."""
    run(tmp_path / "old", ["some words"], NearDedupConfig(), num_shards=1)
    with pytest.raises(DataError, match=message):
        run(tmp_path / "new", ["some words"], NearDedupConfig(**changes), older=[tmp_path / "old/out" / INDEX_FOLDER])
    with pytest.raises(DataError, match=r"index\.json is missing"):
        run(tmp_path / "newer", ["some words"], NearDedupConfig(), older=[tmp_path / "nowhere"])


def test_missing_or_misfit_arrays_are_refused(tmp_path):
    """Scores that are not there or not one a document, codes without a name, and files without text."""
    texts = [text for text in family_corpus(3, copies=2) for _ in range(2)]
    best = NearDedupConfig(keep="best")
    with pytest.raises(DataError, match="without scores"):
        run(tmp_path / "a", texts, best)
    with pytest.raises(DataError, match="one score for each"):
        run(tmp_path / "b", texts, best, scores=[1.0] * (len(texts) - 1))
    with pytest.raises(DataError, match="source code 4 has no name; there are 2"):
        run(tmp_path / "c", texts, NearDedupConfig(), sources=[4] * len(texts), source_names=("a", "b"))
    shards = write_shards(tmp_path / "texts", texts)
    for number, table in enumerate([pa.table({"body": ["a"]}), pa.table({"text": ["a", None]})]):
        pq.write_table(table, shards[0]["path"])
        with pytest.raises(DataError, match=("no column 'text', only body", "1 texts are null")[number]):
            find_near_duplicates(
                shards, tmp_path / f"d{number}", NearDedupConfig(), runner=InProcess(), progress=NoProgress()
            )


def test_damaged_indexes_are_refused(tmp_path):
    """Arrays that are empty or cut, and an index.json that is broken or lacks a key."""
    run(tmp_path / "old", ["some words"], NearDedupConfig())
    older = tmp_path / "old/out" / INDEX_FOLDER
    for name in ("index.json", "00000.band_keys.npy"):
        path = older / name
        whole = path.read_bytes()
        for number, content in enumerate((b"", whole[:-2], b"{}")):
            path.write_bytes(content)
            with pytest.raises(DataError, match=rf"{name}: damaged.*make the index anew"):
                run(tmp_path / f"new-{name}-{number}", ["some words"], NearDedupConfig(), older=[older])
        path.write_bytes(whole)
