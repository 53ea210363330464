"""Station 1: repair each document's text, redact what is private, then keep or reject it by rules.

    shard -> repair -> redact -> licence -> language -> rules -> part-*.parquet
                                     \\----------\\---------\\---> rejected/part-*.parquet, with the reason

Nothing is thrown away: what is rejected lies beside what is kept, as it came, and the manifest counts each reason.
A page in another language is rejected for its language, and not for what rules made for the wanted ones find in it; a
text under a licence that is not accepted, for that alone.
Every step takes a batch of texts as bytes (`texts.py`), so a document that needs nothing costs next to nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import DocumentBatch, Rejected, ShardOutput, what_is_kept, with_texts
from megalite.corpus.recipe import CleanConfig, LanguageConfig, LicenseConfig
from megalite.corpus.repair.repair import repair
from megalite.corpus.rules.english import refuse_without_spacy
from megalite.corpus.rules.settings import FILTER_RULES, counts_as_datatrove
from megalite.corpus.shards import ShardReading, lost_counts, lost_in_words, refuse_unreadable
from megalite.corpus.stations.conversing import EDITS, refuse_conversations, repaired
from megalite.errors import DataError
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.hashes import hash_inputs
from megalite.stations.runners import InProcess
from megalite.stations.station import StationResult, run_station
from megalite.stations.tasks import Report, Runner, Task, add_counts, run_tasks
from megalite.texts import Texts

LATER = ("code", "license")

LATER_KINDS = ("address", "name")
"""Of privacy."""


def clean(
    corpus: Corpus,
    out: Path,
    config: CleanConfig,
    *,
    runner: Runner | None = None,
    progress: ProgressReporter | None = None,
) -> StationResult:
    """Run the station.

    Args:
        corpus: what to read.
        out: folder to make.
        config: repair and rules.
        runner: where the tasks run; the result does not depend on it. None is this process.
        progress: told of every shard.

    Raises:
        DataError: a record cannot be read and config.on_error is `fail`; a source cannot be read at all; a language
            to keep is none that can be told.
        UnavailableError: rules count as datatrove does, and spaCy is not installed.
    """
    if counts_as_datatrove(config):
        refuse_without_spacy()
    progress, runner = progress or NoProgress(), runner or InProcess()
    settings = config.model_dump(mode="json")
    shards = corpus.shards()

    def build(folder: Path) -> dict[str, Any]:
        _refuse_unknown_languages(config.language)
        progress.start("clean", corpus.text_mb, "MB")
        tasks = [{"shard": shard, "config": settings} for shard in shards]
        reports = run_tasks(folder, "clean", clean_shard, tasks, runner=runner, progress=progress)
        refuse_unreadable([(shard, report["reading"]) for shard, report in zip(shards, reports, strict=True)])
        names = (
            "documents_in",
            "documents",
            "text_bytes_in",
            "text_bytes",
            "rejected",
            "redacted",
            "languages",
            "licenses",
        )
        counts = {name: add_counts(reports, name) for name in names} | lost_counts(reports, corpus.passed_over)
        _refuse_without_license_field(
            config.license, counts["documents_in"], sum(each["described"] for each in reports)
        )
        progress.finish(what_is_kept(counts) + lost_in_words(counts))
        return counts

    described = _described(settings, config)
    inputs = [*corpus.inputs, *_lists(config)]
    return run_station("clean", out, inputs=inputs, settings=described, build=build, resumable=True)


def _lists(config: CleanConfig) -> list[tuple[Path | str, str]]:
    """What it reads beside the corpus."""
    if config.bad_words is None:
        return []
    from megalite.corpus.rules.bad_words import read_bad_words

    read_bad_words(config.bad_words)  # or it is refused
    return hash_inputs(config.bad_words.file)


def _described(settings: dict[str, Any], config: CleanConfig) -> dict[str, Any]:
    """The settings by which a finished folder is known: with the code of plug-ins' rules, and without those settings
    that came later where they are off, as in folders that are older than they."""
    settings = {name: value for name, value in settings.items() if value is not None or name not in LATER}
    if settings["privacy"] is not None:
        kinds = settings["privacy"].items()
        settings["privacy"] = {kind: value for kind, value in kinds if value is not None or kind not in LATER_KINDS}
    if not config.custom:
        return {name: value for name, value in settings.items() if name != "custom"}
    code = {name: xxhash.xxh3_64_hexdigest(FILTER_RULES.code(name, FILTER_RULES[name].call)) for name in config.custom}
    return {**settings, "custom_code": code}


def _refuse_unknown_languages(config: LanguageConfig | None) -> None:
    if config is None or not config.keep:
        return
    from megalite.corpus.language import UNDETERMINED, load_model

    known = {*load_model().codes, UNDETERMINED}
    unknown = [code for code in config.keep if code not in known]
    if unknown:
        raise DataError(
            f"language.keep: no language is called {', '.join(unknown)}; codes are of two letters (ISO 639-1): "
            f"{', '.join(sorted(known))}"
        )


def _refuse_without_license_field(config: LicenseConfig | None, num_documents: int, num_described: int) -> None:
    if config is not None and config.field is not None and num_documents and not num_described:
        raise DataError(
            f"license.field: no document has a field {config.field!r} that names a licence; name it in keep_fields of "
            "the sources (--keep-field), spelled as there, or leave license.field out to look at the texts alone"
        )


def clean_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: repair, redact and filter the documents of one shard."""
    config = CleanConfig.model_validate(task["config"])
    reading = ShardReading(task["shard"])
    redacted: Counter[str] = Counter()
    languages: Counter[str] = Counter()
    licenses: Counter[str] = Counter()
    num_bytes = num_described = 0
    with ShardOutput(folder, number) as outcome:
        for batch in reading:
            if batch.rejected and config.on_error == "fail":
                first = batch.rejected[0]
                raise DataError(f"{first.source}: {first.id}: {first.reason}; set on_error: reject to put it aside")
            outcome.reject(batch.rejected)
            num_bytes += batch.texts.num_bytes
            if config.c4 is not None:
                refuse_conversations(batch.documents, f"clean.c4 {EDITS}")
            documents, is_redacted, replaced = repaired(
                batch.documents,
                lambda texts: repair_and_redact(texts, config),
                None if config.privacy is None else lambda texts: redact(texts, config),
            )
            texts, metadata = Texts.from_arrow(documents.column("text")), documents.column("metadata")
            cleaned = clean_texts(texts, config, metadata, is_redacted)
            redacted.update(replaced + Counter(cleaned.redacted))
            languages.update(cleaned.languages)
            licenses.update(cleaned.licenses)
            num_described += cleaned.num_described
            kept = cleaned.reasons == ""
            outcome.keep(with_texts(documents, cleaned.texts).filter(pa.array(kept)))
            outcome.reject(_refused(batch, cleaned.reasons))
    return {
        **outcome.counts(),
        "text_bytes_in": num_bytes,
        "redacted": dict(sorted(redacted.items())),
        "languages": dict(sorted(languages.items())),
        "licenses": dict(sorted(licenses.items())),
        "described": num_described,
        "reading": reading.report(),
        "megabytes": num_bytes / 1e6,
    }


class CleanedBatch(NamedTuple):
    """What became of a batch."""

    texts: Texts
    """Repaired and redacted."""
    reasons: np.ndarray
    """Why each is refused: str [documents], "" for one that is kept."""
    redacted: Mapping[str, int]
    """What was replaced, by kind."""
    languages: Mapping[str, int]
    """Documents by language, also of those that are refused; empty where it is not asked for."""
    licenses: Mapping[str, int]
    """The same by licence."""
    num_described: int
    """Documents whose metadata name a licence."""


def clean_texts(
    texts: Texts, config: CleanConfig, metadata: pa.Array | None = None, is_redacted: np.ndarray | None = None
) -> CleanedBatch:
    """Repair and redact a batch, and apply the rules.

    Args:
        texts: not changed.
        config: what to do.
        metadata: of the documents; only licences are looked for in it.
        is_redacted: bool [texts], those in which nothing is left to redact; None where none is.
    """
    from megalite.corpus.rules.apply import apply_rules  # brings numba, which takes a second to import

    refused, licenses, num_described = detect_licenses(texts, metadata, config.license)
    texts, redacted = repair_and_redact(texts, config, is_redacted)
    result = apply_rules(texts, config)
    reasons = np.array([*result.reason_names, ""], dtype=object)[result.reason_codes]
    languages: Mapping[str, int] = {}
    if config.language is not None:
        is_other, languages = detect_languages(texts, config.language)
        reasons[is_other] = "language"
    reasons = np.where(refused == "", reasons, refused)
    return CleanedBatch(result.texts, reasons, redacted, languages, licenses, num_described)


def repair_and_redact(
    texts: Texts, config: CleanConfig, is_redacted: np.ndarray | None = None
) -> tuple[Texts, Mapping[str, int]]:
    """Repair and redact a batch; also what was replaced, by kind."""
    texts = repair(texts, unicode_nfc=config.unicode_nfc, fix_encoding=config.fix_encoding)
    return redact(texts, config, is_redacted)


def redact(texts: Texts, config: CleanConfig, is_redacted: np.ndarray | None = None) -> tuple[Texts, Mapping[str, int]]:
    """Redact a batch, if that is asked for; also what was replaced, by kind."""
    if config.privacy is None:
        return texts, {}
    from megalite.corpus.privacy.redact import redact as replace_private

    return replace_private(texts, config.privacy, is_redacted)


def detect_languages(texts: Texts, config: LanguageConfig) -> tuple[np.ndarray, Mapping[str, int]]:
    """Which documents are in none of the wanted languages, or in none for sure: bool [documents]; and all by language.

    An empty document has none; it is left to the rules, and not counted.
    """
    from megalite.corpus.language import identify

    codes, scores = identify(texts)
    has_text = texts.lengths > 0
    is_other = np.zeros(len(texts), bool)
    if config.keep:
        is_other = has_text & (~np.isin(codes, config.keep) | (scores < config.min_score))
    return is_other, Counter(np.array(codes, object)[has_text].tolist())


def detect_licenses(
    texts: Texts, metadata: pa.Array | None, config: LicenseConfig | None
) -> tuple[np.ndarray, Mapping[str, int], int]:
    """Why each document's licence is refused, object [documents] of str, "" for one that is not; all by licence; and
    how many are named by the metadata."""
    if config is None:
        return np.full(len(texts), "", object), {}, 0
    from megalite.corpus.licenses import UNKNOWN, find_licenses

    found = find_licenses(texts, metadata, config.field, config.accept)
    reasons = np.array([f"license: {name}" for name in found.names], object)
    unknown = np.array(found.names, object) == UNKNOWN
    reasons[found.accepted | (unknown & (config.unknown == "keep"))] = ""
    return reasons, Counter(found.names), found.num_described


def _refused(batch: DocumentBatch, reasons: np.ndarray) -> list[Rejected]:
    """The refused documents as they came."""
    places = np.flatnonzero(reasons != "")
    chosen = batch.documents.take(pa.array(places)) if places.size else batch.documents.slice(0, 0)
    columns = (chosen.column(name).to_pylist() for name in ("id", "source", "text"))
    return [Rejected(*row) for row in zip(*columns, reasons[places].tolist(), strict=True)]
