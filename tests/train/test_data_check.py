"""`data.verify: true`: ranks share the reading of all data; damage that no look at opening finds ends all of them."""

from __future__ import annotations

import json

from megalite.config.load import load_config
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE
from megalite.stations.hashes import NUM_SPOTS, SPOT_BYTES
from tests.kit.data import random_documents, write_packed_folder
from tests.kit.runs import write_run
from tests.train.forked import launch


def test_damage_between_the_places_of_the_first_look(tmp_path):
    """Two ranks, with and without; every rank names the file, and nothing was trained or written of a run."""
    documents = random_documents(400, longest=6000)
    write_packed_folder(tmp_path / "packed", documents, seq_len=32)
    path = tmp_path / "packed-tokens" / "tokens.bin"
    data = bytearray(path.read_bytes())
    gap = (len(data) - SPOT_BYTES) // (NUM_SPOTS - 1)
    assert gap > SPOT_BYTES + 2
    at = (SPOT_BYTES + gap) // 2 & ~1  # between the first place and the second
    data[at] ^= 1
    path.write_bytes(bytes(data))

    config = load_config(write_run(tmp_path, data={"verify": True}))
    assert launch(config, 2) == EXIT_BAD_INPUT
    logs = sorted((config.run.dir / "logs").iterdir())
    words = [json.loads(path.read_text()) for path in logs if path.suffix == ".json"]
    assert len(words) == 2
    for word in words:
        assert word["is_user_error"]
        assert "1 problem found by verifying the data" in word["message"]
        assert "tokens.bin: its contents have changed" in word["message"]
    assert not (config.run.dir / "config.yaml").exists()
    assert not (config.run.dir / "attempts").exists()

    data[at] ^= 1
    path.write_bytes(bytes(data))
    assert launch(config, 2) == EXIT_DONE
    events = [json.loads(line) for line in (config.run.dir / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "data_verified"]
    assert event["megabytes"] > 2 * 1.2
