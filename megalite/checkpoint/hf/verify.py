"""A Hugging Face folder proven equal to a checkpoint, or refused.

    every tensor     read back through `HuggingFaceWeights`, bit-equal to the checkpoint's weight, rounded as exported
    config.json      read back as the same model
    logits           transformers in a fresh process against `model.transformer.Stage`, both fp32 on the CPU
    ids              AutoTokenizer in the same process against the tokenizer that training used

The first two show that nothing was lost, the third that transformers means the same by it. Logits alone would not do:
a flipped low bit changes them by less than two implementations differ.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

import megalite
from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Rectangle, Weight, stored_table
from megalite.checkpoint.hf import reload
from megalite.checkpoint.hf.importer import DERIVABLE, HuggingFaceWeights
from megalite.checkpoint.hf.layout import one_thread, row_blocks
from megalite.checkpoint.hf.packed import AsPacked, PackedWeights, Packing
from megalite.checkpoint.hf.probes import TEXTS, Probe, make_probes
from megalite.checkpoint.hf.shards import DTYPES
from megalite.checkpoint.hf.stages import COMPARING, COMPUTING, RELOADING, Say, silent
from megalite.errors import ConversionError
from megalite.layers.documents import Documents
from megalite.layers.parts import choose_parts
from megalite.model.initialize import WeightSource
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage
from megalite.tokenizer.chat_template import has_template
from megalite.tokenizer.tokenizer import HUGGING_FACE, Tokenizer

LOGIT_TOLERANCE = 1e-4
"""Of logits up to `USUAL`, fp32; of larger ones in proportion. Sums in another order differ by some 1e-6; a wrong
layout, rotation or norm by 0.01 and more."""

TIE = 1e-5
"""Logits nearer than this are equally large in fp32, and either may be the largest; of large ones likewise."""

USUAL = 10.0
"""Logits that are no larger round as far as those of fresh models."""

BLOCK_NUMBER = re.compile(r"\b(?:layers|h)\.(\d+)\.")

PACKAGE_ROOT = Path(megalite.__file__).parents[1]

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

STDERR_LINES = 12

NO_SPACE = os.strerror(errno.ENOSPC)


@dataclass(frozen=True)
class Verdict:
    """What was compared and found equal."""

    transformers: str
    """Version of transformers that read the folder."""
    num_weights: int
    num_blocks: int
    """Blocks that were run; fewer than the model has only when asked for."""
    num_sequences: int
    num_tokens: int
    max_difference: float
    """Largest absolute difference of two logits."""
    num_texts: int
    """With equal ids; 0 without a tokenizer."""
    tokenizer_problem: str | None = None
    """How transformers reads the folder's tokenizer otherwise than training did."""


@dataclass(frozen=True)
class Answer:
    """What `judge` found."""

    transformers: str
    max_difference: float
    tokenizer_problem: str | None


class Rounded:
    """A weight source as it looks after a trip through a smaller number format."""

    def __init__(self, source: WeightSource, dtype: str):
        self._source = source
        self._dtype = DTYPES[dtype]

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        part = self._source.read(weight, rectangle)
        return part if weight.state is not None else part.to(self._dtype).float()


def verify(
    folder: Path,
    source: WeightSource,
    model: Architecture,
    *,
    dtype: str = "fp32",
    tokenizer: Tokenizer | None = None,
    num_blocks: int | None = None,
    say: Say = silent,
    packing: Packing | None = None,
) -> Verdict:
    """Compare a Hugging Face folder with the weights it stands for.

    Args:
        folder: to check.
        source: the canonical weights, unrounded.
        model: filled.
        dtype: number format that the folder was written in.
        tokenizer: what training used; None when the folder has none.
        num_blocks: run only the first blocks through both, when the whole model does not fit into memory.
        say: is told what begins.
        packing: of the weights that are written as integers; None for no such weights.

    Raises:
        ConversionError: at the first number that differs, or when transformers cannot read the folder. What differs in
            the tokenizer is told in the verdict.
        CheckpointError: tensors are missing, too many, or of another shape.
    """
    num_blocks = min(num_blocks or model.num_layers, model.num_layers)
    rounded: WeightSource = Rounded(source, dtype) if packing is None else AsPacked(packing)
    say(COMPARING)
    with one_thread():
        num_weights = _compare_weights(folder, _stored(folder, model, packing), rounded, model)
    answer = compare_logits(folder, rounded, model, num_blocks, tokenizer=tokenizer, say=say)
    probes = make_probes(model)
    return Verdict(
        transformers=answer.transformers,
        num_weights=num_weights,
        num_blocks=num_blocks,
        num_sequences=len(probes),
        num_tokens=sum(len(probe.tokens) for probe in probes),
        max_difference=answer.max_difference,
        num_texts=len(TEXTS) if tokenizer and not answer.tokenizer_problem else 0,
        tokenizer_problem=answer.tokenizer_problem,
    )


def compare_logits(
    folder: Path,
    source: WeightSource,
    model: Architecture,
    num_blocks: int,
    *,
    tokenizer: Tokenizer | None = None,
    say: Say = silent,
) -> Answer:
    """Run a folder's first blocks through transformers, in a fresh process, and through megalite.

    Args:
        folder: to check.
        source: the canonical weights, rounded as they were written.
        model: filled; all of it.
        num_blocks: at most as many as it has.
        tokenizer: what training used; None when the folder has none.
        say: is told what begins.

    Raises:
        ConversionError: transformers cannot read the folder, does not find all weights, or computes other logits.
    """
    shallow = model.model_copy(update={"num_layers": num_blocks, "mtp": None})  # which logits do not show
    with tempfile.TemporaryDirectory(prefix="megalite-reload-") as name:
        work = Path(name)
        probes = ask(work, model, num_blocks=num_blocks, tokenizer=tokenizer)
        say(RELOADING)
        _reload(folder, work)
        say(COMPUTING)
        return check_answer(work, source, shallow, probes, tokenizer=tokenizer)


def ask(
    work: Path, model: Architecture, *, num_blocks: int | None = None, tokenizer: Tokenizer | None = None
) -> list[Probe]:
    """Leave the question of a verification in a folder, for `reload` to answer.

    Args:
        work: an existing folder.
        model: filled.
        num_blocks: to run; None for all.
        tokenizer: what training used; None when the folder to read has none.

    Returns:
        The sequences that are asked about.

    Raises:
        ConversionError: the folder cannot be written.
    """
    probes = make_probes(model)
    request = {
        "sequences": [asdict(probe) for probe in probes],
        "num_blocks": num_blocks or model.num_layers,
        "texts": TEXTS if tokenizer else (),
        "add_nothing": tokenizer is not None and (tokenizer.kind == HUGGING_FACE or has_template(tokenizer.folder)),
    }
    try:
        (work / reload.REQUEST).write_text(json.dumps(request), encoding="utf-8")
    except OSError as error:
        raise _no_room(work, error) from error
    return probes


def _no_room(work: Path, why: object) -> ConversionError:
    """For questions and answers, which may lie on another disk than what is converted."""
    return ConversionError(
        f"{work.parent}: temporary files cannot be written ({why}), by which logits are compared; make room there, or "
        "set TMPDIR to another disk"
    )


def check_answer(
    work: Path,
    source: WeightSource,
    model: Architecture,
    probes: Sequence[Probe],
    *,
    tokenizer: Tokenizer | None = None,
) -> Answer:
    """Compare the answer to a question with what megalite computes.

    Args:
        work: where `ask` left the question and `reload` the answer.
        source: the canonical weights, rounded as they were written.
        model: with the blocks that were run.
        probes: from `ask`.
        tokenizer: as for `ask`.

    Raises:
        ConversionError: transformers does not find all weights, or computes other logits.
    """
    report = json.loads((work / reload.REPORT).read_text(encoding="utf-8"))
    _check_loading(report, model.num_layers)
    difference = _compare_logits(work / reload.LOGITS, compute_logits(source, model, probes))
    problem = _compare_texts(report, tokenizer) if tokenizer is not None else None
    return Answer(report["transformers"], difference, problem)


@torch.inference_mode()
def compute_logits(source: WeightSource, model: Architecture, probes: Sequence[Probe]) -> Iterator[Tensor]:
    """Megalite's own logits `[t, v]` of each sequence, fp32 in this process."""
    parts = choose_parts(model, "cpu", torch.float32)
    stage = Stage(StageSpec(model=model, parts=parts), source).eval()
    for probe in probes:
        length = len(probe.tokens)
        borders = torch.tensor([0, length], dtype=torch.int32)
        documents = Documents(torch.tensor(probe.positions), borders, length, keys=torch.arange(length))
        yield stage.logits(torch.tensor(probe.tokens), documents)


def _stored(folder: Path, model: Architecture, packing: Packing | None) -> WeightSource:
    """The weights of a folder. Its files stay mapped as long as somebody has this."""
    return HuggingFaceWeights(folder, model) if packing is None else PackedWeights(folder, packing)


def _compare_weights(folder: Path, stored: WeightSource, expected: WeightSource, model: Architecture) -> int:
    """Read every tensor back, block by block, and return their number."""
    table = stored_table(model)
    for weight in table.values():
        for rows in row_blocks(weight.shape):
            wanted = expected.read(weight, rows)
            if not wanted.isfinite().all():
                raise ConversionError(
                    f"{weight.name} holds NaN or infinite numbers, with which no model computes anything; take a "
                    "checkpoint from before they arose"
                )
            if not torch.equal(stored.read(weight, rows), wanted):
                raise ConversionError(
                    f"{weight.name} reads back from {folder.name} with other numbers: damaged on the way"
                )
    return len(table)


def _reload(folder: Path, work: Path) -> None:
    """Have a fresh process answer."""
    command = [sys.executable, "-m", reload.__name__, str(folder.absolute()), str(work)]
    paths = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 and NO_SPACE in done.stderr:
        raise _no_room(work, NO_SPACE)
    if done.returncode != 0:
        last = "\n".join(done.stderr.strip().splitlines()[-STDERR_LINES:])
        fails = "reads, but cannot run," if (work / reload.LOADED).exists() else "cannot read"
        raise ConversionError(f"transformers {fails} {folder.name} in a fresh process, and says:\n{last}")


def _check_loading(report: dict, num_blocks: int) -> None:
    """Every key was used and none was missing; blocks left out on purpose and derived buffers do not count."""
    for kind in ("missing", "unexpected", "mismatched"):
        keys = [key for key in report[kind] if not _is_beyond(key, num_blocks) and not DERIVABLE.search(key)]
        if keys:
            raise ConversionError(f"transformers {report['transformers']} finds {kind} keys: {', '.join(keys)}")


def _is_beyond(key: str, num_blocks: int) -> bool:
    match = BLOCK_NUMBER.search(key)
    return match is not None and int(match[1]) >= num_blocks


def _compare_texts(report: dict, tokenizer: Tokenizer) -> str | None:
    """Equal ids, and for our own tokenizers equal texts from them; how others tidy up a text is their own affair."""
    for text, theirs, ours in zip(TEXTS, report["ids"], tokenizer.encode_batch(TEXTS), strict=True):
        if theirs != ours:
            return f"transformers tokenizes {_shown(text)} as {theirs[:12]}, training as {ours[:12]}"
    if tokenizer.kind == HUGGING_FACE:
        return None
    for ids, text in zip(report["ids"], report["decoded"], strict=True):
        our_text = tokenizer.decode(ids)
        if text != our_text:
            return f"transformers decodes {ids[:12]} to {_shown(text)}, megalite to {_shown(our_text)}"
    return None


def _shown(text: str) -> str:
    return repr(text[:40]) + ("..." if len(text) > 40 else "")


def _compare_logits(path: Path, expected: Iterator[Tensor]) -> float:
    """The largest difference of any two logits."""
    largest = 0.0
    with safe_open(path, framework="pt") as file:
        for number, ours in enumerate(expected):
            theirs = file.get_tensor(str(number))
            if theirs.shape != ours.shape:
                raise ConversionError(f"logits are {list(theirs.shape)} in transformers, expected {list(ours.shape)}")
            difference = (theirs - ours).abs().max().item()
            scale = max(1.0, ours.abs().max().item() / USUAL)
            at_their_best = ours.gather(1, theirs.argmax(1, keepdim=True)).squeeze(1)
            num_wrong = int((ours.amax(1) - at_their_best > TIE * scale).sum())
            if not difference <= LOGIT_TOLERANCE * scale or num_wrong:
                raise ConversionError(
                    f"transformers computes another model: logits differ by up to {difference:.3g} (at most "
                    f"{LOGIT_TOLERANCE * scale:g} is allowed) and {num_wrong} of {len(ours)} predictions, in "
                    f"sequence {number}"
                )
            largest = max(largest, difference)
    return largest
