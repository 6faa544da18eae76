"""Records become conversations, and a template says which of their tokens the assistant wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.data.conversation import DEFAULT, ChatTemplate, messages_of
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import ConfigError, DataError

# -- records -----------------------------------------------------------------------------------------------------------


TURNS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TURNS, "source": "somewhere"},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"question": "2 + 2?", "answer": "4"},
        {"instruction": "2 + 2?", "input": "", "output": "4"},
        {"instruction": "2 + 2?", "output": "4"},
    ],
    ids=["messages", "prompt", "prompt of messages", "question", "alpaca", "alpaca without input"],
)
def test_shapes(record):
    assert messages_of(record, "row 1") == TURNS


def test_an_alpaca_input_follows_the_instruction():
    record = {"instruction": "Add.", "input": "2 + 2", "output": "4"}
    assert messages_of(record, "row 1")[0]["content"] == "Add.\n\n2 + 2"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"text": "a", "id": 3},
            r"row 1 is not a conversation: its fields are text, id; known shapes: messages, prompt and",
        ),
        ({"messages": []}, r"'messages' must be a list of messages, not list"),
        ({"messages": [{"from": "gpt", "value": "x"}]}, r"each message in 'messages' must have a role and a content"),
        ({"messages": TURNS[:1]}, r"no message is from the assistant.*\(roles: user\)"),
        ({"prompt": "a", "completion": 3}, r"field 'completion' is a number, not text"),
    ],
)
def test_a_record_that_is_not_a_conversation_says_why(record, message: str):
    with pytest.raises(DataError, match=message):
        messages_of(record, "row 1")


# -- templates ---------------------------------------------------------------------------------------------------------


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


def rendered(template: ChatTemplate) -> tuple[str, list[str]]:
    """The rendered text, and the parts of it that are trained."""
    ids, trained = template.encode(TALK, "row 1")
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
    ids, trained = ChatTemplate(tokenizer).encode(TALK, "row 1")
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
    for one, other in zip(marked.encode(TALK, "row 1"), grown.encode(TALK, "row 1"), strict=True):
        assert one.tolist() == other.tolist()


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path):
    """The templates of reasoning models do so: they drop the thoughts of all answers but the last."""
    forgets = "{% for m in messages %}{{ m['content'] if loop.last else m['content'][:1] }}{% endfor %}"
    with pytest.raises(DataError, match=r"row 1: the chat template rewrites what comes before message 3"):
        ChatTemplate(ByteTokenizer(), write(tmp_path, forgets)).encode(TALK, "row 1")


def test_an_error_of_a_template_names_the_place(tmp_path: Path):
    strict = "{{ raise_exception('no system messages') }}"
    with pytest.raises(DataError, match=r"row 7: the chat template refuses this conversation: no system messages"):
        ChatTemplate(ByteTokenizer(), write(tmp_path, strict)).encode(TALK, "row 7")
    with pytest.raises(ConfigError, match=r"template '.*nowhere' cannot be read"):
        ChatTemplate(ByteTokenizer(), str(tmp_path / "nowhere"))


def test_the_template_is_saved_with_the_tokenizer(tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = ByteTokenizer()
    ids, _ = ChatTemplate(tokenizer).encode(TALK, "row 1")
    tokenizer.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded.apply_chat_template(TALK, return_dict=True)["input_ids"] == ids.tolist()
