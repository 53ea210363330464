"""Settings of the data stations, and the recipe that chains them: what `configs/data/*.yaml` may say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import (
    Field,
    NonNegativeInt,
)

from megalite.config.schema import Section
from megalite.corpus.near.settings import NearDedupConfig
from megalite.corpus.privacy.settings import PrivacyConfig
from megalite.corpus.rules.settings import RulesConfig
from megalite.corpus.scoring.settings import ClassifierConfig, HarmfulConfig, PerplexityConfig
from megalite.corpus.semantic.settings import SemanticStationConfig
from megalite.corpus.source import DocumentSource
from megalite.corpus.spans.settings import DecontaminateConfig, LineDedupConfig, SubstringConfig, UrlDedupConfig
from megalite.data.settings import PackConfig
from megalite.plugins import Plugins
from megalite.section import Problem
from megalite.tokenizer.settings import ChatConfig, FillInConfig, TokenizerConfig


class LanguageConfig(Section):
    """Which languages to keep; they are counted too."""

    keep: tuple[str, ...] = ()
    """ISO 639-1 codes, as in [en, de]. None: languages are only counted."""
    min_score: float = Field(0.5, ge=0.0, le=1.0)
    """Least probability of the language that is found; short and mixed texts score low."""


class LicenseConfig(Section):
    """Which licences to accept; they are counted too. What the texts say comes before what the metadata say."""

    accept: tuple[str, ...] = Field(
        default=(
            *("MIT", "MIT-0", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "0BSD", "Zlib", "BSL-1.0"),
            *("Unlicense", "CC0-1.0", "PSF-2.0", "Python-2.0"),
        ),
        min_length=1,
    )
    """SPDX identifiers; the default is permissive ones. Of an expression, `OR` needs one of them, `AND` all."""
    field: str | None = None
    """Field of the metadata that names the licence, or a list of which all must be accepted; the sources must keep it,
    as in `keep_fields: [license]`. null looks at the texts alone."""
    unknown: Literal["reject", "keep"] = "reject"
    """What to do with documents that say nothing of a licence."""


class CleanConfig(RulesConfig):
    """Repair of each document, redaction, then rules that keep or reject it. null turns a rule off."""

    on_error: Literal["reject", "fail"] = "reject"
    """What to do with a record that cannot be read: put it aside with the reason, or stop."""
    unicode_nfc: bool = True
    """Compose characters (Unicode NFC), so that one text has one form."""
    fix_encoding: bool = False
    """Set text right that was decoded with the wrong table (`cafÃ©`); needs ftfy, and is slow."""
    privacy: PrivacyConfig | None = None
    """Replace personal data and secrets; {} takes the usual kinds."""
    language: LanguageConfig | None = None
    """Keep some languages only; needs py3langid."""
    license: LicenseConfig | None = None
    """Keep documents under some licences only; {} takes the usual permissive ones."""


class DedupConfig(Section):
    """When two documents count as the same. The first one is kept."""

    ignore_whitespace: bool = True
    """Any run of blanks and line ends equals one blank."""
    ignore_case: bool = False
    """Upper and lower case are equal."""


class NearDedupStationConfig(NearDedupConfig):
    """Near-duplicates within the corpus, and against earlier data."""

    older: tuple[Path, ...] = ()
    """`index` folders that this station left beside earlier data; their documents always win."""
    keep_index: bool = False
    """Leave `index/`, about 1.3 kB a document, so that later data can be compared with this one."""


class DataRecipe(Section):
    """Raw documents to packed training data in one command."""

    plugins: Plugins = ()
    """Modules or files that bring rules and kinds of sources; docs/extending.md says how they are made."""
    out: Path
    """Folder for all stations."""
    sources: tuple[DocumentSource, ...] = Field(min_length=1)
    """Where the documents come from, in this order."""
    valid_fraction: float = Field(0.01, ge=0.0, lt=1.0)
    """Share of the documents held out for validation, chosen by a hash of their text; 0 for none."""
    clean: CleanConfig = CleanConfig()
    url_dedup: UrlDedupConfig | None = None
    """Keep one document of each address. The sources must keep it: `keep_fields: [url]`."""
    dedup: DedupConfig = DedupConfig()
    near_dedup: NearDedupStationConfig | None = None
    """Remove near-duplicates (MinHash); {} takes Jaccard 0.7 of 5-word shingles."""
    line_dedup: LineDedupConfig | None = None
    """Remove lines that stand in many documents."""
    substring_dedup: SubstringConfig | None = None
    """Remove passages that stood earlier in the corpus."""
    decontaminate: DecontaminateConfig | None = None
    """Remove documents that share runs of words with evaluation sets."""
    harmful: HarmfulConfig | None = None
    """Put documents aside that look more like a harmful sample than like a harmless one."""
    perplexity: PerplexityConfig | None = None
    """Keep the documents that an n-gram model finds least surprising."""
    classifier: ClassifierConfig | None = None
    """Keep the documents that look more like a good sample than like a bad one."""
    semantic_dedup: SemanticStationConfig | None = None
    """Remove documents that mean about the same as another one, by the embeddings of a model of one's own. It costs
    more than all others, and so comes last, on what they have left."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    chat: ChatConfig | None = None
    """How conversations become tokens, and which are learnt; {} takes the tokenizer's template and learns all answers.
    For sources with `conversations`."""
    fim: FillInConfig | None = None
    """Fill-in-the-middle, for programs; {} takes half of the documents apart."""
    describe_tokens: bool = False
    """Keep documents.parquet beside the tokens: id, source and metadata of each document (`megalite data rank` can then
    order samples by a field of it)."""
    pack: PackConfig = PackConfig()
    seed: NonNegativeInt = 0
    """Seed of the hold-out choice."""

    def problems(self) -> Iterator[Problem]:
        is_talk = any(source.conversations is not None for source in self.sources)
        if is_talk and self.chat is None:
            yield ("chat",), "is missing: a source has conversations; write `chat: {}` to learn their answers"
        if self.chat is not None:
            yield from self._chat_problems()
        if self.fim is not None:
            yield from self._fim_problems(self.fim)

    def _chat_problems(self) -> Iterator[Problem]:
        assert self.chat is not None
        for name, section in {"line_dedup": self.line_dedup, "clean.c4": self.clean.c4}.items():
            if section is not None:
                yield tuple(name.split(".")), "edits texts, and a conversation stays whole or goes; leave it out"
        for name, cutting in {"substring_dedup": self.substring_dedup, "decontaminate": self.decontaminate}.items():
            if cutting is not None and cutting.action == "cut":
                yield (name, "action"), "cut edits texts, and a conversation stays whole or goes; use drop"
        if self.fim is not None:
            yield ("fim",), "takes texts apart, which conversations are not; make two recipes, and mix what they make"
        if self.pack.repeats:
            yield ("pack", "repeats"), "is for long texts, and found with chat; leave it out"
        longest = self.chat.max_tokens
        if longest is not None and longest > self.pack.seq_len:
            why = (
                f"{longest} tokens do not fit a sequence, so that answers would be cut; use {self.pack.seq_len} or less"
            )
            yield ("chat", "max_tokens"), why

    def _fim_problems(self, fim: FillInConfig) -> Iterator[Problem]:
        if fim.level == "context" and self.pack.method != "best_fit":
            yield ("fim", "level"), "context needs pack.method=best_fit: concat has its borders anywhere"
        if fim.level == "context" and self.pack.seq_len < 16:
            yield (
                ("pack", "seq_len"),
                f"found {self.pack.seq_len}, too few tokens for fim.level=context; use 16 or more",
            )
        if fim.level == "context" and self.describe_tokens:
            yield ("describe_tokens",), "has a line for each document, and fim.level=context makes several of one"
        missing = [token for token in fim.tokens.spellings if token not in self.tokenizer.special_tokens]
        if self.tokenizer.path is None and missing:
            yield ("tokenizer", "special_tokens"), f"lacks {', '.join(missing)}, which fim needs; add them"
