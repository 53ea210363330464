"""Conversations out of records of several shapes, and how they travel among documents.

    messages            {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    sharegpt            {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
    alpaca              {"instruction": ..., "input": ..., "output": ...}
    prompt_completion   {"prompt": ..., "completion": ...}, texts or lists of messages
    preference          {"prompt": ..., "chosen": ..., "rejected": ...}, the same; or whole conversations without prompt

All become the first shape; the last one keeps the rejected conversation beside it. A conversation travels as a
document: its text is what was said, thought and called, one turn below the other, so that rules judge it and duplicates
are found; the conversation itself goes along in the metadata. Whatever is wrong with a record is a reason, by which it
is put aside and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import orjson

from megalite.corpus.exact_json import MOST_DEEP, depth, with_field
from megalite.corpus.json_texts import Visit, spelt_out, visit_texts
from megalite.errors import UserError

Shape = Literal[
    "auto",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "preference",
    "docstrings",
    "docstring_pairs",
]

OF_PYTHON: dict[str, Shape] = {"docstrings": "messages", "docstring_pairs": "preference"}
"""Shapes that are made of Python's own documentation, and what they are then."""

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

PROSE = ("reasoning_content", "content")
DATA = ("name", "tool_calls", "tool_call_id")
"""Of what templates are given of a message: texts for people, and the rest, with what is within."""

EDITION = b"2"
"""Of what is made of a conversation: stations that have read some under another one do so anew. 2: rules, duplicates
and redaction reach thoughts and calls of tools."""

HARMLESS_KEYS = ("id", "timestamp", "created_at", "date", "model")
"""Of a message; left out."""

FIELDS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
}
"""By these a record shows its shape."""

FURTHER_FIELDS = ("input", "system", "history", "tools", "weight")

COLUMNS = (*(name for names in FIELDS.values() for name in names), *FURTHER_FIELDS)
"""Columns of a table that may hold a part of a conversation."""

LARGEST_WEIGHT = 1024.0
SMALLEST_WEIGHT = 2.0**-14

Conversation = dict[str, Any]
"""`messages`, and where there are any `tools` and `weight`; of a pair, `rejected` messages too."""

REJECTED = "rejected"


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
    shape = OF_PYTHON.get(shape, shape)
    if missing := [name for name in FIELDS[shape] if name not in fields]:
        raise MalformedRecordError(f"no field {missing[0]}")
    messages = _messages(_SHAPES[shape](fields))
    _check_turns(messages)
    conversation: Conversation = {"messages": messages}
    if shape == "preference":
        conversation = _pair(messages, _messages(_of_rejected(fields)))
    if (tools := fields.get("tools")) is not None:
        if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
            raise MalformedRecordError("tools are no list of objects")
        if depth(tools) > MOST_DEEP:
            raise MalformedRecordError(f"tools have more than {MOST_DEEP} groups one within another")
        conversation["tools"] = tools
    if "weight" in fields:
        if shape == "preference":
            raise MalformedRecordError("weight of a pair")
        conversation["weight"] = _weight(fields["weight"])
        for each in messages:
            both = conversation["weight"] * each.get("weight", 1.0)
            _weight(both, or_zero=True, name="weights of a record and a message")
    return conversation


def text_of(conversation: Conversation) -> str:
    """What is said and thought in it, and what tools are called with, for rules and for people."""
    messages = conversation["messages"]
    others = conversation.get(REJECTED, [])
    own = others[_num_shared(messages, others) :]
    return "\n\n".join(f"{each['role']}: {_said(each)}" for each in (*messages, *own))


def to_metadata(conversation: Conversation, kept: str = "") -> str:
    """A document's metadata with its conversation.

    Args:
        kept: metadata that it has already.

    Raises:
        MalformedRecordError: JSON cannot hold what a message has beside its text.
    """
    try:
        return with_field(kept, METADATA_KEY, conversation)
    except TypeError as error:  # half of a surrogate pair, a number of more than 64 bits, groups 254 deep
        raise MalformedRecordError(f"a message that JSON cannot hold ({error})") from None


def from_metadata(metadata: str) -> Conversation | None:
    """The conversation of a document; None for a plain one."""
    return orjson.loads(metadata).get(METADATA_KEY) if METADATA_KEY in metadata else None


def with_prose(conversation: Conversation, visit: Visit) -> Conversation:
    """The same with what a visitor puts in the place of what is said and thought in it."""
    return _with_messages(conversation, lambda message: _visited(message, PROSE, visit))


def with_data(conversation: Conversation, visit: Visit) -> Conversation:
    """The same with what a visitor puts in the place of all other texts that a template is given: names, and those in
    calls of tools and in what these say of themselves."""
    changed = _with_messages(conversation, lambda message: _visited(message, DATA, visit))
    return _visited(changed, ("tools",), visit)


def has_empty_turn(conversation: Conversation) -> bool:
    """Whether there is a message that neither says anything nor calls a tool."""
    messages = (*conversation["messages"], *conversation.get(REJECTED, ()))
    return any("tool_calls" not in each and not each.get("content", "").strip() for each in messages)


def _with_messages(conversation: Conversation, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Conversation:
    names = [name for name in ("messages", REJECTED) if name in conversation]
    return {**conversation, **{name: [change(each) for each in conversation[name]] for name in names}}


def _visited(group: dict[str, Any], names: Sequence[str], visit: Visit) -> dict[str, Any]:
    """The group with other texts in the fields of these names; prose is one text, whatever it looks like."""
    changed = {
        name: visit(group[name], name) if name in PROSE else visit_texts(group[name], visit, name)
        for name in names
        if group.get(name)
    }
    return {**group, **changed}


def _said(message: Mapping[str, Any]) -> str:
    """What a message says, behind what was thought before and in front of the tools that it calls."""
    calls = message.get("tool_calls")
    parts = (message.get("reasoning_content"), message.get("content"), spelt_out(calls) if calls else "")
    return "\n".join(part for part in parts if part)


def _messages(found: list[Any]) -> list[dict[str, Any]]:
    """Messages in their one form, without a system message at the beginning that says nothing."""
    return [_message(each) for each in (found[1:] if found and _is_empty_system(found[0]) else found)]


def _is_empty_system(found: Any) -> bool:
    if not isinstance(found, Mapping) or found.get("role") != "system":
        return False
    content = found.get("content")
    return content is None or (isinstance(content, str) and not content.strip())


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
    if depth(calls) > MOST_DEEP:
        raise MalformedRecordError(f"tool_calls have more than {MOST_DEEP} groups one within another")
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


def _weight(found: Any, *, or_zero: bool = False, name: str = "weight") -> float:
    is_infinite = isinstance(found, float) and not math.isfinite(found)
    if isinstance(found, bool) or not isinstance(found, int | float) or is_infinite:
        raise MalformedRecordError("weight that is no number")
    if not (SMALLEST_WEIGHT <= found <= LARGEST_WEIGHT or (or_zero and found == 0)):
        raise MalformedRecordError(f"{name} outside {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}")
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


def _pair(chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> Conversation:
    """Two conversations that part at an answer; what they share is not learnt."""
    _check_turns(rejected)
    num_shared = _num_shared(chosen, rejected)
    if len(chosen) == num_shared == len(rejected):
        raise MalformedRecordError("chosen and rejected are the same")
    parted = chosen[num_shared:], rejected[num_shared:]
    if not all(part and part[0]["role"] == "assistant" == part[-1]["role"] for part in parted):
        raise MalformedRecordError("chosen and rejected do not part at an answer, and end with one")
    if not all(any(each["role"] == "assistant" and each.get("weight", 1.0) for each in part) for part in parted):
        raise MalformedRecordError("a side without an answer of its own with a weight above 0")
    shared = [{**each, "weight": 0.0} if each["role"] == "assistant" else each for each in chosen[:num_shared]]
    return {"messages": [*shared, *parted[0]], REJECTED: [*shared, *parted[1]]}


def _num_shared(chosen: Sequence[Mapping[str, Any]], rejected: Sequence[Mapping[str, Any]]) -> int:
    """Messages at the beginning that are the same, whatever they weigh: none of them is learnt."""
    plain = ([{**each, "weight": None} for each in side] for side in (chosen, rejected))
    pairs = enumerate(zip(*plain, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))


def _of_chosen(fields: Mapping[str, Any]) -> list[Any]:
    return _side(fields, "chosen")


def _of_rejected(fields: Mapping[str, Any]) -> list[Any]:
    return _side(fields, "rejected")


def _side(fields: Mapping[str, Any], name: str) -> list[Any]:
    """The messages of one side of a pair."""
    prompt, answer = fields.get("prompt"), fields[name]
    if isinstance(answer, str):
        if prompt is None:
            raise MalformedRecordError("no field prompt")
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list):
        raise MalformedRecordError(f"{name} is no text and no list")
    if prompt is None:
        return answer
    return [*(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]), *answer]


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
    "preference": _of_chosen,
}
