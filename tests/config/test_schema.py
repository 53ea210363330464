"""The schema itself: documented, frozen, and with defaults that pass their own checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from megalite.addition import addition
from megalite.config.brought import LOSSES
from megalite.config.load import dump_config, load_config
from megalite.config.plan import make_plan
from megalite.config.schema import DEEPSPEED_OWNED_KEYS, Config, EngineConfig, RopeScaling, Section
from megalite.engine.deepspeed.config import deepspeed_config
from tests.kit.plugins import added


def sections(root: type[Section] = Section) -> Iterator[type[Section]]:
    for section in root.__subclasses__():
        if section.__module__.startswith("megalite.config."):
            yield section
            yield from sections(section)


SECTIONS = list(sections())


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_everything_has_a_docstring(section: type[Section]):
    """Each section says what it is, each setting what it means."""
    assert section.__doc__
    if section is not Config:  # its fields are the sections
        missing = [name for name, field in section.model_fields.items() if not field.description]
        assert missing == []


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_defaults_build(section: type[Section]):
    """A section with only its required keys is valid and survives a round trip through plain data."""
    required = {
        "SourceConfig": {"path": "data/a"},
        "RopeScaling": {"type": "llama3"},
        "Fp4Config": {"format": "nvfp4"},
        "Fp8Config": {"backend": "te"},
        "RampConfig": {"start_size": 1},
        "ClipConfig": {"by": "unit", "threshold": 0.01},
        "TaskConfig": {"path": "data/qa.jsonl"},
        "ProfileConfig": {"steps": "10:15"},
        "QatConfig": {"bits": 8},
        "SlopeConfig": {"below": 0.1},
        "LossConfig": {"name": "none_of_ours"},
        "WeightGroupConfig": {"match": "head.*"},
    }
    with added(
        LOSSES, "none_of_ours", addition("loss", "none_of_ours", lambda logits, labels: 0, ("logits", "labels"))
    ):
        built = section(**required.get(section.__name__, {}))
        assert section(**built.model_dump(mode="json")) == built


def test_defaults_need_only_a_length(tmp_path):
    """`train.steps` is the one setting without a default that can run."""
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 1}")
    config = load_config(path)
    assert config == Config(train={"steps": 1})
    assert dump_config(config) != dump_config(Config())


def test_frozen():
    """Nobody changes a config behind another's back."""
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.train = None
    with pytest.raises(ValidationError, match="frozen"):
        config.model.hidden_size = 1


def test_sections_are_those_of_the_contract():
    names = "run model parallel batch data precision optimizer schedule train checkpoint monitor health slurm engine"
    assert list(Config.model_fields) == ["plugins", *names.split()]


def test_rope_scaling_defaults_are_llama_3_1():
    """Factor 8 over 8192 tokens, bands 1 and 4 (Llama team 2024)."""
    scaling = RopeScaling(type="llama3")
    assert (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (8.0, 1.0, 4.0)
    assert scaling.original_max_positions == 8192


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("pp", [1, 2])
def test_owned_keys_are_what_deepspeed_gets(dtype: str, pp: int):
    """No generated key can be set beside us, and what the user adds arrives."""
    config = Config(
        train={"steps": 1},
        model={"vocab_size": 64},
        precision={"dtype": dtype},
        parallel={"pp": pp},
        engine={"deepspeed_extra": {"wall_clock_breakdown": True}},
    )
    generated = deepspeed_config(config, make_plan(config, pp))
    assert set(generated) - set(DEEPSPEED_OWNED_KEYS) == {"wall_clock_breakdown"}


@pytest.mark.parametrize("key", DEEPSPEED_OWNED_KEYS)
def test_owned_keys_are_refused(key: str):
    """Each names the setting of ours to use instead."""
    with pytest.raises(ValidationError, match=f"megalite generates {key}, so it cannot be set here"):
        EngineConfig(deepspeed_extra={key: {}})
