"""What a plug-in's component wants or sets on one rank alone: all ranks follow, or the run ends with its name."""

from __future__ import annotations

import signal

from megalite.train.failures import error_path, read_error
from tests.kit.runs import events, megalite, metrics, start, wait_until, write_run

CODE = """
from pathlib import Path

import torch.distributed as dist

from megalite import extend
from megalite.train.components.component import Component, RollBack


@extend.component("odd")
class Odd(Component):
    def __init__(self, context, *, when: str):
        self.when, self.is_last, self.has_wished = when, context.axes.global_rank == 1, False
        self.folder = Path(context.config.run.dir)

    def wish(self, when, step):
        if self.when == when and self.is_last and step == 3 and not self.has_wished:
            self.has_wished = True
            return RollBack(3, f"the second rank says so {when}")

    def before_step(self, step):
        if self.is_last and step.number == 2 and self.when == "rate":
            step.lr = 0.5
        if self.is_last and step.number == 2 and self.when == "clip":
            step.clip_norm = None
        if self.is_last and step.number == 2 and self.when == "hang":
            (self.folder / "hangs").touch()
            dist.barrier()  # the other one is not there

    def after_step(self, step, result):
        return self.wish("after", step.number)

    def before_save(self, step):
        return self.wish("before", step)
"""


def write(folder, **sections):
    """A run on two ranks with a component that only the second has ideas of."""
    config = write_run(
        folder,
        **{
            "parallel": {"tp": 1, "dp": 2},
            "optimizer": {"clip_grad_norm": 1.0},
            "train": {"steps": 4},
            "checkpoint": {"every": 1},
            "monitor": {"tensorboard": False},
            **sections,
        },
    )
    (folder / "odd.py").write_text(CODE)
    config.write_text(f"plugins: [{folder / 'odd.py'}]\n{config.read_text()}")
    return config


def odd(when: str) -> str:
    return f"train.components={{odd: {{when: {when}}}}}"


def test_one_rank_wants_to_go_back(tmp_path):
    """All do, after a step and before a save, and the run comes to its end."""
    config = write(tmp_path)
    for when in ("after", "before"):
        done = megalite("train", config, odd(when), f"run.dir={tmp_path / when}")
        assert done.returncode == 0, done.stdout + done.stderr
        (back,) = [each for each in events(tmp_path / when) if each["event"] == "rollback"]
        assert (back["step"], back["to_step"], back["why"]) == (3, 2, f"the second rank says so {when}")
        assert [line["step"] for line in metrics(tmp_path / when)] == [1, 2, 3, 4]


def test_one_rank_sets_another_rate(tmp_path):
    """Or clips otherwise: the run ends with that step, and nothing of it is saved."""
    config = write(tmp_path)
    for when, differs in (("rate", "rank 1: lr=0.5, clip_norm=1.0"), ("clip", "clip_norm=None")):
        done = megalite("train", config, odd(when), f"run.dir={tmp_path / when}")
        assert done.returncode == 1, done.stdout
        assert "ranks have trained step 2 with different settings (rank 0: lr=" in done.stderr
        assert differs in done.stderr
        assert "last set by odd" in done.stderr
        assert not (tmp_path / when / "checkpoints" / "step-0000002").exists()


def test_ranks_that_hang_end_when_they_are_asked_to(tmp_path):
    """After slurm.step_seconds, also where nobody is left to kill them: the launcher waits no longer, and says where
    they hung; killed itself, it leaves no rank behind."""
    config = write(tmp_path, slurm={"step_seconds": 4})
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = start("train", config, odd("hang"), f"run.dir={tmp_path / str(number)}")
        wait_until((tmp_path / str(number) / "hangs").exists, "the hang", process)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)  # returns when nobody is left who could write
        assert process.returncode == (-number if number == signal.SIGKILL else 1), said
        assert number == signal.SIGKILL or "failed first:\nasked to stop, but nothing has moved on for 4 s" in said
        record = read_error(error_path(tmp_path / str(number), 0))
        assert "for 4 s in step 2, train, so this rank ends without a save" in record["message"]


def test_a_plug_in_that_fails_on_one_rank_is_named(tmp_path):
    """Wherever the config is read: with the plug-in's file and line, as bad input."""
    config = write(tmp_path)
    code = "import os\nif os.environ.get('RANK', '0') != '0':\n    raise ValueError('not here')\n"
    (tmp_path / "odd.py").write_text(code + CODE)
    for command in (("train",), ("lr-find", "--steps", "2")):
        done = megalite(*command, config)
        assert done.returncode == 2, done.stderr
        assert f"odd.py: cannot be imported: ValueError: not here ({tmp_path / 'odd.py'}:3)" in done.stderr
        assert "Traceback" not in done.stderr
