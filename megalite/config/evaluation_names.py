"""What validation sets and tasks are called, from what the config says of them."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.config.schema import SourceConfig, TaskConfig


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
