"""Derived numbers, against figures computed by hand."""

from __future__ import annotations

import itertools
import json

import pytest

from megalite.architecture.costs import flops_per_token
from megalite.architecture.weights import vocab_rows_per_rank
from megalite.config.fill import fill_model
from megalite.config.length import derive_steps
from megalite.config.plan import RunPlan, compile_pays, default_world_size, fill_stages, make_plan, split_blocks
from megalite.config.schema import BatchConfig, Config, ModelConfig
from megalite.errors import ConfigError
from megalite.parallel.schedules.kinds import find_placement

W1 = {
    "hidden_size": 384,
    "num_layers": 6,
    "num_heads": 6,
    "ffn_hidden_size": 1024,
    "vocab_size": 32000,
    "tie_embeddings": True,
}
"""The workload of the CPU benchmarks."""


def plan_of(world_size: int = 1, **sections: dict) -> RunPlan:
    model = {**W1, **sections.pop("model", {})}
    return make_plan(Config(**{"train": {"steps": 10}, "model": model, **sections}), world_size)


class TestFlops:
    @pytest.mark.parametrize(("vocab_size", "expected"), [(32000, 144.5e6), (8192, 89.7e6)])
    def test_benchmark_workload(self, vocab_size: int, expected: float):
        """6 x (6 x (4 x 384 x 384 + 3 x 384 x 1024) + vocabulary x 384) + 12 x 6 x 384 x 256."""
        plan = plan_of(model={"vocab_size": vocab_size}, batch={"seq_len": 512})
        assert plan.flops_per_token == pytest.approx(expected, rel=1e-3)

    def test_matches_the_palm_convention(self):
        """Without attention and vocabulary, six a weight (Chowdhery et al. 2022, appendix B)."""
        model = fill_model(ModelConfig(**{**W1, "vocab_size": 1}), BatchConfig(seq_len=1))
        matrices = 6 * (4 * 384 * 384 + 3 * 384 * 1024) + 384
        assert flops_per_token(model, 1) == 6 * matrices + 12 * 6 * 384 * 0.5

    def test_what_is_frozen_has_no_gradients(self):
        """Two a weight of blocks that no gradient goes back to, four of others that are frozen."""
        whole, matrices, attention = plan_of(), 4 * 384 * 384 + 3 * 384 * 1024, 2 * 384 * 256.0
        groups = [{"match": ["embedding.*", "blocks.[01].*", "blocks.3.*"], "frozen": True}]
        found = plan_of(optimizer={"groups": groups})
        head = plan_of().model.vocab_size * 384  # the embedding's own matrix
        saved = 2 * (4 * matrices + 4 * attention) + 2 * matrices + 2 * head
        assert whole.flops_per_token - found.flops_per_token == pytest.approx(saved)

    def test_window_bounds_attention(self):
        """A window of w tokens sees (w + 1) / 2 on the ramp and w beyond it: on average w - w^2 / 2s."""
        model = fill_model(ModelConfig(**W1, sliding_window=128), BatchConfig(seq_len=512))
        whole = fill_model(ModelConfig(**W1), BatchConfig(seq_len=512))
        saved = 12 * 6 * 384 * (256 - (128 - 128**2 / 1024))
        assert flops_per_token(whole, 512) - flops_per_token(model, 512) == pytest.approx(saved)


class TestLayout:
    @pytest.mark.parametrize(
        ("world_size", "parallel", "dp"),
        [(1, {}, 1), (8, {}, 8), (8, {"tp": 2}, 4), (8, {"tp": 2, "pp": 2}, 2), (8, {"tp": 2, "dp": 4}, 4)],
    )
    def test_dp(self, world_size: int, parallel: dict, dp: int):
        plan = plan_of(world_size, parallel=parallel)
        assert plan.dp == dp
        assert plan.pp * plan.dp * plan.cp * plan.tp == world_size

    @pytest.mark.parametrize(("parallel", "expected"), [({}, 1), ({"tp": 2, "pp": 3}, 6), ({"tp": 2, "dp": 4}, 8)])
    def test_default_world_size(self, parallel: dict, expected: int):
        assert default_world_size(Config(parallel=parallel)) == expected

    def test_accumulation(self):
        """48 sequences a step = 2 dp ranks x 3 in a micro-batch x 8 of them."""
        plan = plan_of(2, batch={"micro_batch_size": 3, "global_batch_size": 48, "seq_len": 100})
        assert plan.grad_accum_steps == 8
        assert plan.tokens_per_step == 4800

    @pytest.mark.parametrize(
        ("num_layers", "pp", "head_cost", "expected"),
        [
            (4, 1, 9.0, [4]),
            (4, 4, 0.5, [1, 1, 1, 1]),
            (7, 3, 0.1, [3, 2, 2]),
            (80, 4, 0.3, [20, 20, 20, 20]),
            (32, 4, 2.4, [9, 9, 8, 6]),  # 8 each would make the last stage 10.4
            (6, 2, 4.7, [5, 1]),
            (6, 2, 30.0, [6, 0]),  # a head that outweighs all blocks stands alone
        ],
    )
    def test_split_blocks(self, num_layers: int, pp: int, head_cost: float, expected: list[int]):
        assert [stop - first for first, stop in split_blocks((1.0,) * num_layers, pp, head_cost)] == expected

    @pytest.mark.parametrize("head_cost", [0.0, 0.7, 3.0, 100.0])
    @pytest.mark.parametrize("num_layers", range(1, 10))
    def test_split_is_the_best(self, num_layers: int, head_cost: float):
        """No block is lost or doubled, and no other way to cut has a faster slowest stage."""
        for pp in range(1, num_layers + 1):
            bounds = split_blocks((1.0,) * num_layers, pp, head_cost)
            assert [index for first, stop in bounds for index in range(first, stop)] == list(range(num_layers))
            sizes = [stop - first for first, stop in bounds]
            assert min(sizes[:-1], default=1) >= 1
            ways = (
                (*others, num_layers - sum(others))
                for others in itertools.product(range(1, num_layers + 1), repeat=min(pp - 1, 3))
                if sum(others) <= num_layers
            )
            if pp <= 4:
                assert max(*sizes[:-1], sizes[-1] + head_cost, 0) == min(
                    max(*way[:-1], way[-1] + head_cost, 0) for way in ways
                )

    @pytest.mark.parametrize("head_cost", [0.0, 2.5, 40.0])
    def test_split_of_unlike_blocks_is_the_best(self, head_cost: float):
        """As where some have a window and some have not: against every way to cut."""
        costs = (3.0, 1.0, 1.0, 7.0, 1.0, 1.0, 3.0, 1.0)
        for pp in (2, 3, 4, 8):
            bounds = split_blocks(costs, pp, head_cost)
            assert [index for first, stop in bounds for index in range(first, stop)] == list(range(len(costs)))
            assert all(first < stop for first, stop in bounds[:-1])
            slowest = [sum(costs[first:stop]) for first, stop in bounds]
            ways = (
                [sum(costs[first:stop]) for first, stop in itertools.pairwise((0, *stops, len(costs)))]
                for stops in itertools.combinations(range(1, len(costs) + 1), pp - 1)
            )
            best = min(max(*way[:-1], way[-1] + head_cost) for way in ways)
            assert max(*slowest[:-1], slowest[-1] + head_cost) == pytest.approx(best)

    @pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
    @pytest.mark.parametrize("head_cost", [2.0, 6.5, 40.0])
    def test_a_heavy_head_leaves_its_stage_fewer_blocks(self, schedule: str, head_cost: float):
        """Chunks may be uneven then, where stages cannot be more even: against every way to fill them."""
        for pp, num_layers in ((2, 6), (2, 9), (3, 8)):
            ranks = find_placement(schedule, pp, 2).ranks

            def slowest(counts: tuple[int, ...], pp: int = pp, ranks: tuple[int, ...] = ranks) -> float:
                own = [*counts[:-1], counts[-1] + head_cost]
                return max(sum(own[chunk] for chunk, rank in enumerate(ranks) if rank == stage) for stage in range(pp))

            found = fill_stages(ranks, num_layers, head_cost)
            ways = (
                (*first, num_layers - sum(first))
                for first in itertools.product(range(1, num_layers + 1), repeat=2 * pp - 1)
                if sum(first) <= num_layers
            )
            assert sum(found) == num_layers
            assert min(found[:-1]) > 0
            assert slowest(tuple(found)) == min(map(slowest, ways))

    def test_blocks_of_chunks(self):
        """A head of 32000 rows outweighs these six blocks, so the first stage of a V, which has it, gets one."""
        parallel = {"pp": 2, "schedule": "zb-v"}
        blocks = plan_of(2, parallel=parallel, batch={"seq_len": 512}).chunk_blocks
        assert blocks == ((0, 1), (1, 4), (4, 6), (6, 6))
        given = {**parallel, "blocks_per_chunk": [2, 2, 1, 1]}
        assert plan_of(2, parallel=given, batch={"seq_len": 512}).chunk_blocks == ((0, 2), (2, 4), (4, 5), (5, 6))

    def test_blocks_per_stage(self):
        """The user's word goes before the balance; null weighs a head of 32000 rows as several of these blocks."""
        batch = {"seq_len": 512}
        assert plan_of(2, parallel={"pp": 2}, batch=batch).chunk_blocks == ((0, 5), (5, 6))
        given = {"pp": 3, "blocks_per_stage": [1, 5, 0]}
        assert plan_of(3, parallel=given, batch=batch).chunk_blocks == ((0, 1), (1, 6), (6, 6))


class TestModel:
    def test_null_sizes(self):
        """Nulls take what their docstrings say."""
        model = fill_model(ModelConfig(hidden_size=256, num_heads=8, vocab_size=100), BatchConfig(seq_len=77))
        assert (model.num_kv_heads, model.head_dim, model.ffn_hidden_size, model.max_positions) == (8, 32, 704, 77)
        gelu = fill_model(ModelConfig(hidden_size=256, activation="gelu", vocab_size=100), BatchConfig())
        assert gelu.ffn_hidden_size == 1024

    def test_vocabulary(self):
        """The config's own wins over the tokenizer's; none at all is an error that says what to set."""
        assert fill_model(ModelConfig(vocab_size=100), BatchConfig(), 200).vocab_size == 100
        assert fill_model(ModelConfig(), BatchConfig(), 200).vocab_size == 200
        with pytest.raises(ConfigError, match=r"model\.vocab_size: null, and there is no tokenizer.*; set it, or set"):
            fill_model(ModelConfig(), BatchConfig())

    @pytest.mark.parametrize(
        ("vocab_size", "tp", "rows"), [(64, 1, 64), (65, 1, 128), (50257, 1, 50304), (50257, 8, 6336), (1, 4, 64)]
    )
    def test_vocabulary_padding(self, vocab_size: int, tp: int, rows: int):
        """Every rank holds the same whole number of tiles, and together at least the vocabulary."""
        assert vocab_rows_per_rank(vocab_size, tp) == rows
        assert rows * tp >= vocab_size

    def test_parameters_of_the_benchmark_workload(self):
        """32000 x 384 + 6 x (4 x 384^2 + 3 x 384 x 1024 + 2 x 384) + 384."""
        assert plan_of().num_parameters == 12_288_000 + 6 * (589_824 + 1_179_648 + 768) + 384

    @pytest.mark.parametrize(("activation", "num_of_ffn"), [("swiglu", 2), ("gelu", 1)])
    def test_biases_of_a_block(self, activation: str, num_of_ffn: int):
        """Of queries, keys and values, of the output, of the MLP's first product (twice as wide where it is gated), and
        of its second."""
        with_biases, without = (plan_of(model={"activation": activation, "bias": bias}) for bias in ("all", "none"))
        assert with_biases.num_parameters - without.num_parameters == 6 * (3 * 384 + 384 + num_of_ffn * 1024 + 384)


class TestLength:
    @pytest.mark.parametrize(
        ("train", "steps"), [({"steps": 7}, 7), ({"tokens": 4096}, 1), ({"tokens": 4097}, 2), ({"tokens": 1}, 1)]
    )
    def test_steps(self, train: dict, steps: int):
        """Tokens are rounded up to whole steps."""
        config = Config(train=train, batch={"global_batch_size": 8, "seq_len": 512})
        assert derive_steps(config) == steps

    def test_compile_pays(self):
        """The user's word counts; `auto` asks whether the run is long enough."""
        for steps, device, expected in [
            (10, "cpu", False),
            (10**5, "cpu", True),
            (10, "cuda", False),
            (200, "cuda", True),
        ]:
            config = Config(train={"steps": steps}, model=W1)
            assert compile_pays(config, make_plan(config, 1), device) is expected
        forced = Config(train={"steps": 1, "compile": "on"}, model=W1)
        assert compile_pays(forced, make_plan(forced, 1), "cpu")


def test_plan_is_json():
    """plan.json has every number, readable without Python."""
    plan = plan_of(4, parallel={"tp": 2})
    read = json.loads(json.dumps(plan.to_dict()))
    assert read["model"]["head_dim"] == 64
    assert read["chunk_blocks"] == [[0, 6]]
    assert set(read) == set(RunPlan.__dataclass_fields__)
