"""Tokens on disk and rows compared with the obvious way: concatenate everything, cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocktrain.data import tokenize
from blocktrain.data.document import Document
from blocktrain.data.token_rows import DocumentSlice, TokenRows
from blocktrain.data.tokenize import tokenize_documents
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import DataError


def _random_documents(count, seed=0):
    lengths = np.random.default_rng(seed).integers(1, 40, count)
    return [Document(id=f"doc{i}", text=chr(ord("a") + i % 26) * int(n)) for i, n in enumerate(lengths)]


def _concatenated(documents):
    """Every token, with its document and its position in the document."""
    return [
        (token, document.id, place)
        for document in documents
        for place, token in enumerate([*document.text.encode(), 256])
    ]


@pytest.mark.parametrize("batch_characters", [1, 100, 2**21])
def test_rows_are_the_concatenation_cut_into_pieces(tmp_path, monkeypatch, batch_characters):
    monkeypatch.setattr(tokenize, "_BATCH_CHARACTERS", batch_characters)
    documents = _random_documents(57)
    meta = tokenize_documents(documents, ByteTokenizer(), tmp_path / "tokens")
    reference = _concatenated(documents)
    rows = TokenRows.open(tmp_path / "tokens", row_tokens=16)
    assert len(rows) == len(reference) // 16
    assert (meta.tokens, meta.documents) == (len(reference), 57)
    batch = rows.batch(range(len(rows)))
    assert batch["input_ids"].dtype == torch.int64
    assert batch["labels"] is batch["input_ids"]
    assert batch["input_ids"].flatten().tolist() == [token for token, _, _ in reference][: len(rows) * 16]
    for index in range(len(rows)):
        found = [
            (span.document, span.offset + place)
            for span in rows.documents(index)
            for place in range(span.stop - span.start)
        ]
        assert found == [(name, place) for _, name, place in reference[index * 16 : index * 16 + 16]]


def test_document_slices_of_a_row(tmp_path):
    documents = [Document(id="a", text="aaaa"), Document(id="b", text="b"), Document(id="c", text="c" * 20)]
    tokenize_documents(documents, ByteTokenizer(), tmp_path / "tokens")
    rows = TokenRows.open(tmp_path / "tokens", row_tokens=10)
    assert rows.documents(0) == [
        DocumentSlice(document="a", offset=0, start=0, stop=5),
        DocumentSlice(document="b", offset=0, start=5, stop=7),
        DocumentSlice(document="c", offset=0, start=7, stop=10),
    ]
    assert rows.documents(1) == [DocumentSlice(document="c", offset=3, start=0, stop=10)]
    with pytest.raises(IndexError):
        rows.batch([len(rows)])


def test_batches_take_any_rows_in_any_order_and_own_their_memory(tmp_path):
    tokenize_documents(_random_documents(30), ByteTokenizer(), tmp_path / "tokens")
    rows = TokenRows.open(tmp_path / "tokens", row_tokens=8)
    first = rows.batch(np.array([3, 0, 3]))["input_ids"]
    assert torch.equal(first[0], first[2])
    first.zero_()
    assert rows.batch([3], variant=5)["input_ids"].sum() > 0


def test_bytes_per_token_turns_a_loss_per_token_into_one_per_byte(tmp_path):
    documents = [Document(id="a", text="é" * 10), Document(id="b", text="12345")]
    tokenize_documents(documents, ByteTokenizer(), tmp_path / "tokens")
    rows = TokenRows.open(tmp_path / "tokens", row_tokens=4)
    assert rows.bytes_per_token == 25 / 27  # 20 + 5 bytes, 27 tokens with two ends


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(257, 2), (65536, 2), (65537, 4)])
def test_tokens_are_as_small_as_the_vocabulary_allows(tmp_path, vocab_size, itemsize):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = vocab_size
    tokenizer.eos = vocab_size - 1
    tokenize_documents([Document(id="a", text="abc")], tokenizer, tmp_path / "tokens")
    assert (tmp_path / "tokens" / "tokens.bin").stat().st_size == 4 * itemsize
    row = TokenRows.open(tmp_path / "tokens", row_tokens=4).batch([0])["input_ids"]
    assert row.tolist() == [[97, 98, 99, vocab_size - 1]]


def test_less_text_than_one_row(tmp_path):
    tokenize_documents([Document(id="a", text="abc")], ByteTokenizer(), tmp_path / "tokens")
    with pytest.raises(
        DataError, match="1 documents with 4 tokens in total do not fill one row of 5 tokens; give more"
    ):
        TokenRows.open(tmp_path / "tokens", row_tokens=5)


def test_half_a_surrogate_pair_is_not_text(tmp_path):
    with pytest.raises(DataError, match=r"document 'rows.jsonl#3' has half of a surrogate pair at character 1"):
        tokenize_documents([Document(id="rows.jsonl#3", text="a\ud800")], ByteTokenizer(), tmp_path / "tokens")


def test_a_damaged_folder(tmp_path):
    with pytest.raises(DataError, match=r"is not a folder of tokens .*; delete it"):
        TokenRows.open(tmp_path, row_tokens=4)
    tokenize_documents([Document(id="a", text="abcdef")], ByteTokenizer(), tmp_path / "tokens")
    with (tmp_path / "tokens" / "tokens.bin").open("ab") as file:
        file.truncate(6)
    with pytest.raises(DataError, match=r"tokens.bin' has 6 bytes, not 14; delete"):
        TokenRows.open(tmp_path / "tokens", row_tokens=4)


def test_the_folder_may_have_a_name_that_is_not_utf8(tmp_path):
    """It ended in a UnicodeEncodeError of Arrow's."""
    folder = tmp_path / "caf\udce9"
    tokenize_documents([Document(id="a", text="aaaa")], ByteTokenizer(), folder)
    assert TokenRows.open(folder, row_tokens=5).documents(0) == [DocumentSlice(document="a", offset=0, start=0, stop=5)]
