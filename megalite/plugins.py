"""Doors for code from outside: the tables that it adds to, and how it is found and loaded.

    plugins: [emoji_rules, my/optimizers.py]            in a config or a recipe: a module, or a file
    [project.entry-points."megalite.plugins"]           of an installed package: loaded with every config

A plug-in is a module that adds to tables when it is imported; `megalite.extend` has a way in for each kind of thing. It
is imported in every process that reads the config, before the config is checked. One that fails leaves nothing behind.
Nothing but a config, a command line and what is installed names plug-ins: reading a checkpoint or data never runs code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator

from megalite.errors import UserError, did_you_mean

GROUP = "megalite.plugins"
"""Of entry points."""

VARIABLE = "MEGALITE_PLUGINS"
"""Names plug-ins for commands without a config, and for what they start; between them stands what stands in PATH."""

OURS = "megalite itself"
"""Where entries come from that no plug-in has brought."""

NAME = re.compile(r"[a-z][a-z0-9_]*")

Entry = TypeVar("Entry")


def _absolute(names: tuple[str, ...]) -> tuple[str, ...]:
    """The same plug-ins, wherever a command is run later."""
    return tuple(str(Path(name).absolute()) if name.endswith(".py") else name for name in names)


Plugins = Annotated[tuple[str, ...], AfterValidator(_absolute)]
"""Of a config or a recipe."""


class PluginError(UserError):
    """A plug-in that cannot be loaded, or that adds what cannot be."""


@dataclass(frozen=True)
class Plugin:
    """A plug-in that is loaded."""

    name: str
    """As the config names it; of an installed package, its own and that of its entry point."""
    origin: str
    """The file, and the package with its version where it has one."""
    digest: str = field(default="", repr=False)
    """Of what stands in the file."""
    module: str = field(default="", repr=False)
    """Its name."""


class Table(Mapping[str, Entry]):
    """What a setting can name: our entries, and those of plug-ins.

    Args:
        kind: what the entries are, in messages.
        ours: those that megalite brings.
    """

    def __init__(self, kind: str, ours: Mapping[str, Entry]):
        self.kind = kind
        self._entries, self._origins = dict(ours), dict.fromkeys(ours, OURS)
        self.files: dict[str, str] = {}
        """Of the plug-in that has brought an entry."""

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry.

        Raises:
            PluginError: the name is taken, or none.
        """
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise PluginError(f"{self.kind} {name!r}: found in {adding()}; a name has a-z, 0-9 and _, as in my_own")
        if name in self._entries:
            raise PluginError(
                f"two plug-ins bring the {self.kind} {name!r}: {self._origins[name]}, and {adding()}; "
                "rename one, or leave one out"
            )
        self._entries[name], self._origins[name] = entry, adding()
        _ADDITIONS.append((self, name))

    def origin(self, name: str) -> str:
        """Who has brought an entry, for people."""
        return self._origins[name]

    def is_brought(self, name: str) -> bool:
        """Whether it is not ours."""
        return self._origins[name] != OURS

    def remove(self, name: str) -> None:
        """Take an entry out again, as tests do."""
        del self._entries[name], self._origins[name]
        self.files.pop(name, None)
        _ADDITIONS.remove((self, name))

    def code(self, name: str, call: Callable[..., Any]) -> bytes:
        """What stands in the file of an entry's plug-in, and in those of its code: what it does has changed when this
        has."""
        files = dict.fromkeys((self.files.get(name), *_files(call)))
        return b"".join(Path(file).read_bytes() for file in files if file and Path(file).is_file())

    def known(self, name: str) -> str:
        """The name, if there is such an entry; for pydantic.

        Raises:
            ValueError: there is none.
        """
        if name not in self._entries:
            raise ValueError(self.unknown(name))
        return name

    def unknown(self, name: str) -> str:
        """A sentence about a name that is not here."""
        known = ", ".join([*self._entries, f"{'or ' * bool(self._entries)}the {self.kind} of a plug-in"])
        return (
            f'found "{name}"{did_you_mean(name, self._entries)}, expected {known}, which is to be named under '
            "`plugins`, or by `megalite --plugin`"
        )


def _files(call: Any) -> Iterator[str | None]:
    """The files of code, and of what it is wrapped around; None for what is built in."""
    while call is not None:
        written = call if inspect.isroutine(call) or inspect.isclass(call) else type(call)
        try:
            yield inspect.getsourcefile(written) if written.__module__ != functools.__name__ else None
        except TypeError:
            yield None
        call = getattr(call, "__wrapped__", None) or getattr(call, "func", None)


def load_plugins(names: Iterable[str]) -> None:
    """Load what is installed, what the environment names, then these, each once in a process.

    Args:
        names: modules, or files that end in .py.

    Raises:
        PluginError: one cannot be loaded; it names the line, and leaves nothing behind.
    """
    _load_installed()
    for name in _absolute((*filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)), *names)):
        if name not in _LOADED and f"plug-in {name}" not in _ORIGINS:  # one may make a config while it is imported
            _load(name)


def name_for_all(names: Sequence[str]) -> None:
    """Name plug-ins for this process and those that it starts, as `megalite --plugin` does.

    Raises:
        PluginError: one has in its path what stands between two.
    """
    wanted, former = _absolute(tuple(names)), os.environ.get(VARIABLE)
    for name in wanted:
        if os.pathsep in name:
            raise PluginError(
                f"{name}: found {os.pathsep!r} in it, which stands between two plug-ins in {VARIABLE}; give it a path "
                "without, by a link or another folder, or name it under `plugins` in a config or recipe"
            )
    os.environ[VARIABLE] = os.pathsep.join([*([former] if former else []), *wanted])


def loaded_plugins() -> tuple[Plugin, ...]:
    """In the order in which they came."""
    return tuple(_LOADED.values())


def changed_plugins(former: object) -> list[str]:
    """Where those plug-ins come from whose code is none that was loaded before, here or anywhere else.

    Args:
        former: digests by origin; anything else is from a time that had none.
    """
    if not isinstance(former, Mapping):
        return []
    known = {each for each in former.values() if isinstance(each, str)}  # of a damaged record anything
    return [each.origin for each in _LOADED.values() if each.digest not in known]


def named_plugins() -> list[str]:
    """Those that something else than an installed package has named: what another process must be told."""
    return [name for name in _LOADED if not name.startswith(f"{GROUP}:")]


def _load_installed() -> None:
    global _INSTALLED_ARE_LOADED
    if _INSTALLED_ARE_LOADED or _ORIGINS:
        return
    for point in sorted(importlib.metadata.entry_points(group=GROUP)):
        brings = "" if point.dist is None else point.dist.name
        package = "a package" if point.dist is None else f"{brings} {point.dist.version}"
        advice = f"repair or uninstall {package}, which brings it"
        fetch = partial(importlib.import_module, point.module)
        _take_in(f"{GROUP}:{brings}:{point.name}", point.value, package, fetch, advice)
    _INSTALLED_ARE_LOADED = True


def _load(name: str) -> None:
    path, is_file = Path(name), name.endswith(".py")
    if is_file and not path.is_file():
        raise PluginError(f"{path}: no such file; a plug-in is a file, or a module's name without .py")
    if not is_file and not all(part.isidentifier() for part in name.split(".")):
        raise PluginError(
            f"found {name!r}, expected a module's name, as in my_package.rules, or a file that ends in .py"
        )
    folder = str(path.parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # behind what is installed, so that nothing of that is hidden
    before, known = len(_ADDITIONS), _imported_already(path) if is_file else sys.modules.get(name)
    fetch = partial(_import_file, path) if is_file else partial(importlib.import_module, name)
    _take_in(name, name, "", fetch if known is None else lambda: known)
    if len(_ADDITIONS) > before or (_ADDITIONS and known is not None):  # what it adds may have come with another
        return
    if not _imports_another(_LOADED[name].module):
        del _LOADED[name]
        raise PluginError(f"{name}: adds nothing; a plug-in calls what megalite.extend offers when it is imported")


def _imported_already(path: Path) -> ModuleType | None:
    """The module of a file that another plug-in has imported, by its usual name."""
    module = sys.modules.get(path.stem)
    is_it = module is not None and module.__name__ == path.stem and getattr(module, "__file__", None) == str(path)
    return module if is_it else None


def _imports_another(name: str) -> bool:
    """Whether a module has imported anything from another plug-in, which has added what this one brings."""
    found = vars(sys.modules[name]).values()
    names = [getattr(each, "__name__" if isinstance(each, ModuleType) else "__module__", None) for each in found]
    others = [each.module for each in _LOADED.values() if each.module != name]
    return any(f"{other}.".startswith(f"{each}.") for each in names for other in others)


def _take_in(
    name: str, shown: str, package: str, fetch: Callable[[], ModuleType], advice: str = "mend it, or leave it out"
) -> None:
    """Import a plug-in; what a failing one has added, and imported of its own, goes again."""
    before, modules = len(_ADDITIONS), set(sys.modules)
    _ORIGINS.append(f"plug-in {shown}" + (f" of {package}" if package else ""))
    try:
        module = fetch()
    except (Exception, SystemExit) as error:
        for table, added in _ADDITIONS[before:]:
            table.remove(added)
        for module_name in filter(_is_of_its_own, sys.modules.keys() - modules):
            del sys.modules[module_name]
        raise PluginError(_why(shown, error, advice)) from error
    finally:
        _ORIGINS.pop()
    file = getattr(module, "__file__", None) or ""
    for table, added in _ADDITIONS[before:]:
        table.files.setdefault(added, file)
    digest = hashlib.sha256(Path(file).read_bytes() if Path(file).is_file() else b"").hexdigest()[:16]
    _LOADED[name] = Plugin(name, ", ".join(filter(None, (file, package))), digest, module.__name__)


def _is_of_its_own(name: str) -> bool:
    """Whether a module is neither ours nor installed: some of those do not bear to be imported twice."""
    file = getattr(sys.modules[name], "__file__", None) or ""
    is_ours, is_of_python = name.startswith("megalite."), file.startswith(sysconfig.get_path("stdlib"))
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return file.endswith(".py") and not (is_ours or is_of_python or is_installed)


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name that no module has, and under its usual one where that leads to it: another plug-in
    may import it."""
    name, usual = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}", path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    if usual.isidentifier() and usual not in sys.modules:
        found = importlib.util.find_spec(usual)
        if found is not None and found.origin == str(path):
            sys.modules[usual] = module
    return module


def _why(shown: str, error: BaseException, advice: str) -> str:
    """A failed import in words: the last line of the plug-in's own, where there is one."""
    if isinstance(error, PluginError):
        return f"plug-in {shown}: {error}"
    if isinstance(error, ModuleNotFoundError) and f"{shown}.".startswith(f"{error.name}."):
        return (
            f"plug-in {shown}: there is no module {error.name}, neither in {Path.cwd()} nor where Python finds "
            "packages; give a file's path, or set PYTHONPATH"
        )
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and Path(__file__).parent not in Path(frame.filename).parents
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
    return f"plug-in {shown}: cannot be imported: {type(error).__name__}: {error}{place}; {advice}"


def place_of(error: BaseException) -> str:
    """Where in a plug-in an error came up, as ` (FILE:LINE, in FUNCTION)`; empty where that was not in one."""
    files = {sys.modules[each.module].__file__: each for each in _LOADED.values() if each.module in sys.modules}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def adding() -> str:
    """Who adds to a table just now."""
    return _ORIGINS[-1] if _ORIGINS else "this program"


_LOADED: dict[str, Plugin] = {}
_ORIGINS: list[str] = []
"""Plug-ins that are being imported; one may import another."""
_ADDITIONS: list[tuple[Table[Any], str]] = []
_INSTALLED_ARE_LOADED = False
