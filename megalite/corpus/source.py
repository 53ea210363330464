"""Where raw documents come from: what a recipe may say of a source, and what is a path and what a URL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PositiveFloat,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from megalite.addition import Addition
from megalite.config.brought import wrong_options
from megalite.corpus.conversations import OF_PYTHON, Shape
from megalite.plugins import Table
from megalite.section import FrozenOptions, Options, Problem, Section

URL_PATTERN = r"^[A-Za-z][A-Za-z0-9+.-]+://"

WEB = ("http://", "https://")


def is_url(path: str | Path) -> bool:
    """Whether this names something behind fsspec, not a path of this machine."""
    return isinstance(path, str) and re.match(URL_PATTERN, path) is not None


def file_name(path: str) -> str:
    """The path or URL up to its suffix: without what a web address may carry behind it (`?download=true`)."""
    return urlsplit(path).path if path.startswith(WEB) else path


def _keep_url(value: Any, read_path: ValidatorFunctionWrapHandler) -> Path | str:
    if value == "":
        raise ValueError("empty; name a file or folder, as . for the current one")
    return value if is_url(value) else read_path(value)


Location = Annotated[Path, WrapValidator(_keep_url), PlainSerializer(str)]
"""A local path or, as the string that was written, a URL: a Path would make `s3:/b` of `s3://b`. In messages and in the
help it is a path; a union of both would complain of two types for one mistake."""

DATASET_SETTINGS = ("dataset", "subset", "data_files", "split", "revision", "streaming")

LATER = ("max_record_mb", "max_expansion", "options", "conversations")
"""Settings of a source that came later: at their defaults they leave fingerprints as they were."""

UNREAD = {
    "python": ("include", "text_field", "id_field", "keep_fields", "max_expansion"),
    "datasets": ("max_expansion",),
}
"""Settings that a kind of source has no use for, beside those of other kinds alone."""

UNREAD_IN_STATIONS = (
    "include",
    "text_field",
    "id_field",
    "keep_fields",
    "conversations",
    "max_mb",
    "max_record_mb",
    "max_expansion",
    "name",
)
"""Settings that the folder of a station has no use for: its documents are as they were read when it was made."""

UNREAD_BY_PLUGINS = ("include", "max_record_mb", "max_expansion")


@dataclass(frozen=True)
class BroughtSource:
    """A source that a plug-in brings."""

    read: Addition
    """`(shard, num_shards)` to documents."""
    num_shards: int


SOURCES: Table[BroughtSource | None] = Table("kind of source", dict.fromkeys(("files", "python", "datasets")))
"""None for ours."""


class DocumentSource(Section):
    """Where raw documents come from."""

    kind: Annotated[str, AfterValidator(SOURCES.known)] = "files"
    """`files` reads `path`; `python` reads the source and docstrings of Python's own library and of the installed
    packages, which every machine has; `datasets` reads whatever Hugging Face `datasets` can load; others are brought by
    plug-ins."""
    options: Options = Field(default_factory=FrozenOptions)
    """What a plug-in's source may be told."""
    path: Location | None = None
    """A file or folder: .jsonl, .parquet, .arrow, plain text, also .gz or .zst; the folder of a station; or a dataset
    saved by Hugging Face `datasets`. Folders are read recursively, those behind links too. It may be a URL that fsspec
    knows: `s3://bucket/folder`, `gs://...`, `https://host/file.jsonl.zst`. Only for kind `files`."""
    include: tuple[str, ...] = ()
    """File-name patterns (`*.py`) to read from a folder; empty takes the known kinds of data and of plain text."""
    dataset: str | None = None
    """Only for kind `datasets`, as all up to `streaming`: a name on the hub (`allenai/c4`), a folder, or the name of a
    format (`json`, `parquet`) together with `data_files`; a folder with such a name is `./json`."""
    subset: str | None = None
    """Which of its configurations, as in `en`; null takes its only one."""
    data_files: tuple[str, ...] = ()
    """Files of it to read, patterns allowed; empty takes all."""
    split: str = "train"
    """Which split."""
    revision: str | None = None
    """Branch, tag or commit on the hub. Give a commit: null is the newest, and a change there is not noticed."""
    streaming: bool = True
    """Read it as it comes and store nothing; false downloads it into the cache of `datasets` first."""
    text_field: str = "text"
    """Field or column that holds the text, in .jsonl, .parquet and .arrow files."""
    id_field: str = "id"
    """Field or column that names the document; where it is missing, the file and line or row do."""
    keep_fields: tuple[str, ...] = ()
    """Further fields or columns to carry along, as a JSON object in the column `metadata` (a URL, a date, a score)."""
    conversations: Shape | None = None
    """Records are conversations to learn answers from, of the shape `messages` (OpenAI), `sharegpt`, `alpaca` or
    `prompt_completion`, or pairs of answers (`preference`); `auto` goes by the fields of each. `docstrings` and
    `docstring_pairs`, with `kind: python`, make such of its functions and classes. Null for text."""
    max_mb: PositiveFloat | None = None
    """Stop after this many million bytes of text; null for all."""
    max_record_mb: PositiveFloat = 64.0
    """Longest record (a line, a text in a table, a file of text) in million bytes; a longer one is rejected as it comes
    by, and never in memory as a whole."""
    max_expansion: PositiveFloat = 200.0
    """How many times its size a compressed file may grow to, beyond 256 MB; text stays below 50. The rest of one that
    grows more is left out."""
    name: str | None = None
    """Name in counts and reports; null takes the last part of the path."""
    description: str | None = None
    """What it is, for the data card."""
    license: str | None = None
    """Terms of use, for the data card."""
    url: str | None = None
    """Where it came from, for the data card."""

    @property
    def label(self) -> str:
        """Name in counts and reports."""
        if self.name is not None:
            return self.name
        if self.kind == "python" or self.is_brought:
            return self.kind
        if isinstance(self.path, str):
            return PurePosixPath(file_name(self.path)).name
        where = self.dataset if self.path is None else self.path
        assert where is not None, "the kind has one of them"
        return Path(where).absolute().name

    @property
    def root(self) -> str:
        """Where it lies, for messages and manifests."""
        if self.kind == "datasets":
            return "/".join(filter(None, (f"datasets://{self.dataset}", self.subset, self.split)))
        if self.is_brought:
            return f"plugin://{self.kind}"
        return str(self.path)

    @property
    def is_brought(self) -> bool:
        """Whether a plug-in reads it."""
        return SOURCES[self.kind] is not None

    def changed(self, names: Sequence[str]) -> list[str]:
        """Those of some settings that are not as they are by themselves, each with its value."""
        fields = type(self).model_fields
        values = {name: getattr(self, name) for name in names}
        return [f"{name}={value!r}" for name, value in values.items() if value != fields[name].default]

    def problems(self) -> Iterator[Problem]:
        brought = SOURCES[self.kind]
        yield from wrong_options(brought and brought.read, self.options, f"kind: {self.kind}")
        for name in UNREAD_BY_PLUGINS if brought else UNREAD.get(self.kind, ()):
            if (found := getattr(self, name)) != type(self).model_fields[name].default:
                yield (name,), f"found {found!r}, which kind: {self.kind} does not read; leave it out"

    @model_validator(mode="after")
    def _conversations_fit_kind(self) -> DocumentSource:
        if self.conversations is None:
            return self
        if (self.kind == "python") != (self.conversations in OF_PYTHON):
            raise ValueError(
                f"conversations: {' and '.join(OF_PYTHON)} are of kind: python alone, and this kind has no others"
            )
        if self.text_field != type(self).model_fields["text_field"].default:
            raise ValueError("text_field must be left out with conversations, which have fields of their own")
        return self

    @model_validator(mode="after")
    def _settings_fit_kind(self) -> DocumentSource:
        if self.kind == "files" and self.path is None:
            raise ValueError("path is missing; name a file or folder, or use kind: python")
        if self.kind not in ("files", "datasets") and self.path is not None:
            raise ValueError(f"path must be left out with kind: {self.kind}; it finds what it reads by itself")
        if self.kind == "datasets":
            if self.dataset is None:
                raise ValueError("dataset is missing; name one of the hub, or a folder")
            if self.path is not None or self.include:
                raise ValueError("path and include must be left out with kind: datasets; use dataset and data_files")
            return self
        for name in DATASET_SETTINGS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is only for kind: datasets; leave it out, or set the kind")
        return self
