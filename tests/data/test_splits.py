"""Held-out documents: disjoint, stable, never none."""

from __future__ import annotations

from blocktrain.data.document import Document, joined
from blocktrain.data.splits import first_documents, hold_out


def _documents(count):
    return [Document(id=f"rows.jsonl#{i}", text=f"text {i}") for i in range(count)]


def _ids(documents):
    return [document.id for document in documents]


def test_two_disjoint_sides_of_about_the_requested_share():
    documents = _documents(5000)
    train, validation = (_ids(side) for side in hold_out(lambda: documents, 0.02))
    assert sorted(train + validation) == sorted(_ids(documents))
    assert 70 < len(validation) < 130


def test_neither_order_nor_more_documents_move_a_document():
    few, many = _documents(2000), _documents(4000)
    before = _ids(hold_out(lambda: few, 0.02)[1])
    after = _ids(hold_out(lambda: many[::-1], 0.02)[1])
    assert before == [name for name in reversed(after) if name in set(_ids(few))]


def test_few_documents_hold_out_one():
    for count in range(2, 12):
        documents = _documents(count)
        train, validation = (_ids(side) for side in hold_out(lambda documents=documents: documents, 1e-9))
        assert len(validation) == 1
        assert sorted(train + validation) == sorted(_ids(documents))


def test_a_single_document_is_cut():
    whole = Document(id="input.txt", text="0123456789" * 10)
    (train,), (validation,) = hold_out(lambda: [whole], 0.1)
    assert (train.id, validation.id) == ("input.txt[:90]", "input.txt[90:]")
    assert train.text + validation.text == whole.text
    assert len(validation.text) == 10


def test_a_cut_leaves_at_least_one_character_for_validation():
    _, validation = hold_out(lambda: [Document(id="x", text="ab")], 0.001)
    assert [document.text for document in validation] == ["b"]


def test_a_document_in_parts_is_cut_like_a_whole_one():
    """A file of 200 MB was one text, of which every step made a copy."""
    text = "0123456789" * 10
    parts = [Document(id="input.txt", text=text[at : at + 7], last=at + 7 >= 100) for at in range(0, 100, 7)]
    whole = [list(side) for side in hold_out(lambda: [Document(id="input.txt", text=text)], 0.1)]
    sides = [list(side) for side in hold_out(lambda: parts, 0.1)]
    assert [len(side) for side in sides] == [13, 3]
    assert [list(joined(side)) for side in sides] == whole


def test_a_limit_counts_documents_and_not_parts():
    parts = [Document(id=f"{part // 3}", text="x", last=part % 3 == 2) for part in range(9)]
    assert list(first_documents(parts, 2)) == parts[:6]
    assert list(first_documents(parts, None)) == parts


def test_nothing_to_hold_out():
    assert [list(side) for side in hold_out(lambda: [], 0.5)] == [[], []]
