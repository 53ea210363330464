"""Some steps of a run, as people write them."""

from __future__ import annotations

import re


def parse_step_range(text: str) -> range:
    """`A:B` as a range of steps: A, A + 1, ..., B - 1, counted from 1 as in metrics.jsonl.

    Raises:
        ValueError: it is written otherwise, is empty or begins before step 1.
    """
    match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    if not steps or steps.start < 1:
        raise ValueError(
            "write A:B for the steps A to B - 1, with 1 <= A < B; steps are counted from 1, so 1:5 is the first four"
        )
    return steps
