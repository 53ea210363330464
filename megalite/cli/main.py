"""The `megalite` command: gathers the verbs and turns errors into exit codes.

A verb lives in a module of its own and imports what it needs when it is called, so that `--help` and
`megalite config check` answer at once.
"""

from __future__ import annotations

import errno
import os
import reprlib
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn, Protocol, runtime_checkable

import typer

from megalite import __version__
from megalite.cli import (
    ask,
    checkpoint,
    config,
    convert,
    curves,
    data,
    embed,
    generate,
    ladder,
    launch,
    mup,
    plan,
    profile,
    schedule,
    setup,
    sweep,
    train,
)
from megalite.errors import EXIT_BAD_INPUT, EXIT_FAULT, EXIT_INTERRUPTED, UserError
from megalite.host import open_missing_streams
from megalite.plugins import load_plugins, name_for_all


@runtime_checkable
class Showable(Protocol):
    """What can print itself."""

    def show(self) -> None: ...


UsageError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if issubclass(base, Exception) and base.__name__ == "ClickException"
)
"""What a mistyped command raises: click's own class in older Typers, that of a copy inside Typer in newer ones."""

INTERRUPTED = "megalite: interrupted; run the same command again to go on"

IMPOSSIBLE_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EILSEQ)
"""What the system answers to a name that no file could have; other faults of files are told where they arise."""

FAILED_DISK = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT)
"""What it answers when a disk or a server of files fails, or is full, in the middle of the work."""

app = typer.Typer(
    name="megalite",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init")(setup.init)
app.command("train")(train.train)
app.command("lr-find")(train.lr_find)
app.command("sweep")(sweep.sweep)
app.command("ladder")(ladder.ladder)
app.command("verify-resume")(train.verify_resume)
app.command("eval")(ask.evaluate)
app.command("report")(curves.report)
app.command("profile")(profile.profile)
app.command("generate")(generate.generate)
app.command("embed")(embed.embed)
app.command("doctor")(setup.doctor)
app.add_typer(config.app, name="config")
app.add_typer(schedule.app, name="schedule")
app.add_typer(plan.app, name="plan")
app.add_typer(mup.app, name="mup")
app.add_typer(data.app, name="data")
app.add_typer(launch.app, name="launch")
app.add_typer(convert.app, name="convert")
app.add_typer(checkpoint.app, name="checkpoint")


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
    plugin: list[str] = typer.Option(
        [], help="A module or file that brings a model family, an activation ...; for commands without a config."
    ),
) -> None:
    """Large-scale pretraining: data tools, 3D-parallel training, checkpoints that go to Hugging Face."""
    if plugin:
        name_for_all(plugin)
    load_plugins(())
    if version:
        typer.echo(f"megalite {__version__}")
        raise typer.Exit()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 bad input (message on stderr), 3 stopped to be requeued."""
    open_missing_streams()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = app(args=arguments, prog_name="megalite", standalone_mode=False)
    except UserError as error:
        print(f"megalite: {error}", file=sys.stderr)
        code = EXIT_BAD_INPUT
    except OSError as error:
        code = _tell_machine(error)
    except UsageError as error:
        _show(error)
        code = EXIT_BAD_INPUT
    except typer.Abort as error:  # how older Typers report Ctrl-C; newer ones return 130
        if isinstance(error.__cause__, EOFError):  # of a file that ends too soon, which is reported likewise
            raise error.__cause__ from None
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        print(INTERRUPTED, file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Ctrl-C. An exception that comes up while PyTorch is imported goes through its C++, which aborts over it; nothing
    has begun by then."""
    names = [name for name in sys.modules if name == "torch" or name.startswith("torch.")]
    if any(getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False) for name in names):
        print(INTERRUPTED, file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)
    raise KeyboardInterrupt


def _tell_machine(error: OSError) -> int:
    """Say what the system refused, where that is no fault of this program; the exit code."""
    if error.errno in IMPOSSIBLE_PATH:
        print(f"megalite: {reprlib.repr(error.filename)} cannot be a path: {error.strerror}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if isinstance(error, PermissionError) and error.filename:
        print(f"megalite: {error.filename}: {error.strerror}; open it to the user who runs this", file=sys.stderr)
        return EXIT_BAD_INPUT
    if error.errno in FAILED_DISK:
        where = f"{error.filename}: " if error.filename else "a file could not be read or written: "
        print(f"megalite: {where}{error.strerror}; see to the disk, and run the same command again", file=sys.stderr)
        return EXIT_FAULT
    raise error


def _show(error: Exception) -> None:
    assert isinstance(error, Showable), "every error of usage is"
    error.show()
