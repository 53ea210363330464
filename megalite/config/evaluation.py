"""Validation: what its sets and tasks are called, and what must hold between its settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megalite.config.schema import Config, EarlyStoppingConfig, SourceConfig, TaskConfig
from megalite.config.wording import or_, unused


def validation_sets(sources: Sequence[SourceConfig]) -> dict[str, tuple[int, ...]]:
    """The sources of each validation set, as their numbers in the list, by its name.

    Sources that are given one name are one set. One without a name is a set of its own, called after its path, and
    numbered where another set is called so.
    """
    sets: dict[str, tuple[int, ...]] = {}
    for place, source in enumerate(sources):
        if source.name is not None:
            sets[source.name] = (*sets.get(source.name, ()), place)
            continue
        name = last_part = source.path.absolute().name
        number = 1
        while name in sets or any(name == other.name for other in sources):
            number += 1
            name = f"{last_part}-{number}"
        sets[name] = (place,)
    return sets


def task_name(task: TaskConfig) -> str:
    """The name of a task: as given, or its file's without the ending."""
    return task.name or task.path.stem


def check_evaluation(config: Config) -> Iterator[str]:
    """Complaints about what a run is judged by."""
    train, names = config.train, list(validation_sets(config.data.valid))
    if train.eval_every is not None and not names and not train.tasks:
        yield f"train.eval_every: found {train.eval_every}, but data.valid is empty; add a source to it, or set null"
    if train.watch is not None and train.watch not in names:
        have = or_(names) if names else "nothing"
        yield f"train.watch: found {train.watch!r}, but data.valid has {have}; name one of its sets, or use null"
    if train.early_stopping is not None:
        missing = [key for key, given in (("train.eval_every", train.eval_every), ("data.valid", names)) if not given]
        if missing:
            yield (
                f"train.early_stopping: it has no effect without {' and '.join(missing)}; set "
                f"{'both' if len(missing) == 2 else 'it'} too, or use null"
            )
        yield from _early_stopping(train.early_stopping, names)
    if config.checkpoint.keep_best is not None and train.tasks and not names:
        yield (
            f"checkpoint.keep_best: {config.checkpoint.keep_best} has no effect without data.valid; add a source to "
            "it, or use null"
        )
    taken = [task_name(task) for task in train.tasks]
    for name in sorted({name for name in taken if taken.count(name) > 1}):
        yield f"train.tasks: {taken.count(name)} tasks are called {name!r}; give each a name of its own"


def _early_stopping(rule: EarlyStoppingConfig, names: Sequence[str]) -> Iterator[str]:
    if rule.patience is None:
        yield from unused(rule, ("min_delta",), "train.early_stopping", "patience=null")
        if rule.slope is None and rule.target is None:
            yield "train.early_stopping: patience, slope and target are all null; set one of them, or use null"
    if rule.set is not None and names and rule.set not in names:
        yield f"train.early_stopping.set: found {rule.set!r}, but data.valid has {or_(names)}; name one of its sets"
