"""The tasks of a config, opened: read, tokenized and checked before a process starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.evaluation import task_name
from megalite.config.schema import TaskConfig
from megalite.errors import DataError
from megalite.tokenizer.tokenizer import Tokenizer
from megalite.train.evaluation.questions import Question, Request, make_requests, read_questions, text_prefix


@dataclass(frozen=True)
class Task:
    """A task, ready to be scored."""

    name: str
    questions: tuple[Question, ...]
    requests: tuple[Request, ...]
    """Of every choice of every question, in order."""
    alarm_drop: float | None = None


def open_tasks(
    tasks: Sequence[TaskConfig], tokenizer_folder: Path | None, *, seq_len: int, vocab_size: int
) -> list[Task]:
    """Open tasks.

    Args:
        tasks: as configured.
        tokenizer_folder: the tokenizer of the training data; None when nobody knows it.
        seq_len: tokens that the model reads at most.
        vocab_size: of the model.

    Raises:
        DataError: a file is not one of questions, or there is no tokenizer that fits the model.
    """
    if not tasks:
        return []
    if tokenizer_folder is None:
        raise DataError("train.tasks: the data does not say which tokenizer it was made with; set data.tokenizer")
    tokenizer = Tokenizer.load(tokenizer_folder)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"train.tasks: {tokenizer_folder} has {tokenizer.vocab_size} tokens and the model vocab_size={vocab_size}; "
            "set data.tokenizer to the one of the training data"
        )
    prefix = text_prefix(tokenizer_folder)
    return [_open(task, tokenizer, seq_len, prefix) for task in tasks]


def _open(task: TaskConfig, tokenizer: Tokenizer, seq_len: int, prefix: Sequence[int]) -> Task:
    questions = tuple(read_questions(task.path, task.limit))
    try:
        requests = tuple(
            request for question in questions for request in make_requests(question, tokenizer, seq_len, prefix)
        )
    except DataError as error:
        raise DataError(f"{task.path}: {error}") from error
    return Task(task_name(task), questions, requests, task.alarm_drop)
