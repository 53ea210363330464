"""The small rules of a Hugging Face folder: rotary settings in two forms, sizes of shards, permissions."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, LlamaConfig

from megalite.checkpoint.hf.config_json import write_config
from megalite.checkpoint.hf.families.registry import choose_family
from megalite.checkpoint.hf.rope_json import RopeKeys, read_rope, write_rope
from megalite.checkpoint.hf.settings import Settings
from megalite.checkpoint.hf.shards import parse_size
from megalite.checkpoint.tensor_file import group_by_size
from megalite.config.schema import RopeConfig
from megalite.errors import ConversionError
from tests.checkpoint.hf_kit import FAMILIES, tiny_model

ROPES = {
    "plain": {},
    "another theta": {"theta": 5e5},
    "linear": {"scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {"theta": 5e5, "scaling": {"type": "llama3", "factor": 32.0, "low_freq_factor": 2.0}},
    "part of each head": {"theta": 2e4, "fraction": 0.5},
}


@pytest.mark.parametrize("name", ROPES)
def test_either_form_alone_means_the_same(name: str):
    """A reader that knows only the keys of transformers 4, or only those of 5, sees the same rotary settings."""
    rope = RopeConfig(**ROPES[name])
    both = {"partial_rotary_factor": rope.fraction, **write_rope(rope, 40, with_fraction=True)}
    old = {key: value for key, value in both.items() if key != "rope_parameters"}
    new = {"rope_parameters": both["rope_parameters"]}
    for raw in (both, old, new):
        settings = Settings({"max_position_embeddings": 40, **raw}, [])
        assert RopeConfig(**read_rope(settings, rotates_whole_heads=False)) == rope
        assert settings.problems == []


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_is_known_to_transformers(name: str):
    """transformers keeps the value of every key that is written, so none is misspelled or overruled by a default."""
    model = tiny_model(**FAMILIES[name])
    family = choose_family(model)
    written = write_config(model, family, dtype="float32", special_ids={"bos_token_id": 1, "eos_token_id": 2})
    config = AutoConfig.for_model(**written)
    kept = config.to_dict()
    only_in_version_4 = {"torch_dtype", "rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base"}
    only_in_version_4 |= {"rope_local_base_freq"}
    for key in written.keys() - only_in_version_4:
        assert (kept[key] if key in kept else getattr(config, key)) == written[key], key  # or kept by another name


def test_without_theta():
    """A config.json from before there was a key for it, or that leaves it out: what transformers then computes with."""
    for keys, settings in ((RopeKeys(), {}), (RopeKeys("rotary_emb_base", "rotary_pct", 0.25), {"rope_scaling": None})):
        assert read_rope(Settings(settings, []), keys)["theta"] == LlamaConfig().rope_parameters["rope_theta"]


@pytest.mark.parametrize(("text", "num_bytes"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("1000", 1000)])
def test_sizes(text: str, num_bytes: int):
    """Shard sizes are read in decimal units, as the hub counts."""
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "0MB", "5XB", "-5GB", "5 GB each"])
def test_sizes_that_are_none(text: str):
    """Anything else is refused with an example."""
    with pytest.raises(ConversionError, match="5GB"):
        parse_size(text)


def test_grouping_by_size():
    """Groups keep the order and the limit; what is too large by itself is a group of its own."""
    sizes = {"a": 3, "b": 3, "c": 9, "d": 1, "e": 4, "f": 2}
    assert group_by_size(sizes, 6) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
