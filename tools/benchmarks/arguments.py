"""What the benchmarks' options may be: looked at before anything is measured, for figures that cannot be written after
an hour, or a name that is no case's, cost that hour.

Each is a `type` of argparse: it returns the value, or says what was found and what was expected, with exit code 2.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path


def count(text: str) -> int:
    """A whole number from 1 on."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, a whole number from 1 on was expected")
    return number


def amount(text: str) -> float:
    """A number larger than 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text!r}, a number larger than 0 was expected")
    return number


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, a number from 0 to 1 was expected")
    return number


def listed(kind: Callable[[str], object]) -> Callable[[str], list]:
    """Several of a kind, with commas between them."""
    return lambda text: [kind(each) for each in text.split(",")]


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Some of the names that there are, with commas between them."""
    known = tuple(known)

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"found {text!r}, there are {', '.join(known)}")
        return text

    return listed(name)


def folder(text: str) -> Path:
    """A folder that is there and can be written."""
    path = Path(text)
    if not path.is_dir():
        what = "is no folder" if os.path.lexists(path) else "is not there"
        raise argparse.ArgumentTypeError(f"{path} {what}; make it, or name one that is")
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written; name a folder that can")
    return path


def new_folder(text: str) -> Path:
    """A folder that is there, or can be made."""
    path = Path(text)
    folder(str(next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))))
    return path


def existing(text: str) -> Path:
    """A file or folder that is there and can be read."""
    path = Path(text)
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{path} is not there, or cannot be read")
    return path


def out_file(text: str) -> Path:
    """A file to write, in a folder that is there."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    folder(str(path.parent))
    return path


def config_value(text: str) -> tuple[str, str, object]:
    """Section, key and value of `SECTION.KEY=VALUE`."""
    import yaml

    name, equals, value = text.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key and "." not in key):
        raise argparse.ArgumentTypeError(f"found {text!r}, SECTION.KEY=VALUE was expected")
    try:
        return section, key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, whose value is no YAML") from error


def device_name(text: str) -> str:
    """A device of torch that is here."""
    import torch

    try:
        kind = torch.device(text).type
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}; {str(error).splitlines()[0]}") from error
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise argparse.ArgumentTypeError(f"found {text!r}, which is not here; with `cpu --tiny` it is a rehearsal")
    return text
