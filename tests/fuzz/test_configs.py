"""Configs, cluster profiles and recipes of any content: planned, or refused in words."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.cli.config import ASSUMED_VOCAB_SIZE
from megalite.config.load import build, dump_config, load_config
from megalite.config.plan import default_world_size, make_plan
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.config.yaml_source import Source
from megalite.corpus.prepare import load_recipe
from megalite.engine.deepspeed.config import deepspeed_config
from megalite.planner.holdings import state_bytes_per_parameter
from megalite.planner.memory import memory_by_stage
from megalite.slurm.cluster import load_cluster
from tests.fuzz.kit import survive
from tests.fuzz.mutate import mutate, mutate_text, paths_of, with_value
from tests.kit.paths import ROOT

YAML_PIECES = (
    *("\n", "  ", ": ", "- ", "[", "]", "{", "}", "#", "&a ", "*a", "|\n", ">-\n", "'", '"', "\t", "? ", "<<: "),
    *("---\n", "%YAML 1.1\n", "!!python/object:os.system ", "0x" + "f" * 50, "1" * 400, ".inf", ".nan", "~"),
    *("null", "\ufeff", "\x85"),
)

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def whole(config: Config) -> dict[str, Any]:
    """A config with every default in it, so that every setting can be hit."""
    return yaml.safe_load(dump_config(config))


def plan(config: Config) -> None:
    """What `megalite config check` does."""
    world_size = default_world_size(config)
    validate(config, world_size)
    planned = make_plan(config, world_size, ASSUMED_VOCAB_SIZE)
    planned.to_dict()
    memory_by_stage(config, planned)
    state_bytes_per_parameter(config, planned)
    deepspeed_config(config, planned)
    dump_config(config)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a case is written before it is read, outside of the folder that is watched."""
    (tmp_path / "empty").mkdir()
    return tmp_path / "case.yaml"


def test_configs(num_cases: int, rng: random.Random, file: Path):
    """Every setting set to anything, alone and several at a time, in configs that are fine otherwise."""
    bases = [whole(load_config(path)) for path in CONFIGS]

    def cases() -> Iterator[dict]:
        for _ in range(5 * num_cases):
            yield mutate(rng.choice(bases), rng, rng.choice((1, 1, 2, 4)))

    def run(case: Any) -> None:
        assert isinstance(case, dict)
        plan(build(Config, Source(case, {(): "case"})))

    survive(cases(), run, file.parent / "empty")


HUGE = (20_001, 2**31, 2**63 - 1)


def test_huge_numbers(file: Path):
    """Each number of a config as large as can be, and smaller but too large, and the largest in models that tie
    their embeddings and in others: no setting is a length that something is built to before it is checked."""
    bases = [whole(load_config(path)) for path in CONFIGS]

    def cases() -> Iterator[dict]:
        for index, base in enumerate(bases):
            model = base["model"]
            other = base | {"model": model | {"tie_embeddings": not model["tie_embeddings"]}}
            for *way, last in paths_of(base):
                holder = reduce(lambda inner, key: inner[key], way, base)
                if isinstance(holder[last], int | None) and not isinstance(holder[last], bool):
                    for number in (HUGE[index % 2], HUGE[-1]):
                        yield with_value(base, [*way, last], number)
                    yield with_value(other, [*way, last], HUGE[-1])

    def run(case: Any) -> None:
        plan(build(Config, Source(case, {(): "case"})))

    survive(cases(), run, file.parent / "empty")


def test_text_of_configs(num_cases: int, rng: random.Random, file: Path):
    """Files that are no YAML any more, or other YAML than they were."""
    texts = [path.read_text() for path in CONFIGS]

    def run(case: str) -> None:
        file.write_text(case, errors="replace")
        plan(load_config(file))

    survive((mutate_text(rng.choice(texts), rng, YAML_PIECES) for _ in range(num_cases)), run, file.parent / "empty")


BOMBS = {
    "levels": "[" * 3000,
    "more levels": "{a: " * 600 + "1" + "}" * 600,
    "levels by blanks": "".join(f"{' ' * depth}a:\n" for depth in range(500)),
    "aliases": "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]\n" for n in range(9)),
    "one scalar": "run: {dir: '" + "x" * 900_000 + "'}",
    "too large": "run: {dir: '" + "x" * 10_000_000 + "'}",
    "one key, very often": "a: 1\n" * 150_000,
    "many keys": "".join(f"k{n}: 1\n" for n in range(90_000)),
    "hexadecimal": "batch: {micro_batch_size: 0x" + "f" * 20_000 + "}",
    "digits": "batch: {micro_batch_size: " + "9" * 20_000 + "}",
    "a large float": "batch: {micro_batch_size: 1e300}",
    "a long line": "# " + "x" * 900_000 + "\ntrain: {steps: 1}",
    "many documents": "--- {}\n" * 50_000,
    "anchors": "".join(f"- &x{n} {n}\n" for n in range(90_000)),
}


def test_bombs(file: Path):
    """Small files that would grow, or take their time."""

    def run(name: str) -> None:
        file.write_text(BOMBS[name])
        plan(load_config(file))

    survive(BOMBS, run, file.parent / "empty")


def test_overrides(num_cases: int, rng: random.Random, file: Path):
    """Whatever stands on the command line behind the file."""
    keys = [".".join(map(str, path)) for path in _paths(whole(load_config(CONFIGS[0])))]
    values = (
        "1",
        "-1",
        "null",
        "[1, 2",
        "{a: 1}",
        "1e400",
        "0x" + "f" * 99,
        "*a",
        "&a 1",
        "!!int x",
        "\x00",
        "x" * 500,
        "",
    )

    def cases() -> Iterator[list[str]]:
        for _ in range(num_cases):
            names = (rng.choice(keys), "", ".", "a..b", "data.train.9.path", "data.train.x", "model", "é")
            yield [f"{rng.choice(names[:1] * 4 + names)}{rng.choice(('=', '=', '=', '', '=='))}{rng.choice(values)}"]

    def run(case: list[str]) -> None:
        load_config(CONFIGS[0], case)

    survive(cases(), run, file.parent / "empty")


def test_cluster_profiles_and_recipes(num_cases: int, rng: random.Random, file: Path):
    """The other two kinds of YAML that users write."""
    kinds = {load_cluster: "clusters", load_recipe: "data"}
    bases = {
        load: [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "configs" / folder).glob("*.yaml"))]
        for load, folder in kinds.items()
    }

    def cases() -> Iterator[tuple]:
        for _ in range(num_cases):
            load = rng.choice(list(kinds))
            yield load, mutate(rng.choice(bases[load]), rng, rng.choice((1, 2, 4)))

    def run(case: tuple) -> None:
        load, data = case
        file.write_text(yaml.safe_dump(data, allow_unicode=True))
        load(file)

    survive(cases(), run, file.parent / "empty")


def _paths(data: dict, prefix: tuple = ()) -> list[tuple]:
    return [(*prefix, key) for key in data] + [
        path for key, value in data.items() if isinstance(value, dict) for path in _paths(value, (*prefix, key))
    ]
