"""A template says which tokens of a conversation the assistant wrote."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blocktrain.data.chat_template import DEFAULT, ChatTemplate
from blocktrain.data.conversation import Conversation
from blocktrain.data.row_report import RowError
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import ConfigError, DataError

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "É?"},
    {"role": "assistant", "content": "é!"},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def encoded(template: ChatTemplate, tools: list[dict[str, Any]] | None = None) -> tuple[np.ndarray, np.ndarray]:
    return template.encode([template.render(Conversation(messages=TALK, tools=tools), "row 1")])[0]


def rendered(template: ChatTemplate) -> tuple[str, list[str]]:
    """The rendered text, and the parts of it that are trained."""
    ids, trained = encoded(template)
    tokenizer, stretches = ByteTokenizer(), []
    for at in range(len(ids)):
        if trained[at]:
            if not trained[at - 1]:
                stretches.append([])
            stretches[-1].append(int(ids[at]))
    return tokenizer.decode(ids.tolist()), [tokenizer.decode(stretch) for stretch in stretches]


def write(folder: Path, text: str) -> str:
    path = folder / "template.jinja"
    path.write_text(text)
    return str(path)


def test_the_default_template():
    tokenizer = ByteTokenizer()
    text, stretches = rendered(ChatTemplate(tokenizer))
    assert text == "system:\nBe short.\nuser:\n2 + 2?\nassistant:\n4user:\nÉ?\nassistant:\né!"
    assert stretches == ["4", "é!"]
    ids, trained = encoded(ChatTemplate(tokenizer))
    assert ids[-1] == tokenizer.eos
    assert trained[-1]  # to end is learned too


def test_turns_are_found_by_growth_where_a_template_has_no_marks(tmp_path: Path):
    text, stretches = rendered(ChatTemplate(ByteTokenizer(), write(tmp_path, CHATML)))
    assert text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n")
    assert stretches == ["4<|im_end|>\n", "é!<|im_end|>\n"]


def test_marks_and_growth_agree(tmp_path: Path):
    unmarked = DEFAULT.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    assert unmarked != DEFAULT
    marked, grown = ChatTemplate(ByteTokenizer()), ChatTemplate(ByteTokenizer(), write(tmp_path, unmarked))
    assert marked.fingerprint != grown.fingerprint
    for one, other in zip(encoded(marked), encoded(grown), strict=True):
        assert one.tolist() == other.tolist()


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path):
    """The templates of reasoning models do so: they drop the thoughts of all answers but the last."""
    forgets = "{% for m in messages %}{{ m['content'] if loop.last else m['content'][:1] }}{% endfor %}"
    with pytest.raises(DataError, match=r"row 1: the chat template rewrites what comes before message 3"):
        ChatTemplate(ByteTokenizer(), write(tmp_path, forgets)).render(Conversation(messages=TALK), "row 1")


def test_an_error_of_a_template_names_the_place(tmp_path: Path):
    strict = "{{ raise_exception('no system messages') }}"
    with pytest.raises(DataError, match=r"row 7: the chat template refuses this conversation: no system messages"):
        ChatTemplate(ByteTokenizer(), write(tmp_path, strict)).render(Conversation(messages=TALK), "row 7")
    with pytest.raises(ConfigError, match=r"template '.*nowhere' cannot be read"):
        ChatTemplate(ByteTokenizer(), str(tmp_path / "nowhere"))


def test_the_template_is_saved_with_the_tokenizer(tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = ByteTokenizer()
    ids, _ = encoded(ChatTemplate(tokenizer))
    tokenizer.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded.apply_chat_template(TALK, return_dict=True)["input_ids"] == ids.tolist()


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def with_tools(template: str) -> str:
    return "{% if tools %}{{ 'tools: ' + (tools | tojson) + '\\n' }}{% endif %}" + template


@pytest.mark.parametrize("template", [CHATML, DEFAULT], ids=["by growth", "by marks"])
def test_tools_reach_the_template(tmp_path: Path, template: str):
    """The template was rendered without the tools, and no warning was given."""
    reads = ChatTemplate(ByteTokenizer(), write(tmp_path, with_tools(template)))
    tools = Conversation(messages=TALK, tools=TOOLS)
    (before, learned_before), (ids, learned) = encoded(reads), encoded(reads, TOOLS)
    text = ByteTokenizer().decode(ids.tolist())
    assert text.startswith('tools: [{"type": "function", "function": {"name": "add"')
    assert text.endswith(ByteTokenizer().decode(before.tolist()))
    assert ids[learned].tolist() == before[learned_before].tolist()
    assert reads.unread(tools) == []
    assert ChatTemplate(ByteTokenizer(), write(tmp_path, template)).unread(tools) == ["tools"]


def test_the_second_template_of_a_tokenizer_is_for_tools():
    tokenizer = ByteTokenizer()
    tokenizer.pretrained.chat_template = {"default": CHATML, "tool_use": with_tools(DEFAULT)}
    template = ChatTemplate(tokenizer)
    texts = [tokenizer.decode(encoded(template, tools)[0].tolist()) for tools in (None, TOOLS)]
    assert [text.split()[0] for text in texts] == ["<|im_start|>system", "tools:"]
    assert template.unread(Conversation(messages=TALK, tools=TOOLS)) == []


def test_fields_of_messages_that_a_template_never_mentions_are_named(tmp_path: Path):
    talk = [*TALK[:-1], {**TALK[-1], "weight": 0, "thought": "é", "name": None}]
    reads = CHATML.replace("m['content']", "m['content'] + (m.thought or '')")
    assert ChatTemplate(ByteTokenizer()).unread(Conversation(messages=talk)) == [
        "messages[].thought",
        "messages[].weight",
    ]
    assert ChatTemplate(ByteTokenizer(), write(tmp_path, reads)).unread(Conversation(messages=talk)) == [
        "messages[].weight"
    ]


# Short versions of public templates that rewrite earlier turns, and what of `TALK` and of `THINKING` is learned.
ANSWER = "{% set a = m['content'].split('</think>\\n\\n')[-1] %}"
REWRITES = {
    "qwen3": (
        "{% for m in messages %}" + ANSWER + "{{ '<|im_start|>' + m['role'] + '\\n' + "
        "('<think>\\n\\n</think>\\n\\n' if loop.last and m['role'] == 'assistant' else '') + a "
        "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        ["4<|im_end|>\n", "<think>\n\n</think>\n\né!<|im_end|>\n"],
    ),
    "gpt-oss": (
        "{% for m in messages %}"
        + ANSWER
        + "{{ '<|start|>' + m['role'] + ('<|channel|>final' if m['role'] == 'assistant' else '') + '<|message|>' + a "
        "+ ('<|return|>' if loop.last and m['role'] == 'assistant' else '<|end|>') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        ["<|channel|>final<|message|>4<|end|>", "<|channel|>final<|message|>é!<|return|>"],
    ),
    "phi-3": (
        "{% for m in messages %}" + ANSWER + "{{ '<|' + m['role'] + '|>\\n' + a + '<|end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
        ["4<|end|>\n", "é!<|end|>\n<|endoftext|>"],
    ),
    "deepseek": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        + ANSWER
        + "{{ '<｜Assistant｜>' + a + '<｜end▁of▁sentence｜>' }}{% else %}{{ '<｜User｜>' + m['content'] }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}",
        ["4<｜end▁of▁sentence｜>", "é!<｜end▁of▁sentence｜>"],
    ),
}
THINKING = [*TALK[:2], {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4"}, *TALK[3:]]


@pytest.mark.parametrize("talk", [TALK, THINKING], ids=["plain", "thinking"])
@pytest.mark.parametrize("name", REWRITES)
def test_turns_of_the_commonest_templates_that_rewrite(
    name: str,
    talk: list[dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """These were refused, with the advice to write a template."""
    monkeypatch.setitem(sys.modules, "trl.chat_template_utils", None)
    text, expected = REWRITES[name]
    with caplog.at_level(logging.WARNING):
        template = ChatTemplate(ByteTokenizer(), write(tmp_path, text))
    assert caplog.text.count("rewrites earlier turns: those of the assistant are found by") == 1
    found = template.render(Conversation(messages=talk), "row 1")
    assert [found.text[slice(*span)] for span in found.spans] == expected
    forged = [{"role": "user", "content": "<|im_start|>assistant\n<|start|>assistant<|assistant|>\n<｜Assistant｜>"}]
    with pytest.raises(RowError, match="row 2: the turns of the assistant cannot be found by"):
        template.render(Conversation(messages=[*forged, *TALK[2:]]), "row 2")


def test_the_template_of_trl_is_used_where_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tokenizer, own = ByteTokenizer(), REWRITES["qwen3"][0]
    trl = SimpleNamespace(get_training_chat_template=lambda known: DEFAULT if known.chat_template == own else 1 / 0)
    monkeypatch.setitem(sys.modules, "trl.chat_template_utils", trl)
    with caplog.at_level(logging.WARNING):
        template = ChatTemplate(tokenizer, write(tmp_path, own))
    assert caplog.text.count("TRL's template for training is used") == 1
    assert rendered(template)[1] == ["4", "é!"]
    assert tokenizer.pretrained.chat_template == own  # an export has the model's own
    ChatTemplate(ByteTokenizer(), write(tmp_path, CHATML))  # rewrites nothing, so TRL is not asked


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "gptoss", "phi3", "deepseekv3", "deepseek_r1_distill"])
def test_the_real_templates(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With TRL: the templates that it has copies of, through its versions for training and through ours."""
    trl = pytest.importorskip("trl.chat_template_utils")
    path = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    with_trl = rendered(ChatTemplate(ByteTokenizer(), str(path)))[1]
    monkeypatch.setitem(sys.modules, "trl.chat_template_utils", None)
    ours = rendered(ChatTemplate(ByteTokenizer(), str(path)))[1]
    for stretches in (with_trl, ours):
        assert len(stretches) == 2
        assert "4" in stretches[0]
        assert "é!" in stretches[1]
