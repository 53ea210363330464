"""Who holds a run up: told from heartbeats."""

from __future__ import annotations

import os
import time

import pytest

from megalite.train.heartbeat import BEAT_BYTES, NUM_PRODUCTS, START, Beat, Heartbeat, beat_path, read_beats
from megalite.train.in_place import clock_of
from megalite.train.watch import Patience, find_stragglers, find_trouble

PATIENCE = Patience(beat=10, start=100, step=30)


def beat(step: int, *, time: float = 1000.0, phase: str = "train", since: float = 999.0) -> Beat:
    return Beat(time, step, phase, since)


def trouble(beats: dict[int, Beat], world_size: int, now: float = 1000.0):
    found = find_trouble(beats, world_size, started=900.0, now=now, patience=PATIENCE)
    return found and (found.ranks, found.why)


def test_all_is_well():
    """Fresh beats and a phase entered a second ago; ranks that have not begun are waited for."""
    assert trouble({0: beat(5), 1: beat(4)}, 2) is None
    assert trouble({0: beat(START, phase="start", since=950.0)}, 3) is None


def test_a_frozen_rank_is_named():
    """The only one without a beat, whatever the others wait for."""
    beats = {0: beat(7, since=980.0), 1: beat(7, time=985.0, since=984.0), 2: beat(7, since=980.0)}
    assert trouble(beats, 3) == ((1,), "no heartbeat for 15 s, last in step 7, train")


def test_the_rank_behind_is_named():
    """All beat and none moves on: the one in the earliest phase of the earliest step holds the others up."""
    beats = {0: beat(7, since=960.0), 1: beat(7, phase="data", since=950.0), 2: beat(7, since=960.0)}
    assert trouble(beats, 3) == ((1,), "no progress for 40 s: step 7, data")
    assert trouble({0: beat(8, since=960.0), 1: beat(7, since=965.0)}, 2) == (
        (1,),
        "no progress for 35 s: step 7, train",
    )
    assert trouble({rank: beat(7, since=960.0) for rank in range(2)}, 2)[1].endswith("(all ranks)")


def test_the_start_takes_longer_than_a_step():
    """Compilation and a large checkpoint are no hang; silence for longer than that is."""
    beats = {0: beat(START, phase="start", since=910.0), 1: beat(START, phase="start", since=920.0)}
    assert trouble(beats, 2) is None
    late = {rank: Beat(1025.0, START, "start", each.since) for rank, each in beats.items()}
    assert trouble(late, 2, now=1025.0) == ((0, 1), "no progress for 105 s: the start (all ranks)")
    assert trouble({0: beat(3, time=1004.0)}, 2, now=1005.0) == ((1,), "no sign of life in the 105 s since the start")


def test_a_heart_beats(tmp_path):
    """A file each second by the file system's clock; what is said and since when; no path, no file."""
    heart = Heartbeat(beat_path(tmp_path, 3))
    first = read_beats(tmp_path)[3]
    assert (first.step, first.phase) == (START, "start")
    heart.enter("train", 7)
    deadline = time.monotonic() + 10
    while read_beats(tmp_path)[3].step != 7:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = read_beats(tmp_path)[3]
    assert found.phase == "train"
    assert abs(found.time - clock_of(tmp_path)) < 5
    assert 0 <= found.time - found.since < 5
    heart.stop()
    os.truncate(beat_path(tmp_path, 3), 5)
    assert read_beats(tmp_path) == {}
    Heartbeat().enter("train", 1)


def test_a_beat_needs_no_room(tmp_path, monkeypatch):
    """The file keeps its place and its length, whatever is said: on a full disk a heart still beats."""
    path = beat_path(tmp_path, 0)
    heart = Heartbeat(path)
    file = path.stat().st_ino
    heart.enter("validate", 10**9)
    heart.stop()
    assert (path.stat().st_ino, path.stat().st_size) == (file, BEAT_BYTES)
    assert read_beats(tmp_path)[0].step == 10**9


def test_a_slow_rank_is_named():
    """The one whose products take long, with figures; ranks that have not measured yet, or alone, are not judged."""
    seconds = {0: 0.0021, 1: 0.0020, 2: 0.0042, 3: 0.0}
    beats = {rank: Beat(1000.0, 5, "train", 999.0, 0.5, taken) for rank, taken in seconds.items()}
    assert find_stragglers(beats) == {2: "4.2 ms for a product that takes the median rank 2.1 ms"}
    assert find_stragglers({0: beats[0], 3: beats[3]}) == {}
    assert find_stragglers({0: beats[0], 1: beats[1]}) == {}


@pytest.mark.parametrize("num_products", [0, NUM_PRODUCTS - 1, NUM_PRODUCTS, NUM_PRODUCTS + 1])
def test_the_shortest_of_the_last_products_is_told(tmp_path, num_products):
    """Once there are enough of them, and never of more than the last ones: one product may have been held up by chance.
    The first is the shortest, and is forgotten when a further one comes."""
    heart = Heartbeat(beat_path(tmp_path, 0))
    for number in range(num_products):
        heart.note_product(1.0 + number)
    heart.stop()
    told = {NUM_PRODUCTS: 1.0, NUM_PRODUCTS + 1: 2.0}.get(num_products, 0.0)
    assert read_beats(tmp_path)[0].product_seconds == told
