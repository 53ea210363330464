"""Conversations out of records of several shapes, and how they travel among documents.

    messages            {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    sharegpt            {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
    alpaca              {"instruction": ..., "input": ..., "output": ...}
    prompt_completion   {"prompt": ..., "completion": ...}, texts or lists of messages

All become the first shape. A conversation travels as a document: its text is what people said, one turn below the
other, so that rules judge it and duplicates are found; the conversation itself goes along in the metadata. Whatever is
wrong with a record is a reason, by which it is put aside and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import orjson

from megalite.errors import UserError

Shape = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "docstrings"]

METADATA_KEY = "megalite:conversation"
"""In a document's metadata. No field of a record is called so."""

ROLES = ("system", "developer", "user", "assistant", "tool")

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}

MESSAGE_KEYS = ("role", "content", "weight", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""What templates are given of a message, and its weight, which they are not."""

HARMLESS_KEYS = ("id", "timestamp", "created_at", "date", "model")
"""Of a message; left out."""

FIELDS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
}
"""By these a record shows its shape."""

FURTHER_FIELDS = ("input", "system", "history", "tools", "weight")

COLUMNS = (*(name for names in FIELDS.values() for name in names), *FURTHER_FIELDS)
"""Columns of a table that may hold a part of a conversation."""

LARGEST_WEIGHT = 1024.0
SMALLEST_WEIGHT = 2.0**-14

Conversation = dict[str, Any]
"""`messages`, and where there are any `tools` and `weight`."""


class MalformedRecordError(UserError):
    """A record that is no conversation to learn from; the message is the reason by which it is counted."""


def parse_conversation(fields: Mapping[str, Any], shape: Shape) -> Conversation:
    """The conversation in a record.

    Args:
        fields: of the record; those of no shape are left alone.
        shape: how it is written; `auto` goes by the fields that are there.

    Raises:
        MalformedRecordError: why it is none.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    if shape == "auto":
        found = [name for name, needed in FIELDS.items() if set(needed) <= fields.keys()]
        if len(found) != 1:
            raise MalformedRecordError("fields of no known shape" if not found else f"fields of {' and '.join(found)}")
        shape = found[0]  # type: ignore[assignment]
    shape = "messages" if shape == "docstrings" else shape
    if missing := [name for name in FIELDS[shape] if name not in fields]:
        raise MalformedRecordError(f"no field {missing[0]}")
    messages = [_message(each) for each in _SHAPES[shape](fields)]
    _check_turns(messages)
    conversation: Conversation = {"messages": messages}
    if (tools := fields.get("tools")) is not None:
        if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
            raise MalformedRecordError("tools are no list of objects")
        conversation["tools"] = tools
    if "weight" in fields:
        conversation["weight"] = _weight(fields["weight"])
    return conversation


def text_of(conversation: Conversation) -> str:
    """What is said in it, for rules and for people."""
    said = ((each["role"], each.get("content") or _called(each)) for each in conversation["messages"])
    return "\n\n".join(f"{role}: {content}" for role, content in said)


def to_metadata(conversation: Conversation, kept: str = "") -> str:
    """A document's metadata with its conversation.

    Args:
        kept: metadata that it has already.
    """
    return orjson.dumps({**(orjson.loads(kept) if kept else {}), METADATA_KEY: conversation}).decode()


def from_metadata(metadata: str) -> Conversation | None:
    """The conversation of a document; None for a plain one."""
    return orjson.loads(metadata).get(METADATA_KEY) if METADATA_KEY in metadata else None


def contents_of(conversation: Conversation) -> list[str]:
    """The texts of its messages, in order; those without one leave none."""
    return [each["content"] for each in conversation["messages"] if each.get("content")]


def with_contents(conversation: Conversation, contents: Sequence[str]) -> Conversation:
    """The same with other texts, as many as `contents_of` has."""
    rest = iter(contents)
    messages = [{**each, "content": next(rest)} if each.get("content") else each for each in conversation["messages"]]
    return {**conversation, "messages": messages}


def _called(message: Mapping[str, Any]) -> str:
    return orjson.dumps(message.get("tool_calls")).decode()


def _message(found: Any) -> dict[str, Any]:
    """A message in its one form."""
    if not isinstance(found, Mapping):
        raise MalformedRecordError("a message is no object")
    message = {key: value for key, value in found.items() if value is not None and key not in HARMLESS_KEYS}
    if unknown := sorted(set(message) - set(MESSAGE_KEYS)):
        raise MalformedRecordError(f"a message has an unknown key {unknown[0]}")
    role = message.get("role")
    if role not in ROLES:
        raise MalformedRecordError(f"unknown role {str(role)[:40]}")
    if "content" in message:
        message["content"] = _content(message["content"])
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not calls or role != "assistant"):
        raise MalformedRecordError("tool_calls of another role, or no list")
    if not message.get("content", "").strip() and calls is None:
        raise MalformedRecordError(f"empty content of {role}")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(message.get(key, ""), str):
            raise MalformedRecordError(f"{key} is no text")
    if "weight" in message:
        if role != "assistant":
            raise MalformedRecordError("weight of a message that is no answer")
        message["weight"] = _weight(message["weight"], or_zero=True)
    return message


def _content(found: Any) -> str:
    """A text, or OpenAI's list of parts, which all have to be texts."""
    if isinstance(found, list):
        parts = [part.get("text") for part in found if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(parts) < len(found) or not all(isinstance(part, str) for part in parts):
            raise MalformedRecordError("content that is no text")
        found = "".join(map(str, parts))
    if not isinstance(found, str):
        raise MalformedRecordError("content that is no text")
    try:
        found.encode()
    except UnicodeEncodeError:
        raise MalformedRecordError("half of a surrogate pair") from None
    return found


def _weight(found: Any, *, or_zero: bool = False) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise MalformedRecordError("weight that is no number")
    if not (SMALLEST_WEIGHT <= found <= LARGEST_WEIGHT or (or_zero and found == 0)):
        raise MalformedRecordError(f"weight outside {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}")
    return float(found)


def _check_turns(messages: Sequence[Mapping[str, Any]]) -> None:
    """What holds whatever the template: there is an answer that counts, and something before it."""
    answers = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
    if not [number for number in answers if messages[number].get("weight", 1.0)]:
        raise MalformedRecordError("no answer" if not answers else "no answer with a weight above 0")
    if any(each["role"] in ("system", "developer") for each in messages[1:]):
        raise MalformedRecordError("a system message that is not the first")
    if all(each["role"] in ("system", "developer") for each in messages[: answers[0]]):
        raise MalformedRecordError("an answer without a question")


def _of_messages(fields: Mapping[str, Any]) -> list[Any]:
    if not isinstance(fields["messages"], list):
        raise MalformedRecordError("messages are no list")
    return fields["messages"]


def _of_sharegpt(fields: Mapping[str, Any]) -> list[Any]:
    turns = fields["conversations"]
    if not isinstance(turns, list):
        raise MalformedRecordError("conversations are no list")
    messages = [] if "system" not in fields else [{"role": "system", "content": fields["system"]}]
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise MalformedRecordError("a message is no object")
        turn = {key: value for key, value in turn.items() if value is not None}
        if not {"from", "value"} <= turn.keys():
            raise MalformedRecordError("a message without from and value")
        role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            raise MalformedRecordError(f"unknown role {str(turn['from'])[:40]}")
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append({**rest, "role": role, "content": turn["value"]})
    return messages


def _of_alpaca(fields: Mapping[str, Any]) -> list[Any]:
    messages = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
    history = fields.get("history", [])
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise MalformedRecordError("history is no list of pairs")
    for asked, answered in history:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    instruction, more = fields["instruction"], fields.get("input", "")
    if not isinstance(instruction, str) or not isinstance(more, str):
        raise MalformedRecordError("content that is no text")
    if not instruction.strip():
        raise MalformedRecordError("empty content of user")
    asked = f"{instruction}\n\n{more}" if more.strip() else instruction
    return [*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": fields["output"]}]


def _of_completion(fields: Mapping[str, Any]) -> list[Any]:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


_SHAPES: dict[str, Callable[[Mapping[str, Any]], list[Any]]] = {
    "messages": _of_messages,
    "sharegpt": _of_sharegpt,
    "alpaca": _of_alpaca,
    "prompt_completion": _of_completion,
    "docstrings": _of_messages,
}
