"""What a component of the training loop may not do: to a step, by its answers, in its state."""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

from megalite.monitor.records import STEP_KEYS, whose_name

Answer = TypeVar("Answer")


def check_wish(before: object, why: object, skip_samples: object) -> None:
    """Refuse a wish to go back that makes no sense.

    Raises:
        ValueError: naming what is wrong.
    """
    for name, value in (("before", before), ("skip_samples", skip_samples)):
        is_none = value is None and name == "skip_samples"
        if not is_none and (type(value) is not int or value < 0):
            raise ValueError(f"RollBack: {name} is {value!r}, expected a whole number of at least 0")
    if not isinstance(why, str):
        raise ValueError(f"RollBack: why is {why!r}, expected text")


def check_step(moment: str, former: Any, step: Any) -> None:
    """Refuse what a component has made of a step: what is no number, takes another's place, or comes too late.

    Args:
        moment: the method that it was called by.
        former: the step before that.

    Raises:
        ValueError: naming the first.
    """
    for name in ("number", "batches", "samples", "data", "num_tokens", "num_tokens_total"):
        value, before = getattr(step, name), getattr(former, name)
        if value is not before and (name != "batches" or list(map(id, value)) != list(map(id, before))):
            raise ValueError(f"{name} was changed, which is not a component's; it may set lr, clip_norm and figures")
    for name in ("lr", "clip_norm"):
        value, before = getattr(step, name), getattr(former, name)
        if value is not before and moment != "before_step":
            raise ValueError(f"{name} was set to {value!r}, which is too late for this step; set it in before_step")
        is_none = value is None and name == "clip_norm"
        if not is_none and not (_is_number(value) and 0.0 <= value < math.inf):
            raise ValueError(f"{name} is {value!r}, expected a number of at least 0 (of a tensor, .item())")
    for name, value in {**former.figures, **step.figures}.items():
        if name in former.figures and step.figures.get(name) is value is former.figures[name]:
            continue
        if name in former.figures or name in STEP_KEYS:
            raise ValueError(
                f"{name!r} stands in metrics.jsonl already; leave it as it is, and give the figure another name"
            )
        if (others := whose_name(name)) is not None:
            raise ValueError(f"{name!r}: {others} a number of this name; give the figure another")
        if not _is_number(value):
            raise ValueError(f"figure {name!r} is {value!r}, expected a number (of a tensor, .item())")
        if moment == "after_step":
            raise ValueError(f"figure {name!r} is too late for this step's line; set it in measure")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state, when a checkpoint can hold it.

    Raises:
        TypeError: it would not come back as it is.
    """
    json.dumps(state)
    inside = [state]
    while inside:
        found = inside.pop()
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise TypeError(f"state {found!r}, expected a dict whose keys are text")
        inside += [value for value in found.values() if isinstance(value, dict)]
    return state


def check_answer(answer: Answer, *kinds: type) -> Answer:
    """What a method returned, when it is one of those.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(answer, kinds):
        raise TypeError(f"it returned {answer!r}, expected {' or '.join(kind.__name__ for kind in kinds)}")
    return answer
