"""Rows of many shapes become conversations; what is not read of them is named."""

from __future__ import annotations

import json

import pytest

from blocktrain.data.conversation import FIELDS, SHAPES, ConversationReader
from blocktrain.data.row_report import RowError
from blocktrain.errors import ConfigError, DataError

TURNS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
SYSTEM = {"role": "system", "content": "Be short."}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def read(record, **settings):
    return ConversationReader(**settings).read(record, "row 1")


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TURNS, "source": "somewhere"},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"question": "2 + 2?", "answer": "4"},
        {"query": "2 + 2?", "response": "4"},
        {"instruction": "2 + 2?", "input": "", "output": "4"},
        {"instruction": "2 + 2?", "output": "4"},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"conversations": [{"from": "user", "value": "2 + 2?"}, {"from": "assistant", "value": "4"}]},
        {"conversations": TURNS},
        {"messages": None, "question": None, "answer": None, "prompt": "2 + 2?", "completion": "4"},
    ],
    ids=[
        *("messages", "prompt", "prompt of messages", "question", "query", "alpaca", "alpaca without input"),
        *("sharegpt", "sharegpt with other roles", "conversations of messages", "columns of several shapes"),
    ],
)
def test_shapes(record):
    assert read(record).messages == TURNS


def test_an_alpaca_input_follows_the_instruction():
    record = {"instruction": "Add.", "input": "2 + 2", "output": "4"}
    assert read(record).messages[0]["content"] == "Add.\n\n2 + 2"


def row(required: tuple[str, ...]) -> dict[str, object]:
    """A row of the shape with these fields."""
    return {required[0]: TURNS} if len(required) == 1 else dict(zip(required, ("2 + 2?", "4"), strict=True))


READ = {
    ("messages",): {"system", "tools"},
    ("conversations",): {"system", "tools"},
    ("prompt", "completion"): {"system", "history", "tools"},
    ("question", "answer"): {"system", "history", "tools"},
    ("instruction", "output"): {"input", "system", "history", "tools"},
    ("query", "response"): {"system", "history", "tools"},
}
VALUES = {"input": "Think.", "system": "Be short.", "history": [["Hi", "Hello"]], "tools": TOOLS}


def test_the_shapes_are_these():
    assert {shape.required: set(shape.optional) for shape in SHAPES} == READ


@pytest.mark.parametrize("required", READ, ids=" ".join)
def test_every_field_is_read_or_named(required: tuple[str, ...]):
    """Alpaca's `system` and `history`, and `system` and `tools` of every shape, were dropped, and nothing said so."""
    plain = read(row(required))
    assert (plain.messages, plain.tools, plain.ignored) == (TURNS, None, ())
    for field, value in VALUES.items():
        found = read({**row(required), field: value})
        if field in READ[required]:
            assert (found.messages, found.tools) != (plain.messages, plain.tools)
            assert found.ignored == ()
        else:
            assert found.messages == plain.messages
            assert found.ignored == (field,)
    other = read({**row(required), "id": 3, "text": "x", "empty": None, "blank": ""})
    assert other.ignored == ("id", "text")  # what is empty is not lost
    others = set(FIELDS) - {"messages", "conversations", *required, *READ[required]}
    assert all(read({**row(required), field: "y"}).ignored == (field,) for field in others)


def test_what_becomes_of_system_and_history_and_tools():
    alpaca = {"instruction": "2 + 2?", "output": "4", "system": "Be short.", "history": [["Hi", "Hello"]]}
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert read(alpaca).messages == [SYSTEM, *earlier, *TURNS]
    assert read({**alpaca, "history": json.dumps(alpaca["history"])}).messages == [SYSTEM, *earlier, *TURNS]
    assert read({"prompt": "2 + 2?", "completion": "4", "system": "Be short."}).messages == [SYSTEM, *TURNS]
    assert read({"messages": TURNS, "system": "Be short."}).messages == [SYSTEM, *TURNS]
    assert read({"messages": [SYSTEM, *TURNS], "system": "Be short."}).messages == [SYSTEM, *TURNS]
    assert read({"messages": TURNS, "tools": TOOLS}).tools == TOOLS
    assert read({"messages": TURNS, "tools": json.dumps(TOOLS)}).tools == TOOLS
    assert read({"messages": TURNS, "tools": []}).tools is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"text": "a", "id": 3},
            r"row 1 is not a conversation: its fields are text, id; known shapes: messages, conversations, prompt and",
        ),
        ({"messages": []}, r"'messages' must be a list of messages, not an empty list"),
        ({"messages": "hello"}, r"'messages' must be a list of messages, not text"),
        ({"messages": [{"who": "gpt", "value": "x"}]}, r"each message in 'messages' must have a role and a content"),
        ({"messages": [{"role": "user", "content": None}]}, r"each message in 'messages' must have a role and a cont"),
        ({"messages": ["hello"]}, r"each message in 'messages' must have a role and a content, not 'hello'"),
        ({"messages": [{"role": "user", "content": 3}]}, r"content of a message in 'messages' is a number, not text"),
        ({"messages": TURNS[:1]}, r"no message is from the assistant.*\(roles: user\)"),
        ({"messages": [*TURNS, {"role": "bing", "content": "x"}]}, r"role 'bing' is not known.*roles = { bing = \"ass"),
        ({"prompt": "a", "completion": 3}, r"field 'completion' is a number, not text"),
        ({"prompt": "a", "completion": TURNS}, r"'completion' begins with a message of the user, although 'prompt'"),
        ({"prompt": "a", "completion": "b", "system": 3}, r"row 1: field 'system' is a number, not text"),
        ({"messages": [SYSTEM, *TURNS], "system": "Be long."}, r"'system' and a message of the system say different"),
        ({"query": "a", "response": "b", "history": 3}, r"field 'history' is a number, not a list of \[user, assist"),
        ({"query": "a", "response": "b", "history": ["c"]}, r"field 'history' must be a list of \[user, assistant\]"),
        ({"query": "a", "response": "b", "history": [["c", None]]}, r"field 'history' must be a list of \[user, ass"),
        ({"messages": TURNS, "tools": {"name": "add"}}, r"field 'tools' is an object, not a list of objects"),
        ({"messages": TURNS, "tools": ["add"]}, r"field 'tools' must be a list of objects"),
        ({"messages": TURNS, "tools": "[{'name': 'add'}]"}, r"row 1: field 'tools' is not JSON"),
    ],
)
def test_a_record_that_is_not_a_conversation_says_why(record, message: str):
    with pytest.raises(RowError, match=message):
        read(record)


def test_a_message_with_calls_needs_no_content():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}
    assert read({"messages": [TURNS[0], call, *TURNS]}).messages[1] == call


# -- preferences -------------------------------------------------------------------------------------------------------


def test_preference_rows_are_refused_by_name_with_the_way_out():
    row = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    with pytest.raises(
        DataError, match=r"row 1 is a preference row \(chosen, rejected\).*completion = \"chosen\""
    ) as error:
        read(row)
    assert not isinstance(error.value, RowError)  # such rows are not skipped
    found = read(row, fields={"completion": "chosen"})
    assert (found.messages, found.ignored) == (TURNS, ("rejected",))
    whole = {"prompt": "2 + 2?", "chosen": TURNS, "rejected": TURNS}
    found = read(whole, fields={"messages": "chosen"})
    assert (found.messages, found.ignored) == (TURNS, ("prompt", "rejected"))


# -- other names -------------------------------------------------------------------------------------------------------


def test_fields_and_roles_have_other_names():
    dialog = [{"who": "guest", "says": "2 + 2?", "mood": "ok"}, {"who": "bot", "says": "4"}]
    fields = {"messages": "dialog", "role": "who", "content": "says", "system": "persona"}
    found = read({"dialog": dialog, "persona": "Be short."}, fields=fields, roles={"guest": "user", "bot": "assistant"})
    assert found.messages == [SYSTEM, {**TURNS[0], "mood": "ok"}, TURNS[1]]
    assert found.ignored == ()


def test_named_fields_come_before_those_of_other_shapes():
    row = {"messages": [*TURNS, *TURNS], "completion": "5", "ask": "2 + 2?", "say": "4"}
    found = read(row, fields={"prompt": "ask", "completion": "say"})
    assert (found.messages, found.ignored) == (TURNS, ("messages", "completion"))
    swapped = {"prompt": "4", "completion": "2 + 2?"}
    assert read(swapped, fields={"prompt": "completion", "completion": "prompt"}).messages == TURNS


def test_a_role_of_ones_own_is_named_in_roles():
    critic = {"role": "critic", "content": "Hm."}
    assert read({"messages": [*TURNS, critic]}, roles={"critic": "critic"}).messages[-1] == critic
    turned = [{"role": "human", "content": "4"}, {"role": "gpt", "content": "2 + 2?"}]
    found = read({"messages": turned}, roles={"human": "assistant", "gpt": "user"}).messages
    assert [message["role"] for message in found] == ["assistant", "user"]


def test_a_second_role_or_content_of_a_message_is_kept_or_named():
    both = [{**TURNS[0], "from": "gpt"}, {**TURNS[1], "value": "5"}]
    assert read({"messages": both}).messages == both  # a template may read them; otherwise it says that it does not
    others = [{**turn, "text": "6"} for turn in TURNS]
    found = read({"messages": others}, fields={"content": "text"})
    assert [message["content"] for message in found.messages] == ["6", "6"]
    assert found.ignored == ("messages[].content",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"promt": "ask"}, r"fields has the unknown key 'promt'; did you mean 'prompt'\?"),
        ({"prompt": ""}, r"fields.prompt is empty"),
        ({"prompt": "ask", "completion": "ask"}, r"fields names one field of the rows twice"),
    ],
)
def test_fields_are_checked(fields: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        ConversationReader(fields)
