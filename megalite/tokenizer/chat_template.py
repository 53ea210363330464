"""Chat templates: the text of a conversation, and where its answers stand in it.

Where a template has `{% generation %}` blocks, these are the answers. Elsewhere an answer is what the conversation up
to it adds to that before it with the prompt of an answer; a template under which one is no beginning of the other is
refused, for no border could be trusted. The control token that ends a turn belongs to its answer.

Templates are transformers' own (jinja, in its sandbox), so what a model is asked by anybody is what it has learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megalite.errors import DataError, UserError
from megalite.tokenizer.tokenizer import CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"

SPECIAL_MAP_FILE = "special_tokens_map.json"

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

SHOWN = 60
"""Characters of a text in a message."""

Messages = Sequence[Mapping[str, Any]]


class UnlearnableError(UserError):
    """A conversation that cannot be made tokens of; the message is the reason by which it is counted."""


def read_template(folder: Path, given: Path | None) -> str:
    """A chat template's text.

    Args:
        folder: of the tokenizer.
        given: a file of one's own; None takes the tokenizer's.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    if given is not None:
        try:
            return given.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{given}: cannot be read ({error}); name a file with a chat template (jinja)") from error
    if (folder / TEMPLATE_FILE).is_file():
        return (folder / TEMPLATE_FILE).read_text(encoding="utf-8-sig")
    found = _settings(folder).get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {each["name"]: each["template"] for each in found}.get("default")
    if not isinstance(found, str):
        raise DataError(
            f"{folder}: the tokenizer has no chat template ({TEMPLATE_FILE}, or chat_template in {CONFIG_FILE}); name "
            "a file of your own with chat.template"
        )
    return found


def has_template(folder: Path) -> bool:
    """Whether a tokenizer's folder has a chat template."""
    return (folder / TEMPLATE_FILE).is_file() or "chat_template" in _settings(folder)


def for_chats(config: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json with which transformers reads the control tokens of a template as such, which it does not
    with `split_special_tokens`."""
    return {**config, "split_special_tokens": False} if config.get("split_special_tokens") else config


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def named_tokens(folder: Path) -> dict[str, str]:
    """Spellings that templates may name: bos_token, eos_token ..."""
    found: dict[str, Any] = {}
    path = folder / SPECIAL_MAP_FILE
    for settings in (json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}, _settings(folder)):
        found |= {key: value for key, value in settings.items() if key.endswith("_token") and value is not None}
    spelt = {key: value["content"] if isinstance(value, dict) else value for key, value in found.items()}
    return {key: value for key, value in spelt.items() if isinstance(value, str)}


class ChatTemplate:
    """Renders conversations, and finds the answers in what it rendered.

    Args:
        text: of the template.
        name: for messages.
        variables: that it is given: `bos_token` and the like, and the user's.
        control: spellings of control tokens.

    Raises:
        DataError: it is no template.
    """

    def __init__(self, text: str, name: str, variables: Mapping[str, Any], control: Sequence[str]):
        from jinja2.exceptions import TemplateSyntaxError
        from transformers.utils import chat_template_utils

        self.name = name
        self.has_blocks = GENERATION.search(text) is not None
        self._variables = {**variables, "strftime_now": self._refuse_date}
        self._render_blocks = chat_template_utils._render_with_assistant_indices
        spelt = sorted(filter(None, control), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, spelt)) if spelt else r"(?!)")
        try:
            self._compiled = chat_template_utils._compile_jinja_template(text)
        except TemplateSyntaxError as error:
            raise DataError(f"{name}: no chat template: line {error.lineno}: {error.message}") from error

    def _refuse_date(self, _format: str) -> str:
        raise DataError(
            f"{self.name}: asks for today's date, so that data made tomorrow would be other data; give it a fixed one, "
            'as chat.variables={date_string: "26 Jul 2024"}'
        )

    def render(self, messages: Messages, tools: list[Any] | None, *, begin_answer: bool = False) -> str:
        """The text of some messages.

        Args:
            begin_answer: with what stands before an answer behind it.

        Raises:
            UnlearnableError: the template refuses them.
        """
        with _refusals():
            given = {"messages": _copy(messages), "tools": tools, "documents": None}
            return self._compiled.render(**given, add_generation_prompt=begin_answer, **self._variables)

    def answers(self, messages: Messages, tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where each answer stands in it, the token that ends its turn included.

        Raises:
            UnlearnableError: the template refuses it.
            DataError: answers cannot be found with this template.
        """
        if self.has_blocks:
            with _refusals():
                text, found = self._render_blocks(
                    compiled_template=self._compiled,
                    messages=_copy(messages),
                    tools=tools,
                    documents=None,
                    add_generation_prompt=False,
                    **self._variables,
                )
            return text, [self._with_end(text, start, stop) for start, stop in found]
        text = self.render(messages, tools)
        places = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [self._by_beginnings(text, messages, tools, number) for number in places]

    def _by_beginnings(self, text: str, messages: Messages, tools: list[Any] | None, number: int) -> tuple[int, int]:
        """Where the answer `number` stands: what it adds to the conversation before it."""
        before = self.render(messages[:number], tools, begin_answer=True)
        whole = text if number == len(messages) - 1 else self.render(messages[: number + 1], tools)
        for part, of, what in ((before, whole, "the prompt of an answer"), (whole, text, "the conversation up to it")):
            if not of.startswith(part):
                place = next(
                    i for i, pair in enumerate(zip(part + "\0", of + "\1", strict=False)) if len(set(pair)) > 1
                )
                raise DataError(
                    f"{self.name}: answers cannot be told apart under this template: {what} (message {number + 1} of "
                    f"{len(messages)}) is no beginning of what follows: found {of[place : place + SHOWN]!r} where "
                    f"{part[place : place + SHOWN]!r} was expected; put {{% generation %}} ... {{% endgeneration %}} "
                    "around the answers in a copy of it, and name that as chat.template"
                )
        ends = [match.end() for match in self._control.finditer(whole, len(before))]
        return len(before), ends[-1] if ends else len(whole)

    def _with_end(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """A block's characters, and the control token right behind it, if it has not got one at its end itself."""
        inside = text[start:stop].rstrip()
        if any(match.end() == len(inside) for match in self._control.finditer(inside)):
            return start, stop
        behind = self._control.match(text, stop)
        return start, behind.end() if behind is not None else stop

    def ends_turn(self, text: str, stop: int) -> bool:
        """Whether an answer that ends there has a control token at its end."""
        return any(match.end() == len(text[:stop].rstrip()) for match in self._control.finditer(text[:stop]))

    def spelt_in(self, text: str) -> Iterator[int]:
        """Where a text spells control tokens, behind the first character of each."""
        return (match.start() + 1 for match in self._control.finditer(text))


@contextmanager
def _refusals() -> Iterator[None]:
    """What a template says against a conversation, as the reason that it is counted by."""
    from jinja2.exceptions import TemplateError

    try:
        yield
    except UserError:
        raise
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise UnlearnableError(f"template: {str(error) or type(error).__name__}"[: SHOWN + 40]) from error


def _copy(value: Any) -> Any:
    """Plain lists and dicts, which a template may not change for others."""
    if isinstance(value, Mapping):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list | tuple) else value
