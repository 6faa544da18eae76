"""From messages to tokens, and which of those the assistant wrote. Only the assistant's tokens are learned:

    user:\nWhat is 1 + 1?\nassistant:\n2<eos>          the default template
    .................................| 1  1          trained

The template is the tokenizer's own and is rendered by `transformers`. If it marks the assistant's turns
(`{% generation %}`), the marks decide. If not, a turn is the text by which the rendered conversation grows when the
turn is added. This fails for templates of reasoning models, which drop the thoughts of earlier turns. For these, TRL's
template for training is used where TRL is installed and has one; else the turns are found by the texts that begin and
end them in the commonest families. Any other template that rewrites earlier turns is refused.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.data.conversation import Conversation, Message, Tool
from blocktrain.data.row_report import RowError, is_empty
from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import ConfigError, DataError, first_line

logger = logging.getLogger(__name__)

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
# What begins a turn of the assistant, and what ends it (a regular expression).
_TURNS = {
    "ChatML (Qwen)": ("<|im_start|>assistant\n", r"<\|im_end\|>\n?"),
    "gpt-oss": ("<|start|>assistant", r"<\|(?:end|return|call)\|>"),
    "Phi": ("<|assistant|>\n", r"<\|end\|>\n?(?:<\|endoftext\|>)?"),
    "DeepSeek": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "Llama 3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", r"<\|(?:eot_id|eom_id)\|>"),
    "Gemma": ("<start_of_turn>model\n", r"<end_of_turn>\n?"),
}
# A template that rewrites earlier turns does it to these, with or without the thought.
_PROBE = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3?"},
    {"role": "assistant", "content": "4"},
]
_THOUGHT = "<think>\n1 + 1\n</think>\n\n"

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as a text; `spans` are the assistant's characters, [begin, end) each."""

    text: str
    spans: tuple[tuple[int, int], ...]


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
        self._turns: tuple[str, str] | None = None
        if self._rewrites():
            self._find_turns_of(tokenizer.name)
        texts = dict.fromkeys((self._text, self._text_for_tools, *(self._turns or ())))
        self.fingerprint = hashlib.sha256(f"{tokenizer.fingerprint} {' '.join(texts)}".encode()).hexdigest()[:16]

    def unread(self, conversation: Conversation) -> list[str]:
        """What `conversation` has besides roles and contents and the template never mentions: `tools`, and fields of
        messages as `messages[].name`."""
        text = self._text_for_tools if conversation.tools else self._text
        extras = {key for message in conversation.messages for key, value in message.items() if not is_empty(value)}
        names = [(key, f"messages[].{key}") for key in sorted(extras - {"role", "content"})]
        names += [("tools", "tools")] if conversation.tools else []
        return [name for key, name in names if not re.search(rf"\b{re.escape(key)}\b", text)]

    def render(self, conversation: Conversation, place: str) -> Rendered:
        """The text of a conversation and the assistant's parts of it.

        Raises `RowError`, naming `place`, if the template refuses the conversation; `DataError` if the assistant's
        turns cannot be found in what it renders.
        """
        try:
            return self._rendered(conversation, place)
        except DataError:
            raise
        except Exception as error:  # a template raises any class, Jinja's errors among others
            raise RowError(f"{place}: the chat template refuses this conversation: {first_line(error)}") from error

    def encode(self, conversations: list[Rendered]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The token ids of each conversation, int64 (T,), and which tokens the assistant wrote, bool (T,)."""
        if not conversations:
            return []
        texts = [conversation.text for conversation in conversations]
        encoded = self._pretrained(texts, add_special_tokens=False, return_attention_mask=False, **_QUIET)
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for row, (conversation, ids) in enumerate(zip(conversations, encoded["input_ids"], strict=True)):
            trained = np.zeros(len(ids), bool)
            for begin, end in conversation.spans:
                if self._pretrained.is_fast:  # a character may belong to no token, as a space before a word
                    at = (encoded.char_to_token(row, place) for place in range(begin, end))
                    back = (encoded.char_to_token(row, place) for place in range(end - 1, begin - 1, -1))
                    first, last = (
                        next((token for token in tokens if token is not None), None) for tokens in (at, back)
                    )
                    if first is not None and last is not None:
                        trained[first : last + 1] = True
                else:
                    trained[slice(*(self._count(conversation.text[:place]) for place in (begin, end)))] = True
            found.append((np.array(ids, np.int64), trained))
        return found

    def _count(self, text: str) -> int:
        return len(self._pretrained(text, add_special_tokens=False, **_QUIET)["input_ids"])

    def _rewrites(self) -> bool:
        """Whether adding a turn changes what this template renders for earlier ones."""
        thinking = [_PROBE[0], {**_PROBE[1], "content": _THOUGHT + _PROBE[1]["content"]}, *_PROBE[2:]]
        for messages in (_PROBE, thinking):
            try:
                self._rendered(Conversation(messages=messages), "")
            except DataError:
                return True
            except Exception:  # it refuses the probe: each conversation will show
                logger.debug("the chat template refuses a probe", exc_info=True)
        return False

    def _find_turns_of(self, name: str) -> None:
        """Choose how the turns are found where the template rewrites, and say so."""
        if template := _template_of_trl(self._pretrained):
            self._text = self._text_for_tools = template
            logger.warning(
                "the chat template of '%s' rewrites earlier turns: TRL's template for training is used", name
            )
            return
        prompt = self._render(self._text, _PROBE[:1], None, add_generation_prompt=True)
        for family, turns in _TURNS.items():
            if turns[0] in prompt:
                self._turns = turns
                logger.warning(
                    "the chat template of '%s' rewrites earlier turns: those of the assistant are found by the texts "
                    "that begin and end them in %s; earlier turns are learned as the template rewrites them",
                    *(name, family),
                )
                return

    def _by_turns(self, messages: list[Message], whole: str, turns: tuple[str, str], place: str) -> Rendered:
        begin, end = turns
        others = [message for message in messages if message["role"] != "assistant"]
        spans = [match.span() for match in re.finditer(f"(?<={re.escape(begin)}).*?(?:{end}|\\Z)", whole, re.DOTALL)]
        if len(spans) < len(messages) - len(others) or any(begin in str(message.get("content")) for message in others):
            raise RowError(f"{place}: the turns of the assistant cannot be found by {begin!r}, with which each begins")
        return Rendered(text=whole, spans=tuple(spans))

    def _rendered(self, conversation: Conversation, place: str) -> Rendered:
        messages, tools = conversation.messages, conversation.tools
        text = self._text_for_tools if tools else self._text
        if _MARKS.search(text):
            (rendered,), (spans,) = self._jinja(text, messages, tools, return_assistant_tokens_mask=True)
            return Rendered(text=rendered, spans=tuple(spans))
        whole = self._render(text, messages, tools)
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(text, messages[:turn], tools, add_generation_prompt=True)
                until = self._render(text, messages[: turn + 1], tools)
                if not (until.startswith(before) and whole.startswith(until)):
                    if self._turns:
                        return self._by_turns(messages, whole, self._turns, place)
                    raise DataError(
                        f"{place}: the chat template rewrites what comes before message {turn + 1}, so the assistant's "
                        "tokens cannot be found; mark them with {% generation %} in a template of your own"
                    )
                spans.append((len(before), len(until)))
        return Rendered(text=whole, spans=tuple(spans))

    def _render(self, template: str, messages: list[Message], tools: list[Tool] | None, **settings: bool) -> str:
        if not messages:  # the assistant has the first turn
            return ""
        return self._jinja(template, messages, tools, **settings)[0][0]

    def _jinja(self, template: str, messages: list[Message], tools: list[Tool] | None, **settings: bool) -> Any:
        """What `apply_chat_template` renders; that gives the places of the marks only as tokens, a row at a time."""
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
        schemas: Any = tools
        names = self._pretrained.special_tokens_map
        return render_jinja_template([messages], tools=schemas, chat_template=template, **settings, **names)


def _template_of_trl(pretrained: Any) -> str | None:
    """TRL's version of this tokenizer's template, with marks; None without TRL, or where it has none."""
    try:
        return import_module("trl.chat_template_utils").get_training_chat_template(pretrained)
    except (ImportError, AttributeError, ValueError):
        return None
