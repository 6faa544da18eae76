"""From a row of fields to a conversation: whatever shape the data have, from here on they are messages.

    messages                               [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]
    instruction, (input), output           Alpaca's; the input follows the instruction after an empty line
    prompt, completion                     each a text, or a list of messages
    question, answer                       GSM8K's

So a prompt with its completion is a conversation of two turns, and there is one way to mask, pack and evaluate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blocktrain.errors import DataError

Message = dict[str, Any]

_PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))


def messages_of(record: Mapping[str, Any], place: str) -> list[Message]:
    """The conversation in `record`, found by its keys; raises `DataError` where there is none, naming `place`."""
    given = record.get("messages")
    messages = _pair(record, place) if given is None else _messages(given, "messages", place)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(sorted({message["role"] for message in messages}))
        raise DataError(f"{place}: no message is the assistant's, so there is nothing to learn (roles: {roles})")
    return messages


def _pair(record: Mapping[str, Any], place: str) -> list[Message]:
    for asked, answered in _PAIRS:
        if asked in record and answered in record:
            user = _side(record[asked], "user", asked, place)
            if asked == "instruction" and record.get("input"):
                user[-1]["content"] += "\n\n" + _text(record["input"], "input", place)
            return [*user, *_side(record[answered], "assistant", answered, place)]
    pairs = ", ".join(f"{asked} and {answered}" for asked, answered in _PAIRS)
    raise DataError(
        f"{place} is no conversation: its fields are {', '.join(record) or 'none'}; known shapes: messages, {pairs}"
    )


def _side(value: Any, role: str, field: str, place: str) -> list[Message]:
    if isinstance(value, list):
        return _messages(value, field, place)
    return [{"role": role, "content": _text(value, field, place)}]


def _messages(value: Any, field: str, place: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: '{field}' must be a list of messages, not {type(value).__name__}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{place}: each of '{field}' must have a role and a content, not {str(message)[:80]!r}")
    return [dict(message) for message in value]


def _text(value: Any, field: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: field '{field}' is {type(value).__name__}, not text")
    return value
