"""Documents of a source that a plug-in brings: a generator of texts, or of records with a text and other fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import xxhash

from megalite.corpus.conversations import EDITION, MalformedRecordError
from megalite.corpus.documents import BatchBuilder, DocumentBatch
from megalite.corpus.reading.columns import NO_TEXT, add_conversation
from megalite.corpus.reading.files import FilePiece
from megalite.corpus.reading.kept_fields import id_of, kept_fields, spelt_out
from megalite.corpus.source import SOURCES, DocumentSource
from megalite.errors import DataError

READ = {"kind", "options", "keep_fields", "max_mb"}
"""Settings of a source that may change its documents."""

LATER_READ = ("name", "text_field", "id_field", "conversations")
"""So may these; at their defaults they leave fingerprints as they were."""


def brought_pieces(config: DocumentSource) -> tuple[FilePiece, ...]:
    """A piece for each shard that the plug-in's source has."""
    kind = SOURCES[config.kind]
    assert kind is not None, "a plug-in's"
    count = kind.num_shards
    return tuple(FilePiece(config.kind, f"{config.kind}-{index:05d}", index, count) for index in range(count))


def brought_fingerprint(config: DocumentSource) -> str:
    """Of what may change the documents: the settings that are read, and the plug-in's file."""
    kind = SOURCES[config.kind]
    assert kind is not None, "a plug-in's"
    later = {name for name in LATER_READ if getattr(config, name) != DocumentSource.model_fields[name].default}
    digest = xxhash.xxh3_128(config.model_dump_json(include=READ | later).encode())
    digest.update(SOURCES.code(config.kind, kind.read.call))
    digest.update(EDITION if config.conversations is not None else b"")
    return digest.hexdigest()


def read_brought(piece: FilePiece, config: DocumentSource, builder: BatchBuilder) -> Iterator[DocumentBatch]:
    """Read a shard.

    Raises:
        DataError: the plug-in fails, or gives what is no document.
    """
    kind = SOURCES[config.kind]
    assert kind is not None, "a plug-in's"
    try:
        found = kind.read.bound(config.options)(piece.start, kind.num_shards)
        if isinstance(found, Mapping | str | bytes) or not isinstance(found, Iterable):
            raise DataError(f"source {config.kind}: it returned {found!r}, expected documents one by one; use `yield`")
        for number, record in enumerate(found, start=1):
            _add(record, f"{piece.id}:{number}", config, builder)
            if builder.full():
                yield from builder.take()
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"source {config.kind}: shard {piece.start} failed: {type(error).__name__}: {error}") from error


def _add(record: Any, where: str, config: DocumentSource, builder: BatchBuilder) -> None:
    fields = {config.text_field: record} if isinstance(record, str) else record
    if not isinstance(fields, Mapping):
        raise DataError(f"source {config.kind}: found {record!r} at {where}, expected a text or a group of fields")
    if config.conversations is not None:
        add_conversation(dict(fields), where, config, builder)
        return
    text = fields.get(config.text_field)
    if not isinstance(text, str):
        builder.reject(where, spelt_out(dict(fields)), NO_TEXT)
        return
    try:
        builder.add(id_of(fields, where, config), text.encode(errors="replace"), kept_fields(dict(fields), config))
    except MalformedRecordError as error:
        builder.reject(where, text, str(error))
