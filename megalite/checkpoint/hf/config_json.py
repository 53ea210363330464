"""config.json, written for every reader in use.

transformers 4 and 5 keep rotary settings, number format and NeoX's rotary fraction under different keys, and version 4
silently takes its defaults when it finds only version 5's. So both forms are written, and they agree.
"""

from __future__ import annotations

from collections.abc import Mapping

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.family import Family

FILE_NAME = "config.json"


def write_config(model: Architecture, family: Family, *, dtype: str, special_ids: Mapping[str, int | None]) -> dict:
    """The contents of config.json.

    Args:
        model: filled.
        family: from `choose_family(model)`.
        dtype: torch's name of the number format, `bfloat16`.
        special_ids: bos_token_id, eos_token_id and pad_token_id, None where there is no such token. Left out, they
            would be the class's own, which are of another vocabulary.
    """
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        **{key.name: getattr(model, field) for field, key in family.keys.items()},
        **family.write(model),
        **special_ids,
        "use_cache": True,
    }
