"""Bytes and Hugging Face tokenizers have one interface."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer

from blocktrain.data.tokenizer import ByteTokenizer, load_tokenizer
from blocktrain.errors import DataError, StorageError

TEXTS = ["", "hello world\r\n\t\x00", "naïve café 日本語 🙂\u2028", "  leading, trailing  ", "don't 12345 '''"]


@pytest.fixture(scope="module")
def gpt2(shared_data):
    return load_tokenizer(str(shared_data / "gpt2_tokenizer"))


def test_bytes_round_trip():
    tokenizer = load_tokenizer("bytes")
    encoded = tokenizer.encode(TEXTS)
    assert [ids.tolist() for ids in encoded] == [list(text.encode()) for text in TEXTS]
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    assert (tokenizer.vocab_size, tokenizer.eos) == (257, 256)
    assert tokenizer.decode([104, 105, 256, 0xFF]) == "hi\N{REPLACEMENT CHARACTER}"


def test_bytes_as_a_hugging_face_tokenizer(tmp_path):
    """The exported tokenizer produces the ids that the model was trained on, for every byte."""
    ByteTokenizer().save(tmp_path)
    exported = AutoTokenizer.from_pretrained(str(tmp_path))
    rng = random.Random(0)
    characters = [*range(0xD800), *range(0xE000, 0x110000)]
    noise = "".join(map(chr, rng.choices(characters, k=5000)))
    for text in [*TEXTS, noise, "".join(map(chr, range(0x800)))]:
        assert exported(text)["input_ids"] == list(text.encode())
        assert exported.decode(list(text.encode()), clean_up_tokenization_spaces=False) == text
    assert (len(exported), exported.eos_token_id) == (257, 256)
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.vocab_size, loaded.eos) == (257, 256)
    assert loaded.encode(["a\n"])[0].tolist() == [97, 10]


def test_gpt2_from_vocabulary_and_merges_alone(gpt2, shared_data):
    assert (gpt2.vocab_size, gpt2.eos) == (50257, 50256)
    assert gpt2.encode(["Hello world"])[0].tolist() == [15496, 995]
    text = (shared_data / "tinyshakespeare" / "input.txt").read_text()
    (ids,) = gpt2.encode([text])
    assert len(ids) == 338_025  # nanoGPT: 301,966 + 36,059
    assert gpt2.decode(ids[:20_000]) == text[: len(gpt2.decode(ids[:20_000]))]


def test_a_saved_tokenizer_loads_as_an_equal_one(gpt2, tmp_path):
    gpt2.save(tmp_path)
    again = load_tokenizer(str(tmp_path))
    for one, other in zip(gpt2.encode(TEXTS), again.encode(TEXTS), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_fingerprint_depends_on_the_content_alone(gpt2, shared_data, tmp_path):
    source = shared_data / "gpt2_tokenizer"
    copy = shutil.copytree(source, tmp_path / "copy")
    assert load_tokenizer(str(copy)).fingerprint == gpt2.fingerprint
    merges = (copy / "merges.txt").read_text().splitlines(keepends=True)
    (copy / "merges.txt").write_text("".join(merges[:-1]))
    assert load_tokenizer(str(copy)).fingerprint != gpt2.fingerprint


# transformers makes an empty tokenizer of a model's class where it finds none of its files
GPT2_ALONE = {"config.json": '{"model_type": "gpt2"}'}
ONLY_SETTINGS = {"config.json": '{"model_type": "qwen2"}', "tokenizer_config.json": '{"eos_token": "<|endoftext|>"}'}


@pytest.mark.parametrize(
    "files",
    [{}, {"vocab.json": "{}"}, {"vocab.json": "no", "merges.txt": "no"}, GPT2_ALONE, ONLY_SETTINGS],
    ids=["empty", "only vocab.json", "damaged", "only a GPT-2", "no vocabulary"],
)
def test_a_folder_without_a_tokenizer(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(
        DataError, match=r"cannot load tokenizer '.*': .*; set chat.tokenizer = \"bytes\", or to a folder"
    ):
        load_tokenizer(str(tmp_path), key="chat.tokenizer")


def test_a_tokenizer_without_end_of_text(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(str(tmp_path))
    with pytest.raises(DataError, match="has no end-of-text token, so documents cannot be separated"):
        load_tokenizer(str(tmp_path))


def test_saving_where_a_file_is_in_the_way(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(StorageError, match=r"cannot write '.*taken'"):
        ByteTokenizer().save(tmp_path / "taken")
