"""The tokens of the pieces of a text are those of the text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as tk
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from blocktrain.data import pieces, records
from blocktrain.data.corpus import open_corpus
from blocktrain.data.document import Document
from blocktrain.data.pieces import PieceEncoder
from blocktrain.data.stdlib import stdlib_files
from blocktrain.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from blocktrain.errors import DataError

TEXT = "".join(file.path.read_text() for file in stdlib_files()["train"][:6]).replace("self", "größe 文字")


def trained(normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    backend = tk.Tokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    trainer: Any = trainers.BpeTrainer(vocab_size=800, special_tokens=["<unk>", "</s>"], show_progress=False)  # pyright: ignore[reportCallIssue]
    backend.train_from_iterator(TEXT.splitlines(keepends=True)[:400], trainer)
    return HuggingFaceTokenizer("tiny", PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


# As of GPT-2, and of Llama 2: one word, spaces replaced, and one put before the text.
TOKENIZERS = {
    "bytes": ByteTokenizer,
    "words": lambda: trained(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "a space before": lambda: trained(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        pre_tokenizers.Split("▁", "merged_with_next"),
    ),
}


def encoded(tokenizer: Tokenizer, documents: list[Document]) -> tuple[list[int], int]:
    encoder = PieceEncoder(tokenizer)
    found = list(encoder.pieces(documents))
    return np.concatenate(encoder.encode(found)).tolist(), len(found)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokens_of_pieces_are_those_of_the_text(name: str, monkeypatch: pytest.MonkeyPatch):
    """A text of 200 MB was given to the tokenizer as a whole, which took 21 GB."""
    tokenizer = TOKENIZERS[name]()
    parts = [TEXT[at : at + 10_007] for at in range(0, len(TEXT), 10_007)]
    documents = [Document(id="a", text=part, last=part is parts[-1]) for part in parts] + [Document(id="b", text="b")]
    whole = [*tokenizer.encode([TEXT])[0].tolist(), tokenizer.eos, *tokenizer.encode(["b"])[0].tolist(), tokenizer.eos]
    monkeypatch.setattr(pieces, "WHOLE", 10_000)
    monkeypatch.setattr(pieces, "PIECE", 1000)
    ids, count = encoded(tokenizer, documents)
    assert ids == whole
    assert count > len(TEXT) // 1000


def test_a_text_without_a_place_to_cut_stays_whole(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(pieces, "WHOLE", 1000)
    monkeypatch.setattr(pieces, "PIECE", 1000)
    with caplog.at_level(logging.WARNING):
        assert encoded(ByteTokenizer(), [Document(id="a", text="x" * 9000)]) == ([120] * 9000 + [256], 1)
    assert caplog.text.count("tokenized in larger pieces") == 1


def test_a_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A letter may begin in one part and end in the next, and an error names the byte of the file."""
    monkeypatch.setattr(records, "_PART_BYTES", 5)
    (tmp_path / "a.txt").write_text("größe 文字\n")
    documents = list(open_corpus(str(tmp_path / "a.txt"), cache=tmp_path).documents("train"))
    assert ("".join(part.text for part in documents), len(documents)) == ("größe 文字\n", 3)
    assert [part.last for part in documents] == [False, False, True]
    for damaged in (b"0123456\xff9", b"0123456789\xe6\x96"):
        (tmp_path / "b.txt").write_bytes(damaged)
        with pytest.raises(DataError, match=rf"b.txt' is not UTF-8 \(byte {7 if damaged[7] == 255 else 10}\)"):
            list(open_corpus(str(tmp_path / "b.txt"), cache=tmp_path).documents("train"))
