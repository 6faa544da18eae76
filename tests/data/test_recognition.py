"""Which kind of data a source is taken for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from blocktrain.data.corpus import open_corpus
from blocktrain.data.recognition import recognize
from blocktrain.data.records import record_of
from blocktrain.errors import DataError

CONVERSATION = {"question": "1 + 1?", "answer": "2"}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}], "label": 1, "text": "x"}, "chat"),
        (CONVERSATION, "chat"),
        ({"instruction": "Add.", "input": "", "output": "2"}, "chat"),
        ({"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}, "chat"),  # which says what can be done
        ({"text": "good film", "label": "good"}, "labelled"),
        ({"text": "Once upon a time"}, "text"),
        ({"img": None, "label": 3}, "images"),
    ],
)
def test_rows_are_recognized_by_their_fields(row: dict[str, object], kind: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    assert recognize(str(tmp_path / "data.jsonl"))[0] == kind
    assert recognize(str(tmp_path))[0] == kind


def test_text_has_no_fields(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("roses")
    assert recognize(str(tmp_path / "poem.txt")) == ("text", "plain text")
    assert recognize(str(tmp_path)) == ("text", "files of plain text")
    assert recognize("stdlib")[0] == "text"
    (tmp_path / "train.csv").write_text("query,response\n1 + 1?,2\n")
    assert recognize(str(tmp_path)) == ("chat", "query, response")  # a README beside the data


def test_a_data_set_saved_to_disk(tmp_path: Path) -> None:
    """Its descriptions are JSON files, and were taken for data."""
    rows = Dataset.from_list([CONVERSATION] * 3)
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "two"))
    for name in ("one", "two"):
        assert recognize(str(tmp_path / name)) == ("chat", "question, answer")
        corpus = open_corpus(str(tmp_path / name), text_field=None, cache=tmp_path)
        assert [record_of(document) for document in corpus.documents("train")] == [CONVERSATION] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": 2}', r"no known kind of data: its fields are a, b; name them with --set chat\.fields\.prompt"),
        ("", r"holds no rows to train on"),
        ("{", r"is not JSON"),
    ],
)
def test_what_is_not_recognized(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        recognize(str(tmp_path / "data.jsonl"))
