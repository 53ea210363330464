"""What a person looks at before a long run: `megalite doctor CONFIG`. One line each, with what to do.

    probe      the run's own ranks: loss and gradients of the first step, seconds of some more, one batch overfitted
    alone      the same first step on one rank, or in other micro-batches: the loss may not know of the layout
    restart    some steps, and some + restart + some (`verify_resume`)
    data       the first samples as text
    plan       measured seconds against the planner's, for a machine whose numbers are known

The run's folder is not touched. What cannot be looked at here is said, with the reason.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megalite.config.plan import default_world_size, make_plan
from megalite.config.schema import Config
from megalite.data.run_config import load_run
from megalite.data.samples import Samples
from megalite.errors import EXIT_DONE, EXIT_REQUEUE, DataError, UserError
from megalite.planner.estimate import estimate
from megalite.planner.machines import load_machine
from megalite.studies.aside import aside
from megalite.studies.probe_report import ProbeReport, expected_first_loss
from megalite.studies.verify_resume import verify_resume
from megalite.tokenizer.tokenizer import Tokenizer
from megalite.train.local import run_local_ranks
from megalite.train.preflight import preflight

LOSS_SPREAD = 0.3
"""Of the first loss around what its initialisation comes to: attention and MLPs have a say too."""

LEARNT = 1.0
"""Nats below log V at which weights that are taken over must be at least, to have learnt anything."""

OVERFITTED = 0.5
"""Share of the first loss that a batch must be brought to when it is trained on alone."""

LOSS_OFF = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""Relative: sums in another order, in this format."""

SLOWER = 1.25
"""Times the plan's seconds."""

RESTART_STEPS = 3
SHOWN_CHARACTERS = 60
NUM_SAMPLES = 4

UNREADABLE = 0.01
"""Share of characters that stand for bytes which are no text."""


@dataclass(frozen=True)
class Look:
    """What was looked at, and how it is."""

    what: str
    is_good: bool | None
    """None: it could not be told here."""
    found: str
    advice: str = ""


Probe = Callable[[Config, int, int], ProbeReport]
"""Of a config on so many ranks, with so many steps on one batch; 0 for the first step alone."""


def check_up(
    path: Path, overrides: Sequence[str] = (), *, overfit_steps: int = 100, probe: Probe | None = None
) -> list[Look]:
    """Look at a run before it begins.

    Args:
        path: the run's YAML file.
        overrides: settings that replace the file's.
        overfit_steps: updates on one batch.
        probe: in place of ranks of this machine.

    Raises:
        UserError: the run cannot start at all.
    """
    config = load_run(path, overrides)
    world_size, probe = default_world_size(config), probe or probe_locally
    with tempfile.TemporaryDirectory(prefix="megalite-") as name:  # where the run's own would be made
        plan, samples, _ = preflight(aside(config, Path(name) / "run"), world_size)
    report = probe(config, world_size, overfit_steps)
    return [
        _reads(samples),
        _first_loss(report),
        _gradients(report),
        _overfits(report, config),
        _layout(report, config, world_size, probe),
        _restart(path, overrides),
        _speed(report, config, world_size, plan.model.vocab_size),
    ]


def probe_locally(config: Config, world_size: int, overfit_steps: int) -> ProbeReport:
    """Probe a config on ranks of this machine.

    Raises:
        UserError: the ranks cannot start, or fail.
    """
    with tempfile.TemporaryDirectory(prefix="megalite-") as name:
        folder = Path(name)
        copied, out = aside(config, folder / "run"), folder / "probe.json"
        code = run_local_ranks(copied, world_size, "megalite.studies.probe", [str(out), str(overfit_steps)])
        if code == EXIT_REQUEUE:  # its ranks were asked to stop
            raise KeyboardInterrupt
        if code != EXIT_DONE:
            raise UserError("the run's first steps failed; what its ranks said stands above")
        return ProbeReport(**json.loads(out.read_text(encoding="utf-8")))


def _reads(samples: Samples) -> Look:
    what = "data is text"
    if samples.tokenizer_path is None:
        return Look(what, None, "the data names no tokenizer", "set data.tokenizer to see it as text")
    try:
        tokenizer = Tokenizer.load(samples.tokenizer_path)
    except DataError as error:
        return Look(what, None, str(error), "set data.tokenizer to see it as text")
    shown, labels, characters, unreadable = "", 0, 0, 0
    for index in range(NUM_SAMPLES):
        sample = samples.sample(index)
        text = tokenizer.decode(sample.tokens[sample.document_ids >= 0].tolist())
        shown = shown or " ".join(text.split())[:SHOWN_CHARACTERS]
        characters, unreadable = characters + len(text), unreadable + text.count("\ufffd")
        labels += int(sample.loss_mask.sum())
    if unreadable > UNREADABLE * max(1, characters):
        share = f"{100 * unreadable / characters:.1f} % of the characters are none: {shown!r}"
        return Look(what, False, share, "the data was made with another tokenizer, or its source was no text")
    if not labels:
        return Look(what, False, "no label counts in the first samples", "see `megalite data show CONFIG`")
    return Look(what, True, f"{shown!r}, {labels:,} labels in {NUM_SAMPLES} samples")


def _first_loss(report: ProbeReport) -> Look:
    what, uniform = "first loss", math.log(report.vocab_size)
    found = f"{report.loss:.3f}, log V is {uniform:.3f}"
    if report.is_fresh:
        expected = expected_first_loss(report)
        is_good = uniform - LOSS_SPREAD <= report.loss <= expected + LOSS_SPREAD
        advice = (
            f"fresh weights should be near {expected:.2f}: look at the initialisation, and whether labels are shifted"
        )
        return Look(what, is_good, found, "" if is_good else advice)
    is_good = report.loss < uniform - LEARNT
    advice = "weights that were trained should be far below it: another tokenizer, or another model than the weights'?"
    return Look(what, is_good, f"{found}, {report.origin}", "" if is_good else advice)


def _gradients(report: ProbeReport) -> Look:
    what, silent = "every weight learns", report.silent
    experts = [name for name in silent if ".experts." in name]
    rest = [name for name in silent if name not in experts]
    if rest:
        some = ", ".join(rest[:4]) + (f" and {len(rest) - 4} more" if len(rest) > 4 else "")
        return Look(what, False, f"no gradient: {some}", "they are not connected to the loss")
    if experts:
        found = f"{len(experts)} matrices of experts had no token in the first step"
        return Look(what, None, found, "with a larger batch they should; see health.experts")
    return Look(what, True, f"{report.num_weights} weights have a gradient, whose norm is {report.grad_norm:.3g}")


def _overfits(report: ProbeReport, config: Config) -> Look:
    what = "overfits one batch"
    if not report.overfit:
        return Look(what, None, "not tried", "")
    first, last, lr = report.overfit[0], report.overfit[-1], config.optimizer.lr
    found = f"{first:.3f} -> {last:.3f} in {len(report.overfit)} steps at lr={lr:g}"
    if last <= OVERFITTED * first:
        return Look(what, True, found)
    slow = "the rate may be too low for it (`megalite lr-find`), or too few steps (--overfit-steps)"
    return Look(what, False, found, slow if last < first else "the loss does not fall: look at rate, labels, masks")


def _layout(report: ProbeReport, config: Config, world_size: int, probe: Probe) -> Look:
    what = "same loss in another layout"
    other, described = _in_another_layout(config, world_size)
    if other is None:
        return Look(what, None, described)
    try:
        found = probe(other, 1, 0)
    except UserError as error:
        return Look(what, None, f"{described}: {error}", "it may not fit on one rank here")
    off = abs(found.loss - report.loss) / abs(found.loss)
    precision = config.precision
    few_bits = precision.gather_bits is not None or precision.fp4 is not None  # one rank's are not, or otherwise
    is_rounded = few_bits or precision.products != "fp32"
    allowed = LOSS_OFF["bf16" if is_rounded else precision.dtype]
    allowed *= 1.0 if precision.fp8 is None else 2.0
    said = f"{report.loss:.6g} and {found.loss:.6g} {described}"
    return Look(what, off <= allowed, said, "" if off <= allowed else "please report it, with the config")


def _in_another_layout(config: Config, world_size: int) -> tuple[Config | None, str]:
    """The same step computed in another way, on one rank."""
    batch = config.batch
    if world_size > 1:
        alone = type(config.parallel)().model_copy(update={"pad_tokens": config.parallel.pad_tokens})
        return config.model_copy(update={"parallel": alone}), "on one rank"
    if batch.global_batch_size == 1:
        return None, "a batch of one sequence on one rank has no other layout"
    size = 1 if batch.micro_batch_size > 1 else batch.global_batch_size
    changed = batch.model_copy(update={"micro_batch_size": size})
    return config.model_copy(update={"batch": changed}), f"in micro-batches of {size}"


def _restart(path: Path, overrides: Sequence[str]) -> Look:
    what = "a restart changes nothing"
    with tempfile.TemporaryDirectory(prefix="megalite-") as name:
        try:
            with _written_to(Path(name) / "said.log"):
                report = verify_resume(path, overrides, RESTART_STEPS, Path(name))
        except (UserError, RuntimeError) as error:
            return Look(what, None, str(error), "try `megalite verify-resume`")
    differing = ", ".join(each.what for each in report.findings if each.until_restart or each.after_restart)
    return Look(what, report.is_equal, report.verdict, differing and f"{differing} differ; docs/checkpoints.md")


@contextmanager
def _written_to(log: Path) -> Iterator[None]:
    """Within it this process, and those that it starts, write to a file what they would say."""
    said = (sys.stdout, sys.stderr)
    for stream in said:
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with log.open("ab", buffering=0) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for stream in said:
            stream.flush()
        for former, number in zip(kept, (1, 2), strict=True):
            os.dup2(former, number)
            os.close(former)


def _speed(report: ProbeReport, config: Config, world_size: int, vocab_size: int) -> Look:
    what, measured = "speed", report.seconds
    plan = make_plan(config, world_size, vocab_size)
    found = f"{plan.tokens_per_step / measured:,.0f} tokens a second, {measured:.3g} s a step"
    if config.monitor.machine is None:
        return Look(what, None, found, "set monitor.machine (`megalite plan calibrate` makes one) to compare a plan")
    planned = estimate(config, world_size, load_machine(config.monitor.machine), vocab_size=vocab_size).seconds
    is_good = measured <= SLOWER * planned
    advice = "see `megalite plan trace`, and docs/plan.md on what else takes time"
    return Look(what, is_good, f"{found}; the plan says {planned:.3g} s", "" if is_good else advice)
