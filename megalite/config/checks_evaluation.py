"""What must hold between the settings of validation: sets, tasks, early stopping and the best checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.evaluation_names import task_name, validation_sets
from megalite.config.schema import Config
from megalite.config.wording import or_


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
    if config.checkpoint.keep_best is not None and train.tasks and not names:
        yield (
            f"checkpoint.keep_best: {config.checkpoint.keep_best} has no effect without data.valid; add a source to "
            "it, or use null"
        )
    taken = [task_name(task) for task in train.tasks]
    for name in sorted({name for name in taken if taken.count(name) > 1}):
        yield f"train.tasks: {taken.count(name)} tasks are called {name!r}; give each a name of its own"
