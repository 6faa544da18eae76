"""Held-out documents: disjoint, stable, never none."""

from __future__ import annotations

from blocktrain.data.document import Document
from blocktrain.data.splits import cut, hold_out


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
    assert cut(Document(id="x", text="ab"), 0.001)[1].text == "b"


def test_nothing_to_hold_out():
    assert [list(side) for side in hold_out(lambda: [], 0.5)] == [[], []]
