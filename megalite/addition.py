"""Code behind an entry of a table: a plug-in's is held against how it will be called when it is added, and is told what
a config says; ours is loaded when it is needed."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import PydanticUserError, create_model

from megalite.plugins import PluginError, adding
from megalite.section import Section


@dataclass(frozen=True)
class Addition:
    """Code of a plug-in, called with what megalite gives and the options that a config gives."""

    call: Callable[..., Any]
    options: type[Section]
    """What the config may give it: its keyword-only parameters."""

    def bound(self, given: Mapping[str, Any]) -> Callable[..., Any]:
        """The code with its options, checked and filled."""
        options = self.options.model_validate(dict(given))
        values = {name: getattr(options, name) for name in self.options.model_fields}

        def call(*arguments: Any, **others: Any) -> Any:
            return self.call(*arguments, **others, **values)

        return call


def addition(kind: str, name: str, call: Callable[..., Any], given: tuple[str, ...]) -> Addition:
    """Code of a plug-in, looked at before it is called.

    Args:
        given: names of the arguments that megalite calls it with, in their order.

    Raises:
        PluginError: it cannot be called with them.
    """
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise PluginError(f"{kind} {name}: {call!r} in {adding()} cannot be called ({error})") from error
    _refuse_async(f"{kind} {name}", call)
    named = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    most = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in named)
    least = sum(each.default is each.empty and each.kind is not each.VAR_POSITIONAL for each in named)
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in named)
    if any(each.kind is each.VAR_KEYWORD for each in named):
        raise PluginError(
            f"{kind} {name}: takes any options (**), so that a mistyped one would be lost; name each, "
            "as `*, option: int = 1`"
        )
    if least > len(given) or (most < len(given) and not takes_any):
        has = ", ".join(str(each) for each in named)
        raise PluginError(
            f"{kind} {name}: found {name}({has}) in {adding()}; it is called as {name}({', '.join(given)}), and "
            "options of its own stand behind a `*`"
        )
    return Addition(call, _options(kind, name, call))


def check_call(who: str, call: Any, given: tuple[str, ...], named: tuple[str, ...]) -> None:
    """Refuse code that cannot be called as it will be, or that then only gives something to await.

    Args:
        who: what it is, for people.
        given: names of the arguments that it gets in this order.
        named: of those that it gets by name.

    Raises:
        PluginError: it takes others.
    """
    takes = "nothing, for it is no function or class"
    try:
        takes = str(found := inspect.signature(call))
        found.bind(*given, **dict.fromkeys(named))
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"{who}: it is called with ({', '.join((*given, '*', *named) if named else given)}), and takes {takes}"
        ) from error
    _refuse_async(who, call)


def check_method(who: str, code: Any, method: str, given: tuple[str, ...], named: tuple[str, ...] = ()) -> None:
    """The same of a class's method.

    Raises:
        PluginError: it takes others.
    """
    is_bound = isinstance(inspect.getattr_static(code, method), staticmethod | classmethod)
    check_call(f"{who}: {method}", getattr(code, method), given if is_bound else ("self", *given), named)


def check_argument(who: str, key: str, found: object, is_right: bool, expected: str) -> None:
    """Refuse what a door is told.

    Raises:
        PluginError: it is not right.
    """
    if not is_right:
        raise PluginError(f"{who}: found {key}={found!r}, expected {expected}")


def _refuse_async(who: str, call: Any) -> None:
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        raise PluginError(f"{who}: it is async, and nothing here awaits it; write `def` for `async def`")


def made(key: str, make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What code of a plug-in makes: where it fails, the setting was wrong or the plug-in, and not this program.

    Raises:
        PluginError: it fails; `key` is the setting that names it.
    """
    try:
        return make(*arguments, **named)
    except Exception as error:
        raise PluginError(
            f"{key}: could not be made: {type(error).__name__}: {error}; correct its options or the plug-in"
        ) from error


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Name code of a plug-in that fails in the middle of the work."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error


def load(place: str | Callable[..., Any]) -> Any:
    """What an entry names as `module:name`, loaded when it is first needed; code itself is what it is."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _annotated(call: Any) -> Callable[..., Any]:
    """What has the annotations of a callable."""
    if inspect.isclass(call):
        return call.__init__
    if isinstance(call, functools.partial):
        return _annotated(call.func)
    return call if inspect.isroutine(call) else type(call).__call__


def _options(kind: str, name: str, call: Callable[..., Any]) -> type[Section]:
    """The keyword-only parameters of a function or class, as a section."""
    hints = get_type_hints(_annotated(call), include_extras=True)
    fields: dict[str, Any] = {}
    for each in inspect.signature(call).parameters.values():
        if each.kind is not each.KEYWORD_ONLY:
            continue
        if each.name not in hints:
            raise PluginError(
                f"{kind} {name}: option {each.name} has no type, so what a config gives it cannot be checked"
            )
        if each.name.startswith("_") or hasattr(Section, each.name):
            raise PluginError(f"{kind} {name}: no option can be called {each.name}; give it another name")
        fields[each.name] = hints[each.name], ... if each.default is each.empty else each.default
    try:
        options = create_model(f"{getattr(call, '__name__', 'Plugin')}Options", __base__=Section, **fields)
        options.model_json_schema()
    except PydanticUserError as error:
        why = str(error).partition("\n")[0]
        raise PluginError(f"{kind} {name}: the type of an option is none that YAML can give: {why}") from error
    return options
