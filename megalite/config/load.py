"""A config from a YAML file: the file, then the overrides, then the presets' and the schema's defaults below them.

    file.yaml --+-- overrides --+-- Config (frozen; a preset's keys and the defaults fill the gaps)
                                |
                every complaint of every stage, each with its place -> one ConfigError

Relative paths in a config are relative to the working directory, not to the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megalite.config.explain import explain
from megalite.config.schema import Config
from megalite.config.yaml_source import MAX_COMPLAINTS, Source, dump_yaml, read_source
from megalite.errors import ConfigError
from megalite.plugins import PluginError, load_plugins
from megalite.section import Section, problems_of

SectionT = TypeVar("SectionT", bound=Section)


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
    if "ranks_per_node" in source.data:
        raise ConfigError([f"{path}: this is a machine's file, no training config: give it to --machine"])
    if "sources" in source.data:
        raise ConfigError(
            [f"{path}: this is a recipe for data with sources, no training config: `megalite data prepare` reads it"]
        )
    for assignment in overrides:
        source.override(assignment)
    return build(Config, source)


def build(kind: type[SectionT], source: Source) -> SectionT:
    """Make a section, and all sections below it, of plain data.

    Raises:
        ConfigError: all that is wrong with the data, and what was already wrong with its source.
    """
    _load_plugins(source)
    data = {
        name: {} if value is None and _is_section(kind.model_fields.get(name)) else value
        for name, value in source.data.items()
    }
    problems, built = list(source.problems), None
    try:
        built = kind.model_validate(data)
    except ValidationError as error:
        problems += [_complaint(source, *found) for found in islice(explain(error, kind), MAX_COMPLAINTS + 1)]
    if built is not None:
        problems += [_complaint(source, *problem) for problem in problems_of(built)]
    if len(problems) > MAX_COMPLAINTS:
        problems[MAX_COMPLAINTS:] = ["and more; correct these first"]
    if built is None or problems:
        raise ConfigError(problems)
    return built


def _load_plugins(source: Source) -> None:
    """Load what is installed and what data names, since plug-ins bring what other settings may name.

    Raises:
        PluginError: an installed one cannot be loaded.
        ConfigError: one that the data names cannot be.
    """
    load_plugins(())
    names = source.data.get("plugins")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        for index, name in enumerate(names):
            try:
                load_plugins([name])
            except PluginError as error:
                raise ConfigError([_complaint(source, ("plugins", str(index)), str(error))]) from error


def _complaint(source: Source, keys: tuple[str, ...], sentence: str) -> str:
    """A sentence with its place."""
    return ": ".join(filter(None, [source.place(keys), ".".join(keys), sentence]))


def _is_section(field: FieldInfo | None) -> bool:
    return field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def in_folder(config: Config, folder: Path) -> Config:
    """The config of a run in another folder. An override would not do: a path may hold what YAML takes for a comment
    or a group."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})


def dump_config(config: Config) -> str:
    """The config as YAML with every default and preset filled in; `load_config` reads an equal one from it."""
    return dump_yaml(config.model_dump(mode="json"))
