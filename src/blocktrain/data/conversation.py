"""Conversations: from a row of fields to messages.

Whatever the shape of the data, the rest of the package sees messages:

    messages                               [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]
    conversations                          ShareGPT: [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]
    prompt, completion                     each is a text or a list of messages
    question, answer                       GSM8K
    instruction, (input), output           Alpaca; the input follows the instruction after an empty line
    query, response

A prompt with its completion is a conversation of two turns, so there is one way to mask, pack and evaluate. `system`
becomes the first message, `history`, a list of [user, assistant] pairs, the turns before the prompt, and `tools` is
passed to the chat template. Every field that holds something and is not read is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blocktrain.data.records import require_text
from blocktrain.data.row_report import RowError, filled_fields, is_empty
from blocktrain.errors import ConfigError, DataError, nearest
from blocktrain.parse import json_kind, parse_json

Message = dict[str, Any]  # a role, a content, and whatever a chat template reads
Tool = dict[str, Any]  # the JSON schema of a function


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The messages of a row.

    tools: what the assistant may call; None: nothing.
    ignored: the fields of the row that are not read although they hold something.
    """

    messages: list[Message]
    tools: list[Tool] | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """A shape is recognized by its `required` fields; `optional` fields are read where a row has them."""

    required: tuple[str, ...]
    optional: tuple[str, ...]


# A row of several shapes has the first of them.
SHAPES = (
    RowShape(required=("messages",), optional=("system", "tools")),
    RowShape(required=("conversations",), optional=("system", "tools")),
    RowShape(required=("prompt", "completion"), optional=("system", "history", "tools")),
    RowShape(required=("question", "answer"), optional=("system", "history", "tools")),
    RowShape(required=("instruction", "output"), optional=("input", "system", "history", "tools")),
    RowShape(required=("query", "response"), optional=("system", "history", "tools")),
)
FIELDS = tuple(dict.fromkeys(name for shape in SHAPES for name in (*shape.required, *shape.optional)))
MESSAGE_FIELDS = {"role": ("role", "from"), "content": ("content", "value")}  # the first that a message has
KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}

PREFERENCE = ("chosen", "rejected")


class ConversationReader:
    """Reads rows as conversations."""

    def __init__(self, fields: Mapping[str, str] | None = None, roles: Mapping[str, str] | None = None):
        """fields: for a field of `FIELDS` or `MESSAGE_FIELDS` the name that it has in the rows, where it has another.
        roles: the role that a role of the rows stands for, besides ShareGPT's.

        Raises `ConfigError` for a field that does not exist, or a name that is given to two.
        """
        self._fields = dict(fields or {})
        for name, in_row in self._fields.items():
            if name not in (*FIELDS, *MESSAGE_FIELDS):
                raise ConfigError(f"fields has the unknown key '{name}'; {nearest(name, (*FIELDS, *MESSAGE_FIELDS))}")
            if not in_row:
                raise ConfigError(f"fields.{name} is empty; give the name that the field has in the rows")
        self._renamed = {in_row: name for name, in_row in self._fields.items() if name in FIELDS}
        if len(self._renamed) < sum(name in FIELDS for name in self._fields):
            raise ConfigError(f"fields names one field of the rows twice: {self._fields}")
        self._roles = {**SHAREGPT_ROLES, **(roles or {})}
        self._known_roles = KNOWN_ROLES | set(self._roles.values())
        # Whoever names the fields of a shape wants this shape.
        self._shapes = sorted(SHAPES, key=lambda shape: not any(name in self._fields for name in shape.required))

    def missing(self, record: Mapping[str, object]) -> list[str]:
        """The names of `fields` that this row does not have."""
        return [in_row for in_row in self._renamed if in_row not in record]

    def read(self, record: Mapping[str, object], place: str) -> Conversation:
        """The conversation in `record`, recognized by its fields.

        Raises `RowError`, naming `place`, where there is none; `DataError` where it is a choice of two answers.
        """
        values = {self._renamed.get(name, name): value for name, value in self._unshadowed(record).items()}
        shape = self._shape(values, place)
        read = (*shape.required, *shape.optional)
        ignored = filled_fields(record, but=[self._fields.get(name, name) for name in read])
        tools = _tools(values.get("tools"), place)
        system = _system(values.get("system"), place)
        if len(shape.required) == 1:
            turns = self._messages(values[shape.required[0]], shape.required[0], place, ignored)
        else:
            turns = self._pair(shape, values, place, ignored)
            if history := _history(values.get("history"), place):
                turns = history + turns
        if system and any(message["role"] == "system" for message in turns):
            if system[0] not in turns:
                raise RowError(f"{place}: the field 'system' and a message of the system say different things")
            system = []
        messages = [*system, *turns]
        self._check(messages, place)
        return Conversation(messages=messages, tools=tools, ignored=tuple(dict.fromkeys(ignored)))

    def _unshadowed(self, record: Mapping[str, object]) -> dict[str, object]:
        """The row without fields that have the name of one that `fields` finds elsewhere."""
        return {name: value for name, value in record.items() if name in self._renamed or name not in self._fields}

    def _shape(self, values: Mapping[str, object], place: str) -> RowShape:
        """The first shape whose fields hold something, or else are there (tables have the same columns in all rows)."""
        for holds in (lambda name: values.get(name) is not None, lambda name: name in values):
            for shape in self._shapes:
                if all(holds(name) for name in shape.required):
                    return shape
        if all(name in values for name in PREFERENCE):
            raise DataError(
                f"{place} is a preference row (chosen, rejected), but [chat] learns one answer; name it with fields = "
                '{ completion = "chosen" } (or messages = "chosen", where it is a whole conversation), or train on '
                "preferences with TRL (docs/huggingface.md)"
            )
        known = ", ".join(" and ".join(shape.required) for shape in SHAPES)
        raise RowError(
            f"{place} is not a conversation: its fields are {', '.join(values) or 'none'}; known shapes: {known}; "
            "chat.fields says which field is which"
        )

    def _pair(self, shape: RowShape, values: Mapping[str, object], place: str, ignored: list[str]) -> list[Message]:
        prompt, answer = shape.required
        user = self._side(values[prompt], "user", prompt, place, ignored)
        if "input" in shape.optional and not is_empty(values.get("input")):
            more = require_text(values["input"], "input", place)
            if not isinstance(user[-1].get("content"), str):
                raise RowError(f"{place}: 'input' can only follow an instruction that is text")
            user[-1]["content"] += "\n\n" + more
        assistant = self._side(values[answer], "assistant", answer, place, ignored)
        if assistant[0]["role"] in ("user", "system"):
            raise RowError(
                f"{place}: '{answer}' begins with a message of the {assistant[0]['role']}, although '{prompt}' comes "
                "before it; name the field of a whole conversation with fields = { messages = ... }"
            )
        return [*user, *assistant]

    def _side(self, value: object, role: str, field: str, place: str, ignored: list[str]) -> list[Message]:
        if isinstance(value, list):
            return self._messages(value, field, place, ignored)
        return [{"role": role, "content": require_text(value, field, place)}]

    def _messages(self, value: object, field: str, place: str, ignored: list[str]) -> list[Message]:
        if not isinstance(value, list) or not value:
            what = "an empty list" if value == [] else json_kind(value)
            raise RowError(f"{place}: '{field}' must be a list of messages, not {what}")
        return [self._message(message, field, place, ignored) for message in value]

    def _message(self, value: object, field: str, place: str, ignored: list[str]) -> Message:
        """A message with its role and content under these names, and its other fields as they are."""
        message: dict[str, Any] = value if isinstance(value, dict) else {}
        role_key, content_key = (self._message_key(message, name) for name in MESSAGE_FIELDS)
        role, content = message.get(role_key), message.get(content_key)
        calls = not (is_empty(message.get("tool_calls")) and is_empty(message.get("function_call")))
        if not isinstance(role, str) or (content is None and not calls):
            found = str(value)[:80]
            raise RowError(f"{place}: each message in '{field}' must have a role and a content, not {found!r}")
        if not isinstance(content, str | list | None):
            raise RowError(f"{place}: the content of a message in '{field}' is {json_kind(content)}, not text")
        others = {name: other for name, other in message.items() if name not in (role_key, content_key)}
        ignored += [f"messages[].{name}" for name in filled_fields(others) if name in MESSAGE_FIELDS]
        others = {name: other for name, other in others.items() if name not in MESSAGE_FIELDS}
        turn = {"content": content} if content_key in message else {}
        return {"role": self._roles.get(role, role), **turn, **others}

    def _message_key(self, message: Mapping[str, object], name: str) -> str:
        if name in self._fields:
            return self._fields[name]
        return next((key for key in MESSAGE_FIELDS[name] if message.get(key) is not None), name)

    def _check(self, messages: list[Message], place: str) -> None:
        roles = sorted({message["role"] for message in messages})
        for role in roles:
            if role not in self._known_roles:
                raise RowError(
                    f"{place}: the role '{role}' is not known; say what it stands for with chat.roles = "
                    f'{{ {role} = "assistant" }} (known: {", ".join(sorted(self._known_roles | set(self._roles)))})'
                )
        if "assistant" not in roles:
            raise RowError(
                f"{place}: no message is from the assistant, so there is nothing to learn (roles: {', '.join(roles)})"
            )


def _system(value: object, place: str) -> list[Message]:
    return [] if is_empty(value) else [{"role": "system", "content": require_text(value, "system", place)}]


def _tools(value: object, place: str) -> list[Tool] | None:
    tools = _listed(value, "tools", place, "objects")
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"{place}: field 'tools' must be a list of objects")
    return tools or None


def _history(value: object, place: str) -> list[Message]:
    """Alpaca's earlier turns."""
    turns: list[Message] = []
    for pair in _listed(value, "history", place, "[user, assistant] pairs of texts"):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError(f"{place}: field 'history' must be a list of [user, assistant] pairs of texts")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _listed(value: object, field: str, place: str, of: str) -> list[Any]:
    """A list, which files of separated values, and many data sets of tools, hold as JSON text."""
    if is_empty(value):
        return []
    listed = parse_json(value, f"{place}: field '{field}'", RowError) if isinstance(value, str) else value
    if not isinstance(listed, list):
        raise RowError(f"{place}: field '{field}' is {json_kind(listed)}, not a list of {of}")
    return listed
