"""YAML read with the place of every value, so that an error can say `file.yaml:12`.

Scalars follow YAML 1.2 rather than PyYAML's 1.1: `3e-4` and `1e9` are numbers, and `on`, `off`, `yes`, `no`, `12:30`
and `2024-01-01` are text. A key given twice is an error, as are tags and aliases that contain themselves. What no
person would write (a hundred levels, aliases of aliases that make a billion values) is refused before it costs much.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megalite.errors import ConfigError, did_you_mean

Keys = tuple[str, ...]
"""The way to a value: `("data", "train", "0", "path")`."""

MAX_BYTES = 10**6
"""Of a file."""

MAX_DEPTH = 50
"""Groups within groups."""

MAX_VALUES = 20_000
"""In a file, aliases counted as often as they are used."""

MAX_DIGITS = 100
"""Of a number: Python refuses to print one of some thousand."""

MAX_COMPLAINTS = 50
"""Of one file; then how many more there are."""

COMMAND_LINE = "command line"
"""The place of a value that an override gave."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
)
"""Kinds of plain scalars: name, form, first characters. What matches none is text."""

_SCALAR_TAGS = {_TAG + "str", *(_TAG + name for name, _, _ in _SCALARS)}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars above."""

    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012  (PyYAML's own way to hold them)
    _depth, _num_nodes = 0, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse what is too deep before Python's stack is used up, and too long before it has cost its time."""
        self._depth += 1
        self._num_nodes += 1
        mark = self.peek_event().start_mark
        if self._depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MAX_DEPTH} levels", mark)
        if self._num_nodes > MAX_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_VALUES:,} values", mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would take for something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Double quotes, which escape, for what does not print: PyYAML's single quotes lose odd line breaks."""
        return self.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


for _name, _form, _first in _SCALARS:
    for _user in (_Loader, _Dumper):
        _user.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_form})$"), [*_first, ""])


@dataclass
class Source:
    """Plain data and where each value of it stands."""

    data: dict[str, Any]
    places: dict[Keys, str]
    """Place of a key, `file.yaml:12`; the root's is the file."""
    problems: list[str] = field(default_factory=list)
    """Complaints that do not keep the rest from being read."""

    def place(self, keys: Keys) -> str:
        """Where a value stands, or the nearest thing around it that stands anywhere."""
        while keys not in self.places:
            keys = keys[:-1]
        return self.places[keys]

    def override(self, assignment: str) -> None:
        """Apply one `section.key=value`; what is wrong with it is added to the problems.

        The value is YAML and replaces what stood there; a list's items go by number, as in `data.train.0.weight=2`.
        """
        name, equals, text = assignment.partition("=")
        keys = tuple(name.strip().split("."))
        if not equals or not all(keys):
            self._complain(f"{assignment!r} is not an override; write key=value or section.key=value: train.steps=100")
            return
        places: dict[Keys, str] = {keys: COMMAND_LINE}
        try:
            value, problems = _parse(text, COMMAND_LINE, keys, places)
        except yaml.YAMLError as error:
            self._complain(f"{name}: {text!r} is not YAML: {_reason(error)}")
            return
        self.problems += problems
        if self._assign(keys, value):
            kept = {known: place for known, place in self.places.items() if known[: len(keys)] != keys}
            self.places = {**kept, **places}

    def _assign(self, keys: Keys, value: Any) -> bool:
        """Put a value in its place, making the groups on the way; whether there is such a place."""
        holder: Any = self.data
        for depth, key in enumerate(keys):
            name, holder_name = ".".join(keys), ".".join(keys[:depth])
            place: str | int = key
            if isinstance(holder, list):
                if not key.isdecimal() or int(key) >= len(holder):
                    self._complain(f"{name}: {holder_name} has {len(holder)} items, numbered from 0")
                    return False
                place = int(key)
            elif not isinstance(holder, dict):
                self._complain(f"{name}: {holder_name} is {holder!r}, which has no keys of its own")
                return False
            if depth == len(keys) - 1:
                holder[place] = value
            elif isinstance(holder, dict) and holder.get(key) is None:
                holder[key] = {}
                self.places[keys[: depth + 1]] = COMMAND_LINE
            holder = holder[place]
        return True

    def _complain(self, sentence: str) -> None:
        self.problems.append(f"{COMMAND_LINE}: {sentence}")


def read_source(
    path: Path, expected: str = "a config is a mapping of sections, such as `train:` with `steps: 100`"
) -> Source:
    """Read a YAML file that holds a mapping.

    Args:
        expected: what it is, for who gives another one.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8, not YAML or not a mapping.
    """
    text = _read_text(path)
    places: dict[Keys, str] = {(): str(path)}
    try:
        data, problems = _parse(text, str(path), (), places)
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}{_line(error)}: not YAML: {_reason(error)}"]) from None
    if not isinstance(data, dict):
        found = "is empty" if data is None else f"holds {_kind(data)}"
        raise ConfigError([f"{path}: {found}; {expected}"])
    return Source(data, places, problems)


def command_line_source(assignments: Sequence[str]) -> Source:
    """Settings given as `key=value` alone; keys may be `section.key`."""
    source = Source({}, {(): COMMAND_LINE})
    for assignment in assignments:
        source.override(assignment)
    return source


def dump_yaml(data: dict[str, Any]) -> str:
    """Plain data as YAML text that reads back equal."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _read_text(path: Path) -> str:
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            size = path.stat().st_size / 10**6
            raise ConfigError([f"{path}: {size:.1f} MB, which is no config; at most {MAX_BYTES / 10**6:g} MB are read"])
        raw = path.read_bytes()
    except FileNotFoundError:
        near = [sibling.name for sibling in path.parent.glob("*.y*ml")]
        raise ConfigError([f"{path}: no such file{did_you_mean(path.name, near)}"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        raise ConfigError([f"{path}:{line}: {found}; save the file as UTF-8 text"]) from None


def _parse(text: str, source: str, root: Keys, places: dict[Keys, str]) -> tuple[Any, list[str]]:
    """Value of a YAML document and complaints about it; fills in `places` when `source` is a file."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        reader = _Reader(loader.construct_object, source, places)
        value = reader.value(node, root) if node is not None else None
        return value, reader.problems
    finally:
        loader.dispose()


class _Reader:
    """Turns YAML nodes into plain data, noting places and complaints on the way."""

    def __init__(self, construct: Callable[[yaml.Node], Any], source: str, places: dict[Keys, str]):
        self.problems: list[str] = []
        self._construct = construct
        self._source = source
        self._places = places
        self._open: list[yaml.Node] = []
        self._num_values = 0

    def value(self, node: yaml.Node, keys: Keys) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            problem = f"more than {MAX_VALUES:,} values, aliases counted as often as they are used"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, keys)
        if node in self._open:
            self._complain(node, keys, "an alias stands inside the value that it names")
            return None
        self._open.append(node)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self._refuse_tag(node, keys)
        if isinstance(node, yaml.SequenceNode):
            value: Any = [self._item(item, (*keys, str(index))) for index, item in enumerate(node.value)]
        else:
            assert isinstance(node, yaml.MappingNode), node
            value = dict(self._pairs(node, keys))
        self._open.pop()
        return value

    def _scalar(self, node: yaml.ScalarNode, keys: Keys) -> Any:
        if node.tag not in _SCALAR_TAGS:
            return self._refuse_tag(node, keys)
        if node.tag != _TAG + "str" and len(node.value) > MAX_DIGITS:
            self._complain(node, keys, f"found {_short(node.value)}, a number of {len(node.value):,} digits")
            return None
        try:
            return self._construct(node)
        except (ValueError, KeyError):  # `!!int abc`
            return self._refuse_tag(node, keys)

    def _refuse_tag(self, node: yaml.Node, keys: Keys) -> None:
        self._complain(node, keys, f"the tag {node.tag.replace(_TAG, '!!')} is not supported here; leave it out")

    def _item(self, node: yaml.Node, keys: Keys) -> Any:
        self._note(node, keys)
        return self.value(node, keys)

    def _pairs(self, node: yaml.MappingNode, keys: Keys) -> Iterator[tuple[str, Any]]:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self._scalar(key_node, keys) if isinstance(key_node, yaml.ScalarNode) else None
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                self._complain(key_node, keys, "found a key that is not text; put it in quotes")
                continue
            inner = (*keys, key)
            if key in seen:
                self._complain(key_node, inner, f"given twice, first in line {seen[key]}; remove one")
            seen.setdefault(key, line)
            self._note(key_node, inner)
            yield key, self.value(value_node, inner)

    def _note(self, node: yaml.Node, keys: Keys) -> None:
        self._places[keys] = self._place(node)

    def _place(self, node: yaml.Node) -> str:
        return COMMAND_LINE if self._source == COMMAND_LINE else f"{self._source}:{node.start_mark.line + 1}"

    def _complain(self, node: yaml.Node, keys: Keys, sentence: str) -> None:
        if len(self.problems) > MAX_COMPLAINTS:
            return
        name = f"{'.'.join(keys)}: " if keys else ""
        self.problems.append(f"{self._place(node)}: {name}{sentence}")


def _line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark else ""


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"character #x{error.character:04x} is not allowed"
    problem = getattr(error, "problem", None) or str(error)
    return f"{problem}; indent with spaces" if "'\\t'" in problem else problem


def _kind(data: Any) -> str:
    return "a list" if isinstance(data, list) else f"only {_short(repr(data))}"


def _short(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
