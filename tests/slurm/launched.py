"""A tiny run that was launched on the test's cluster: what happens to it, and what becomes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from megalite.checkpoint.catalog import latest
from megalite.checkpoint.format import read_manifest
from megalite.slurm.folder import ENDED, LaunchFolder
from megalite.slurm.goodput import measure
from tests.kit.preloaded import preloaded
from tests.kit.runs import COMMAND, metrics, write_run
from tests.kit.slurm import Cluster, until

INJECT = Path(__file__).parent / "inject"

NUM_STEPS = 80

SECTIONS = {
    "parallel": {"tp": 1, "dp": 2, "zero_stage": 1},
    "batch": {"micro_batch_size": 2, "global_batch_size": 8, "seq_len": 32},
    "schedule": {"name": "constant", "warmup_steps": 2},  # a shorter run then has the same first steps
    "train": {"steps": NUM_STEPS, "device": "cpu"},
    "checkpoint": {"every": 10},
    "monitor": {"log_every": 50, "tensorboard": False},
    "slurm": {
        "beat_seconds": 8,
        "start_seconds": 300,
        "step_seconds": 60,
        "max_failures": 4,
        "node_seconds": 1,
        "check_nodes": False,  # imports again; one test has it on
    },
}

PROFILE = {
    "gpus_per_node": 0,
    "ranks_per_node": 1,
    "time_limit": "20:00",
    "save_seconds": 60,
    "environment": {"OMP_NUM_THREADS": "1"},  # as two ranks of one machine have: another number rounds otherwise
    "sbatch": ["--exclusive"],
}

LONGEST_WAIT_SECONDS = 400.0
"""For what takes some ten seconds on a free machine."""

NOTICED = ("trouble", "end", "unreached", "supervisor_lost", "supervisor_cut_off", "cut_off")

LONGEST_DETECTION_SECONDS = 15.0
LONGEST_RETURN_SECONDS = 30.0
"""From a fault to the moment when the run says so, and from there to the ranks of the next attempt: what the project
promises with the time-outs of this cluster."""

LONGEST_LOSS_BY_SLURM_SECONDS = 40.0
"""Until the next job runs, where nothing of the run is left that could notice: Slurm's time-outs alone."""

LAYOUT_TOLERANCE = 1e-4
"""Between losses of two layouts, over some tens of steps: float32 sums in another order (`test_layouts.py`)."""


class Launched:
    """A run on the cluster.

    Args:
        folder: of its files.
        cluster: where it runs.
        sections: of its config, that differ from SECTIONS.
        profile: keys of the cluster profile that differ from PROFILE.
    """

    def __init__(self, folder: Path, cluster: Cluster, sections: dict[str, dict] | None = None, **profile):
        self.cluster = cluster
        names = {*SECTIONS, *(sections or {})}
        self.config = write_run(
            folder, **{name: {**SECTIONS.get(name, {}), **(sections or {}).get(name, {})} for name in names}
        )
        self.profile = folder / "cluster.yaml"
        environment = {
            **PROFILE["environment"],
            **profile.pop("environment", {}),
            "MEGALITE_TEST_FAULTS": str(folder),
        }
        path = f"{INJECT}:{os.environ.get('PYTHONPATH', '')}"
        environment = preloaded({**environment, "PYTHONPATH": path}, with_command=False)
        self.profile.write_text(yaml.safe_dump({**PROFILE, "environment": environment, **profile}))
        self._faults = folder
        self._struck: list[tuple[str, float, float]] = []
        self._cut_off: list[tuple[str, float]] = []
        self.folder = LaunchFolder(folder / "run")
        self.launch()

    def launch(self) -> None:
        """Submit its first job."""
        done = self.megalite("launch", self.config, "--cluster", self.profile)
        assert done.returncode == 0, done.stdout + done.stderr

    def megalite(self, *arguments: str | Path) -> subprocess.CompletedProcess:
        """A command on the login node."""
        command = [*COMMAND, *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=self.cluster.environment, check=False
        )

    @property
    def state(self) -> dict:
        """What the supervisor wrote last."""
        return self.folder.read_state()

    @property
    def batch_host(self) -> str:
        """Where its supervisor runs."""
        return self.cluster.slurm("squeue", "--noheader", f"--jobs={self.state['job']}", "--format=%B")

    @property
    def worker(self) -> str:
        """A node that runs ranks and not the supervisor."""
        host = self.batch_host
        return next(node for node in self.state["nodes"] if node != host)

    def strike(self, what: str, action: Callable[[], object], within: float = LONGEST_DETECTION_SECONDS) -> None:
        """Do something to the run that it is to notice within some seconds, and remember when."""
        self._struck.append((what, time.time(), within))
        action()

    def cut_off(self, what: str, action: Callable[[], object]) -> None:
        """Take away a job's last node, and remember when: only Slurm can notice."""
        self._cut_off.append((what, time.time()))
        action()

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank's process."""
        os.kill(self.rank_process(rank), number)

    def kill_rank_on(self, node: str) -> None:
        """End a rank of a node by SIGKILL."""
        rank = next(rank for rank in range(len(self.state["nodes"])) if self.node_of_rank(rank) == node)
        self.signal_rank(rank, signal.SIGKILL)

    def status(self) -> str:
        """What a person is told of it."""
        return self.megalite("launch", "status", self.folder.run_dir).stdout

    def inject(self, rank: int, fault: str) -> None:
        """Let a rank do something by itself: `tests/slurm/inject`."""
        partial = self._faults / f".fault-{rank}"
        partial.write_text(fault)
        os.replace(partial, self._faults / f"fault-{rank}")

    def release(self) -> None:
        """Let held ranks go on."""
        (self._faults / "release").touch()

    def wait_for_step(self, step: int, attempt: int) -> None:
        """Wait until an attempt has done a step, itself."""

        def is_there() -> bool:
            assert self.state["status"] not in ENDED, self.log()
            starts = [event for event in _lines(self.folder.run_dir / "events.jsonl") if event["event"] == "start"]
            if not starts or starts[-1]["attempt"] != attempt:
                return False
            last = [0, *(row["step"] for row in _lines(self.folder.run_dir / "metrics.jsonl"))][-1]
            return last > starts[-1]["step"] and last >= step

        try:
            until(is_there, f"step {step} in attempt {attempt}", LONGEST_WAIT_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from error

    def wait_for_end(self) -> str:
        """Wait until the run has ended; its status."""
        try:
            until(lambda: self.state["status"] in ENDED, "the end of the run", LONGEST_WAIT_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from error
        jobs = [event["job"] for event in self.folder.read_events() if event["event"] == "job"]
        until(lambda: not set(self.cluster.live_jobs()) & set(jobs), "the end of its jobs")
        return self.state["status"]

    def rank_process(self, rank: int) -> int:
        """A rank's process number on this machine."""
        return self._find_rank(rank)[0]

    def node_of_rank(self, rank: int) -> str:
        """Where Slurm has put a rank."""
        return self._find_rank(rank)[1]

    def rank_log(self, rank: int, attempt: int) -> str:
        """What a rank has said."""
        return (self.folder.attempt(attempt) / f"rank-{rank}.log").read_text()

    def _find_rank(self, rank: int) -> tuple[int, str]:
        """Its process, which a server may have forked for the one that its agent started, and its node."""
        log = self.folder.attempt(self.state["attempt"]) / f"rank-{rank}.log"
        found, node = None, None
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                if os.readlink(entry / "fd" / "1") != str(log):
                    continue
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            is_started = b"megalite.slurm.rank" in command
            found = int(entry.name) if found is None or not is_started else found
            if is_started:
                variables = dict(line.partition(b"=")[::2] for line in environment.split(b"\0"))
                node = variables[b"SLURMD_NODENAME"].decode()
        assert found is not None, f"rank {rank} has no process\n{self.log()}"
        assert node is not None, f"rank {rank} has no stand-in\n{self.log()}"
        return found, node

    def wait_for_save(self, node: str) -> None:
        """Wait until the supervisor has noticed that Slurm cannot reach a node, and the ranks have begun to save."""

        def is_saved() -> bool:
            lost = [event["nodes"] for event in self.folder.read_events() if event["event"] == "unreached"]
            return any(node in nodes for nodes in lost) and not self.folder.save.exists()

        until(is_saved, f"a checkpoint as Slurm lost sight of {node}")

    def events(self) -> list[tuple[str, int | None]]:
        """What has happened, and in which attempt."""
        return [(event["event"], event.get("attempt")) for event in self.folder.read_events()]

    def ends(self) -> list[str]:
        """Why each attempt ended."""
        return [event["why"] for event in self.folder.read_events() if event["event"] == "end"]

    def log(self) -> str:
        """What the supervisors said."""
        return "\n".join(path.read_text() for path in sorted(self.folder.jobs.glob("*.log")))

    def assert_quick(self) -> None:
        """Every fault was noticed in time, and followed by ranks in time; the seconds are printed."""
        events = self.folder.read_events()
        starts = [event for event in events if event["event"] == "attempt"]
        for what, struck, within in self._struck:
            noticed = next(e for e in events if e["time"] > struck and e["event"] in NOTICED)
            again = next(event for event in starts if event["time"] > noticed["time"])
            detection, back = noticed["time"] - struck, again["time"] - noticed["time"]
            print(f"{what}: noticed after {detection:.1f} s, next attempt after {back:.1f} s")
            assert detection < within, what
            assert back < LONGEST_RETURN_SECONDS, what
        for what, struck in self._cut_off:
            again = next(event["time"] for event in events if event["time"] > struck and event["event"] == "job")
            print(f"{what}: Slurm started the next job after {again - struck:.1f} s")
            assert again - struck < LONGEST_LOSS_BY_SLURM_SECONDS, what
        self._print_costs(starts)

    def _print_costs(self, starts: list[dict]) -> None:
        """Seconds of each fault that did not go into steps that count; `starts` are the events of attempts."""
        goodput = measure(self.folder, time.time())
        print(f"{100 * goodput.share:.0f} % of {goodput.total:.0f} s went into steps that count")
        for what, struck, *_ in (*self._struck, *self._cut_off):
            place = max(place for place, start in enumerate(starts) if start["time"] < struck)
            hit, following = goodput.attempts[place : place + 2]
            between = starts[place + 1]["time"] - starts[place]["time"] - hit.total
            parts = {"still": hit.stalled, "again": hit.lost, "between": between, "starting": following.starting}
            seconds = ", ".join(f"{name} {part:.1f}" for name, part in parts.items())
            print(f"{what}: {sum(parts.values()):.1f} s of goodput: {seconds}")

    def assert_as(self, undisturbed: Path) -> None:
        """Every step's loss and norm as those of another run, bit for bit, and every sample consumed once, in order."""
        found, expected = metrics(self.folder.run_dir), metrics(undisturbed)
        for key in ("step", "loss", "grad_norm", "tokens"):
            assert [row[key] for row in found] == [row[key] for row in expected]
        own, other = (read_manifest(latest(folder)).progress for folder in (self.folder.run_dir, undisturbed))
        assert own == other


def at_once(*scenarios: Callable[[], object]) -> None:
    """Run scenarios at the same time, each with nodes of its own: most of them wait most of the time."""
    with ThreadPoolExecutor(len(scenarios)) as pool:
        for future in [pool.submit(scenario) for scenario in scenarios]:
            future.result()


def _lines(path: Path) -> list[dict[str, Any]]:
    """What a run has written so far. A full disk leaves half a line, until it is rewound."""
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in whole]
