"""From a row of fields to a conversation: whatever the shape of the data, the rest of the package sees messages.

    messages                               [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]
    instruction, (input), output           Alpaca; the input follows the instruction after an empty line
    prompt, completion                     each is a text or a list of messages
    question, answer                       GSM8K

A prompt with its completion is a conversation of two turns, so there is one way to mask, pack and evaluate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blocktrain.errors import DataError

Message = dict[str, Any]  # a role, a content, and whatever a chat template reads

_PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))


def messages_of(record: Mapping[str, object], place: str) -> list[Message]:
    """The conversation in `record`, recognized by its keys; raises `DataError`, naming `place`, where there is none."""
    listed = record.get("messages")
    messages = _pair(record, place) if listed is None else _messages(listed, "messages", place)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(sorted({message["role"] for message in messages}))
        raise DataError(f"{place}: no message is from the assistant, so there is nothing to learn (roles: {roles})")
    return messages


def _pair(record: Mapping[str, object], place: str) -> list[Message]:
    for prompt, answer in _PAIRS:
        if prompt in record and answer in record:
            user = _side(record[prompt], "user", prompt, place)
            if prompt == "instruction" and record.get("input"):
                user[-1]["content"] += "\n\n" + _text(record["input"], "input", place)
            return [*user, *_side(record[answer], "assistant", answer, place)]
    pairs = ", ".join(f"{prompt} and {answer}" for prompt, answer in _PAIRS)
    raise DataError(
        f"{place} is not a conversation: its fields are {', '.join(record) or 'none'}; known shapes: messages, {pairs}"
    )


def _side(value: object, role: str, field: str, place: str) -> list[Message]:
    if isinstance(value, list):
        return _messages(value, field, place)
    return [{"role": role, "content": _text(value, field, place)}]


def _messages(value: object, field: str, place: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: '{field}' must be a list of messages, not {type(value).__name__}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(
                f"{place}: each message in '{field}' must have a role and a content, not {str(message)[:80]!r}"
            )
    return [dict(message) for message in value]


def _text(value: object, field: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: field '{field}' is {type(value).__name__}, not text")
    return value
