"""Numbers in the metadata of documents: a JSON object each, in a column of text; "" is an object without fields.

Sources put into it what `keep_fields` names; `perplexity` and `classifier` add their scores under their own names.
"""

from __future__ import annotations

import numpy as np
import orjson
import pyarrow as pa

from megalite.corpus.documents import ARROW_TYPE


def read_numbers(metadata: pa.Array, field: str) -> np.ndarray:
    """A field of each document as float64 [documents]; NaN where it is missing or no number."""
    return np.array(
        [_number(orjson.loads(each).get(field)) if each else np.nan for each in metadata.to_pylist()], float
    )


def add_numbers(metadata: pa.Array, field: str, values: np.ndarray) -> pa.Array:
    """The metadata with one more field, or another value in it.

    Args:
        values: float [documents].
    """
    pairs = zip(metadata.to_pylist(), values.tolist(), strict=True)
    return pa.array([_with_field(each, field, value) for each, value in pairs], ARROW_TYPE)


def _with_field(metadata: str, field: str, value: float) -> str:
    return orjson.dumps({**(orjson.loads(metadata) if metadata else {}), field: value}).decode()


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else np.nan
