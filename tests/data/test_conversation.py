"""Every usual shape of a record is a conversation; the error for any other says which fields it has."""

from __future__ import annotations

import pytest

from blocktrain.data.conversation import messages_of
from blocktrain.errors import DataError

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
