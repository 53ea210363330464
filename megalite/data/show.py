"""The batches that training will see, for people and for tests: as arrays, or as text.

The trainer cuts the same global samples over its ranks, so what is shown here is what every layout learns from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from megalite.config.batch_sizes import BatchSizes
from megalite.config.schema import Config
from megalite.config.step_range import parse_step_range
from megalite.data.sample import Sample
from megalite.data.samples import Samples, open_training_samples
from megalite.errors import DataError
from megalite.stations.tasks import replacing
from megalite.tokenizer.tokenizer import Tokenizer

ARRAYS = ("tokens", "labels", "loss_mask", "document_ids")

SHOWN_CHARS = 300
"""Text shown of each document's part, or of each stretch in one that is learnt or is not."""

LEARNT_COLOUR = ("\033[32m", "\033[0m")
LEARNT_MARKS = ("\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}", "\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}")
"""Around what is learnt, of data that is not learnt whole: green, or where there is no colour in guillemets."""


def parse_steps(text: str) -> range:
    """`A:B` as a range of steps: A, A + 1, ..., B - 1, counted from 1 as in metrics.jsonl.

    Raises:
        DataError: it is written otherwise, is empty or begins before step 1.
    """
    try:
        return parse_step_range(text)
    except ValueError as error:
        raise DataError(f"--steps {text}: {error}") from error


def parse_samples(text: str) -> range:
    """`A:B` as a range of sample numbers: A, A + 1, ..., B - 1, counted from 0 as in events.jsonl.

    Raises:
        DataError: it is written otherwise or is empty.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    numbers = range(int(match[1]), int(match[2])) if match else range(0)
    if not numbers:
        raise DataError(f"--samples {text}: write A:B for the samples A to B - 1, with A < B, as events.jsonl has them")
    return numbers


def open_training_data(config: Config) -> Samples:
    """The samples that a config trains on.

    Raises:
        DataError: the data is missing, damaged or does not fit.
    """
    samples = open_training_samples(config)
    if config.data.tokenizer is not None:
        samples.check_tokenizer(Tokenizer.load(config.data.tokenizer))
    if config.model.vocab_size is not None:
        samples.check_vocab_size(config.model.vocab_size)
    return samples


def collect_arrays(samples: Samples, steps: range, sizes: BatchSizes) -> dict[str, np.ndarray]:
    """The batches of some steps, all of one size.

    Returns:
        tokens, labels, loss_mask and document_ids, each [steps, global_batch_size, seq_len]; and weights, where labels
        have any.

    Raises:
        DataError: the batch grows between the steps.
    """
    size, last = sizes.size(steps.start), sizes.size(steps.stop - 1)
    if size != last:
        same = next(step for step in steps if sizes.size(step) != size)
        raise DataError(
            f"--steps {steps.start}:{steps.stop}: batches of {size} and of {last} sequences do not fit into one array; "
            f"use {steps.start}:{same}, and {same} on for the next"
        )
    shape = (len(steps), size, samples.seq_len)
    rows = [samples.sample(index) for index in range(sizes.first_sample(steps.start), sizes.first_sample(steps.stop))]
    names = (*ARRAYS, "weights") if samples.is_weighted else ARRAYS
    return {name: np.stack([getattr(row, name) for row in rows]).reshape(shape) for name in names}


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays to exactly this path (np.savez given a name would append .npz).

    Raises:
        DataError: the file cannot be written.
    """
    try:
        with replacing(path, make_folder=False) as partial, open(partial, "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # mypy takes them for allow_pickle
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error


def describe(samples: Samples, steps: range, sizes: BatchSizes, *, colour: bool = False) -> Iterator[str]:
    """Lines that show the first sample of each step as text, document by document; `colour` marks by it what is learnt
    of data that is not learnt whole."""
    yield from _describe_samples(samples, ((sizes.first_sample(step), f"step {step}, ") for step in steps), colour)


def describe_samples(samples: Samples, numbers: range, *, colour: bool = False) -> Iterator[str]:
    """Lines that show samples as text, by their numbers in the data, as events have them: those that a run has left out
    among them."""
    first = samples.cursor.beginning(samples.first)
    whole = samples.beginning_at(first).following(replace(samples.cursor, gaps=()))
    yield from _describe_samples(whole, ((number, "") for number in numbers), colour)


def _describe_samples(samples: Samples, titled: Iterable[tuple[int, str]], colour: bool) -> Iterator[str]:
    tokenizer = Tokenizer.load(samples.tokenizer_path) if samples.tokenizer_path else None
    for index, title in titled:
        source, epoch, position = samples.identity(index)
        sample = samples.sample(index)
        num_labels = int(sample.loss_mask.sum())
        yield (
            f"{title}global sample {samples.cursor.data_index(index)}: source {source}, epoch {epoch}, "
            f"sample {position}; {num_labels} of {samples.seq_len} labels count"
            + ("" if sample.weights is None else f", of weight {float(sample.weights.sum()):g}")
        )
        yield from _describe_documents(sample, tokenizer, LEARNT_COLOUR if colour else LEARNT_MARKS)


def _describe_documents(sample: Sample, tokenizer: Tokenizer | None, marks: tuple[str, str]) -> Iterator[str]:
    borders = np.flatnonzero(np.diff(sample.document_ids)) + 1
    columns = (sample.document_ids, sample.tokens, np.append(False, sample.loss_mask[:-1]))
    for ids, tokens, learnt in zip(*(np.split(column, borders) for column in columns), strict=True):
        name = "padding" if ids[0] < 0 else f"document {ids[0]}"
        if sample.weights is not None and tokenizer is not None:
            text = _marked(tokens, learnt, tokenizer, marks)
        else:
            text = str(tokens[:SHOWN_CHARS].tolist()) if tokenizer is None else repr(tokenizer.decode(tokens.tolist()))
            text = text[:SHOWN_CHARS]
        yield f"  {name}, {len(ids)} tokens" + ("" if ids[0] < 0 else f": {text}")


def _marked(tokens: np.ndarray, learnt: np.ndarray, tokenizer: Tokenizer, marks: tuple[str, str]) -> str:
    """The text of a document's part, control tokens spelled out, with marks around what is learnt."""
    borders = np.flatnonzero(np.diff(learnt)) + 1
    parts = []
    for own, is_learnt in zip(np.split(tokens, borders), np.split(learnt, borders), strict=True):
        text = repr(tokenizer.decode_all(own.tolist()))[1:-1]
        text = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "\N{HORIZONTAL ELLIPSIS}"
        parts.append(f"{marks[0]}{text}{marks[1]}" if is_learnt[0] else text)
    return "".join(parts)
