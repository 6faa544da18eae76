"""From messages to tokens, and which of those the assistant wrote. Only the assistant's tokens are learned:

    user:\nWhat is 1 + 1?\nassistant:\n2<eos>          the default template
    .................................| 1  1          trained

The template is the tokenizer's own and is rendered by `transformers`. If it marks the assistant's turns
(`{% generation %}`), the marks decide. If not, a turn consists of the tokens by which the rendered conversation grows
when the turn is added; a template that rewrites earlier tokens is refused.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.data.conversation import Conversation, Message, Tool
from blocktrain.data.row_report import RowError, is_empty
from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import ConfigError, DataError, first_line

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
            except OSError as error:
                raise ConfigError(f"template '{path}' cannot be read: {error.strerror}") from None
            except UnicodeDecodeError as error:
                raise ConfigError(f"template '{path}' is not UTF-8 (byte {error.start:,}); save it as UTF-8") from None
        elif self._pretrained.chat_template is None:
            self._pretrained.chat_template = DEFAULT
        # A tokenizer may have a second template, which `transformers` takes where a conversation has tools.
        self._text = str(self._pretrained.get_chat_template())
        self._text_for_tools = str(self._pretrained.get_chat_template(tools=[]))
        texts = dict.fromkeys((self._text, self._text_for_tools))
        self.fingerprint = hashlib.sha256(f"{tokenizer.fingerprint} {' '.join(texts)}".encode()).hexdigest()[:16]

    def unread(self, conversation: Conversation) -> list[str]:
        """What `conversation` has besides roles and contents and the template never mentions: `tools`, and fields of
        messages as `messages[].name`."""
        text = self._text_for_tools if conversation.tools else self._text
        extras = {key for message in conversation.messages for key, value in message.items() if not is_empty(value)}
        names = [(key, f"messages[].{key}") for key in sorted(extras - {"role", "content"})]
        names += [("tools", "tools")] if conversation.tools else []
        return [name for key, name in names if not re.search(rf"\b{re.escape(key)}\b", text)]

    def encode(self, conversation: Conversation, place: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, int64 (T,), and whether the assistant wrote each, bool (T,).

        Raises `RowError`, naming `place`, if the template refuses the conversation; `DataError` if the assistant's
        tokens cannot be found in what it renders.
        """
        messages, tools = conversation.messages, conversation.tools
        text = self._text_for_tools if tools else self._text
        try:
            if self._pretrained.is_fast and _MARKS.search(text):
                rendered = self._pretrained.apply_chat_template(
                    messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs=_QUIET
                )
                return np.array(rendered["input_ids"]), np.array(rendered["assistant_masks"], bool)
            return self._by_growth(conversation, place)
        except DataError:
            raise
        except Exception as error:  # a template raises any class, Jinja's errors among others
            raise RowError(f"{place}: the chat template refuses this conversation: {first_line(error)}") from error

    def _by_growth(self, conversation: Conversation, place: str) -> tuple[np.ndarray, np.ndarray]:
        messages, tools = conversation.messages, conversation.tools
        ids = self._ids(messages, tools)
        trained = np.zeros(len(ids), bool)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._ids(messages[:turn], tools, prompt=True)
                until = self._ids(messages[: turn + 1], tools)
                if not (_starts_with(until, before) and _starts_with(ids, until)):
                    raise DataError(
                        f"{place}: the chat template rewrites what comes before message {turn + 1}, so the assistant's "
                        "tokens cannot be found; mark them with {% generation %} in a template of your own"
                    )
                trained[len(before) : len(until)] = True
        return ids, trained

    def _ids(self, messages: list[Message], tools: list[Tool] | None, *, prompt: bool = False) -> np.ndarray:
        if not messages:  # the assistant has the first turn
            return np.empty(0, np.int64)
        rendered = self._pretrained.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompt, return_dict=True, tokenizer_kwargs=_QUIET
        )
        return np.array(rendered["input_ids"])


def _starts_with(whole: np.ndarray, part: np.ndarray) -> bool:
    return len(part) <= len(whole) and bool((whole[: len(part)] == part).all())
