"""What the planner says that replicas send, against the collectives of real steps, by the size of their groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.engine.fsdp2 import rounded
from megalite.engine.native import buckets, replication
from megalite.parallel import messages
from megalite.planner import replica_seconds
from megalite.planner.holdings import parameters_by_stage
from megalite.planner.links import rate_over
from megalite.planner.machines import load_machine
from megalite.planner.replica_traffic import bytes_by_stage, replica_bytes
from megalite.planner.traffic import traffic_by_stage
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

MODEL = {
    "hidden_size": 512,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_hidden_size": 256,
    "vocab_size": 256,
}
"""Every weight, and a half of it, is whole blocks: nothing stands behind them."""

SMALL_NUMBERS = 64
"""A step's loss, norm and tokens."""

NAMES = ("all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_reduce")
SHARES = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "all_reduce": 2.0}
"""Times (r - 1) / r of the largest tensor is what a ring sends."""

FSDP2 = {"zero_stage": 3, "engine": "fsdp2"}

CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ZeRO 1": {},
        "8 bits": {"precision": {"reduce_bits": 8}},
        "4 bits, ZeRO 0": {"precision": {"reduce_bits": 4}, "parallel": {"zero_stage": 0}},
        "4 bits, bf16 sums, ZeRO 0": {
            "precision": {"dtype": "bf16", "reduce_bits": 4, "reduce_dtype": "bf16"},
            "parallel": {"zero_stage": 0},
        },
        "4 bits, weights": {"precision": {"reduce_bits": 4, "gather_bits": 8}},
        "FSDP2": {"parallel": FSDP2},
        "FSDP2, adapters": {"parallel": FSDP2, "model": {**MODEL, "lora": {"rank": 16, "alpha": 16}}},
        "FSDP2, both": {"parallel": FSDP2, "precision": {"reduce_bits": 8, "gather_bits": 8}},
    },
    4: {
        "FSDP2, hpZ": {"parallel": {"hpz_size": 2, **FSDP2}},
        "two hops": {"parallel": {"reduce_within": 2}, "precision": {"reduce_bits": 8}},
        "FSDP2, copies": {"parallel": {"dp_replicate": 2, **FSDP2}},
    },
}


class Count:
    """Bytes that this rank sends, by the size of the group, through every door that engines use."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        doors = [(replication, "fill_reduce_scatter"), (messages, "fill_all_gather"), (rounded, "fill_all_gather")]
        doors += [(dist, name) for name in NAMES if hasattr(dist, name)]
        for module, name in doors:
            setattr(module, name, self._counted(name, getattr(module, name)))

    def _counted(self, name: str, function: Any) -> Any:
        share = next(share for part, share in SHARES.items() if part in name)

        def call(*args: Any, group: Any = None, **options: Any) -> Any:
            tensors = [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor)]
            largest, size = max(tensors, key=lambda each: each.nbytes), dist.get_world_size(group)
            if largest.numel() > SMALL_NUMBERS:
                self.sent[size] += round(share * (size - 1) / size * largest.nbytes)
            return function(*args, group=group, **options)

        return call


def config_of(world_size: int, sections: dict[str, Any]) -> Any:
    return tiny_config(**{"model": MODEL, **sections, "parallel": {"dp": world_size, **sections.get("parallel", {})}})


def sent(world_size: int) -> dict[str, tuple[Counter[int], list[tuple[float, float]]]]:
    """Bytes of a step, and its curve, by case."""
    count, found = Count(), {}
    for name, sections in CASES[world_size].items():
        rank = start_rank(config_of(world_size, sections))
        rank.engine.held_weights()
        before = count.sent.copy()
        curve = rank.train(0, 1)
        rank.engine.held_weights()
        found[name] = (count.sent - before, curve)
    return found


def test_bytes_over_replicas():
    """To the byte, with two micro-batches a step where there are two ranks; of hpZ a second gathering stays
    among neighbours."""
    for world_size, cases in CASES.items():
        for found in run_ranks(sent, world_size, world_size):
            for name, sections in cases.items():
                config = config_of(world_size, sections)
                plan = make_plan(config, world_size)
                (planned,) = bytes_by_stage(config, plan)
                if name == "two hops":  # equal runs of whole blocks for four
                    (numbers,) = parameters_by_stage(plan)
                    planned = replica_bytes(config, plan, *(2 * [-(-numbers // 1024) * 1024]))
                count = found[name][0]
                assert sum(count.values()) == planned.total, f"{name}: {count}, {planned}"
                assert traffic_by_stage(config, plan)[0].dp == pytest.approx(planned.total, rel=1e-3)
                if "hpz_size" in sections.get("parallel", {}):
                    assert count[2] == planned.near > 0
                if name == "two hops":  # 2 of 4 in each group, and all of those within a node
                    assert planned.reduced_near == 2 * planned.reduced > 0


def test_messages_are_as_large_as_the_engines_buckets():
    assert replica_seconds.BUCKET_NUMBERS == buckets.BUCKET_NUMBERS


def test_replicas_that_are_no_whole_number_to_a_node():
    """Three a stage, eight a node: some stages' replicas are in two, and what those send goes over the network."""
    h100 = load_machine("h100-sxm")
    config = Config(model={**MODEL, "num_layers": 8}, parallel={"pp": 8, "dp": 3}, batch={"global_batch_size": 24})
    plan, sent = make_plan(config, 24), replica_seconds.ReplicaBytes(reduced=1e9, gathered=2e9)
    rate = rate_over(plan, h100, "dp")
    assert rate == pytest.approx(3 * h100.network * h100.constants.links)
    assert replica_seconds._seconds_of(sent, config, plan, h100) == (1e9 / rate, 2e9 / rate)
