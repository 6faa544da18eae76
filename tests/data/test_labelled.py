"""Texts with labels: fields, classes, padding; the real sets of the shared data."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from blocktrain.data.labelled import LabelledConfig, open_labelled
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import ConfigError, DataError

TRAIN = 'text,label\nfine,good\n"bad, and\nlong",bad\nso so,good\n'


def config(folder: Path, train: str = TRAIN, validation: str = "text,label\nbad,bad\n", **settings) -> LabelledConfig:
    (folder / "train.csv").write_text(train)
    (folder / "test.csv").write_text(validation)
    return LabelledConfig(source=str(folder), cache=str(folder / "cache"), **settings)


def test_texts_are_padded_and_labels_numbered(tmp_path: Path):
    data = open_labelled(config(tmp_path, row_tokens=12))
    assert data.classes == ("bad", "good")
    batch = data.train.batch([0, 1])
    assert batch["labels"].tolist() == [1, 0]
    assert batch["attention_mask"].sum(1).tolist() == [4, 12]  # the second is cut from 13
    assert batch["input_ids"][0].tolist() == [*b"fine", *[256] * 8]
    assert ByteTokenizer().decode(batch["input_ids"][1].tolist()) == "bad, and\nlon"
    assert data.train.weights([0, 1]).tolist() == [1, 1]


def test_cut_texts_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        open_labelled(config(tmp_path, row_tokens=4))
    assert "2 of 3 train texts are longer than 4 tokens and are cut off" in caplog.text


def test_numbers_are_classes_in_their_order(tmp_path: Path):
    rows = "text,label\n" + "".join(f"t{number},{number}\n" for number in range(11))
    assert open_labelled(config(tmp_path, rows, "text,label\nx,10\n")).classes == tuple(map(str, range(11)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_field": "lable"}, r"has no field 'lable'; did you mean 'label'\? \(label_field\)"),
        ({"validation": "text,label\nx,ugly\n"}, r"validation texts have the class 'ugly', which no training text has"),
        ({"train": "text,label\nalone\n"}, r"line 2 does not have the 2 fields that the first line names"),
    ],
)
def test_bad_data_say_why(tmp_path: Path, settings, message: str):
    with pytest.raises(DataError, match=message):
        open_labelled(config(tmp_path, **settings))


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="row_tokens must be at least 1"):
        LabelledConfig(source="x", row_tokens=0)


def test_real_sets(shared_data: Path, tmp_path: Path):
    """banking77 is csv with quoted newlines, sst2 tsv with lone quotation marks."""
    banking = open_labelled(
        LabelledConfig(source=str(shared_data / "banking77"), label_field="category", cache=str(tmp_path))
    )
    assert (len(banking.train), len(banking.validation), len(banking.classes or ())) == (10_003, 3_080, 77)
    short = LabelledConfig(
        source=str(shared_data / "sst2"), text_field="sentence", max_documents=2000, cache=str(tmp_path)
    )
    sst2 = open_labelled(short)
    assert (len(sst2.train), len(sst2.validation), sst2.classes) == (2000, 872, ("0", "1"))
    assert int((sst2.validation.labels == 0).sum()) == 428


def test_the_first_validation_texts_are_of_all_classes(tmp_path: Path) -> None:
    """However the file is sorted: an evaluation takes the first rows."""
    sides = "".join(f"{side} {number},{side}\n" for side in ("good", "bad") for number in range(40))
    data = open_labelled(config(tmp_path, validation=f"text,label\n{sides}"))
    assert 3 <= int(data.validation.labels[:16].sum()) <= 13
    assert int(data.validation.labels.sum()) == 40


def test_fields_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second sentence of a pair was dropped without a warning."""
    rows = "text,second,label\nfine,too,good\nbad,,bad\n"
    with caplog.at_level(logging.WARNING):
        open_labelled(config(tmp_path, rows))
    assert "these fields are not read: 'second' (1 rows) of 3 rows; text_field and label_field name" in caplog.text


def test_a_bad_row_is_skipped_and_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": "fine", "label": "good"}, {"text": None, "label": "bad"}, {"text": "no", "label": "bad"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]))
    settings = LabelledConfig(source=str(tmp_path), cache=str(tmp_path / "cache"), row_tokens=12)
    with caplog.at_level(logging.WARNING):
        data = open_labelled(settings)
    assert data.train.labels.tolist() == [1, 0]
    assert data.train.batch([1])["input_ids"][0].tolist()[:3] == [*b"no", 256]
    assert (
        "1 of 3 train texts cannot be used and are skipped; they: 'train.jsonl#1': field 'text' is null" in caplog.text
    )
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"text": "x", "label": 0.5}])))
    with pytest.raises(
        DataError, match=r"2 of 4 train texts cannot be used.* the first: 'train.jsonl#1': field 'text'"
    ):
        open_labelled(settings)
