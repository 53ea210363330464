"""A config from a YAML file: the file, then the overrides, then the presets' and the schema's defaults below them.

    file.yaml --+-- overrides --+-- Config (frozen; a preset's keys and the defaults fill the gaps)
                                |
                every complaint of every stage, each with its place -> one ConfigError

Relative paths in a config are relative to the working directory, not to the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from megalite.config.explain import explain
from megalite.config.schema import Config
from megalite.config.yaml_source import Source, dump_yaml, read_source
from megalite.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config.

    Args:
        path: a YAML file of sections, as in `configs/`. An empty section keeps its defaults.
        overrides: `section.key=value`, applied in order; the value is YAML, so lists and groups work too.

    Raises:
        ConfigError: everything that is wrong with the file, the overrides and single values, each with `file:line`.
            What is wrong between values is for `config.validate`.
    """
    source = read_source(Path(path))
    for assignment in overrides:
        source.override(assignment)
    return build_config(source)


def build_config(source: Source) -> Config:
    """The config that plain data describes, or all that is wrong with it as one ConfigError."""
    sections = {name: {} if section is None else section for name, section in source.data.items()}
    problems = list(source.problems)
    config = None
    try:
        config = Config.model_validate(sections)
    except ValidationError as error:
        problems += [f"{source.place(keys)}: {'.'.join(keys)}: {sentence}" for keys, sentence in explain(error)]
    if config is None or problems:
        raise ConfigError(problems)
    return config


def dump_config(config: Config) -> str:
    """The config as YAML with every default and preset filled in; `load_config` reads an equal one from it."""
    return dump_yaml(config.model_dump(mode="json"))
