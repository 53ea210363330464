"""Station: a tokenizer with a chat template of one's own, which goes along with data and models from here on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import xxhash

from megalite.errors import DataError
from megalite.stations.station import StationResult, run_station
from megalite.tokenizer.chat_template import TEMPLATE_FILE, for_chats
from megalite.tokenizer.tokenizer import CONFIG_FILE, FAST_FILE, MODEL_FILE, RECORD_FILE, fingerprint_files

COPIED = (
    FAST_FILE,
    MODEL_FILE,
    RECORD_FILE,
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)


def chat_tokenizer(tokenizer: Path, template: Path, out: Path) -> StationResult:
    """Run the station.

    Args:
        tokenizer: a tokenizer's folder; its ids stay.
        template: a file with a chat template.
        out: folder to make.

    Raises:
        DataError: the template cannot be read.
    """
    try:
        text = template.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{template}: cannot be read ({error}); name a file with a chat template (jinja)") from error

    def build(folder: Path) -> dict[str, Any]:
        for name in COPIED:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)
        if (folder / CONFIG_FILE).is_file():
            config = for_chats(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))
            config.pop("chat_template", None)  # which transformers would take before the file
            (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (folder / TEMPLATE_FILE).write_text(text, encoding="utf-8")
        return {"characters": len(text)}

    config_file = tokenizer / CONFIG_FILE
    parts = [fingerprint_files(tokenizer), config_file.read_text("utf-8") if config_file.is_file() else "", text]
    made_of = xxhash.xxh3_128_hexdigest("\0".join(parts).encode())
    return run_station("chat-tokenizer", out, inputs=[(tokenizer, made_of)], settings={}, build=build)
