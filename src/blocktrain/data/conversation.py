"""Conversations: from a row of fields to messages, from messages to tokens, and which of those the assistant wrote.

Whatever the shape of the data, the rest of the package sees messages:

    messages                               [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]
    instruction, (input), output           Alpaca; the input follows the instruction after an empty line
    prompt, completion                     each is a text or a list of messages
    question, answer                       GSM8K

A prompt with its completion is a conversation of two turns, so there is one way to mask, pack and evaluate. Only the
assistant's tokens are learned:

    user:\nWhat is 1 + 1?\nassistant:\n2<eos>          the default template
    .................................| 1  1          trained

The template is the tokenizer's own and is rendered by `transformers`. If it marks the assistant's turns
(`{% generation %}`), the marks decide. If not, a turn consists of the tokens by which the rendered conversation grows
when the turn is added; a template that rewrites earlier tokens is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.data.records import require_text
from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import ConfigError, DataError, first_line

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
                user[-1]["content"] += "\n\n" + require_text(record["input"], "input", place)
            return [*user, *_side(record[answer], "assistant", answer, place)]
    pairs = ", ".join(f"{prompt} and {answer}" for prompt, answer in _PAIRS)
    raise DataError(
        f"{place} is not a conversation: its fields are {', '.join(record) or 'none'}; known shapes: messages, {pairs}"
    )


def _side(value: object, role: str, field: str, place: str) -> list[Message]:
    if isinstance(value, list):
        return _messages(value, field, place)
    return [{"role": role, "content": require_text(value, field, place)}]


def _messages(value: object, field: str, place: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: '{field}' must be a list of messages, not {type(value).__name__}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(
                f"{place}: each message in '{field}' must have a role and a content, not {str(message)[:80]!r}"
            )
    return [dict(message) for message in value]


# For tokenizers without a template: roles as words, and the end-of-text token after each answer.
DEFAULT = """\
{{ bos_token if bos_token else '' }}\
{%- for message in messages %}\
{{- message['role'] + ':\\n' }}\
{%- if message['role'] == 'assistant' %}\
{%- generation %}{{- message['content'] + eos_token }}{%- endgeneration %}\
{%- else %}{{- message['content'] + '\\n' }}{%- endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}{{- 'assistant:\\n' }}{%- endif %}"""

_QUIET = {"verbose": False}  # ChatRows warns once about conversations that are too long
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """A tokenizer with its chat template. The template is set on the tokenizer, so that an export contains it."""

    def __init__(self, tokenizer: Tokenizer, path: str | None = None):
        """path: a Jinja file to use instead of the tokenizer's template; raises `ConfigError` if it cannot be read."""
        self._pretrained: Any = tokenizer.pretrained
        if path is not None:
            try:
                self._pretrained.chat_template = Path(path).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"template '{path}' cannot be read: {error}") from None
        elif self._pretrained.chat_template is None:
            self._pretrained.chat_template = DEFAULT
        text = self._pretrained.get_chat_template()
        self._marks = self._pretrained.is_fast and _MARKS.search(text) is not None
        self.fingerprint = hashlib.sha256(f"{tokenizer.fingerprint} {text}".encode()).hexdigest()[:16]

    def encode(self, messages: list[Message], place: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, int64 (T,), and whether the assistant wrote each, bool (T,).

        Raises `DataError`, naming `place`, if the template refuses the conversation.
        """
        try:
            if self._marks:
                rendered = self._pretrained.apply_chat_template(
                    messages, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs=_QUIET
                )
                return np.array(rendered["input_ids"]), np.array(rendered["assistant_masks"], bool)
            return self._by_growth(messages, place)
        except DataError:
            raise
        except Exception as error:  # a template raises any class, Jinja's errors among others
            raise DataError(f"{place}: the chat template refuses this conversation: {first_line(error)}") from error

    def _by_growth(self, messages: list[Message], place: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self._ids(messages)
        trained = np.zeros(len(ids), bool)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._ids(messages[:turn], prompt=True)
                until = self._ids(messages[: turn + 1])
                if not (_starts_with(until, before) and _starts_with(ids, until)):
                    raise DataError(
                        f"{place}: the chat template rewrites what comes before message {turn + 1}, so the assistant's "
                        "tokens cannot be found; mark them with {% generation %} in a template of your own"
                    )
                trained[len(before) : len(until)] = True
        return ids, trained

    def _ids(self, messages: list[Message], *, prompt: bool = False) -> np.ndarray:
        if not messages:  # the assistant has the first turn
            return np.empty(0, np.int64)
        rendered = self._pretrained.apply_chat_template(
            messages, add_generation_prompt=prompt, return_dict=True, tokenizer_kwargs=_QUIET
        )
        return np.array(rendered["input_ids"])


def _starts_with(whole: np.ndarray, part: np.ndarray) -> bool:
    return len(part) <= len(whole) and bool((whole[: len(part)] == part).all())
