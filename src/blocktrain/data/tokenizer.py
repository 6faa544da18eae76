"""Tokenizers: plain bytes, or any of Hugging Face's, behind the few calls that packing and export need."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from blocktrain.errors import DataError, first_line, storage_errors
from blocktrain.runtime import may_be_on_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]  # (tokens,)

END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    @property
    def name(self) -> str:
        """What the user called it."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def eos(self) -> int:
        """The id that ends a document."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the ids: two tokenizers with the same one encode alike."""
        ...

    def encode(self, texts: list[str]) -> list[Ids]:
        """The ids of each text, without any token added before or behind."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become the replacement character."""
        ...

    @property
    def pretrained(self) -> PreTrainedTokenizerBase:
        """An equal tokenizer of `transformers`: it renders chat templates. What is set on it is saved with it."""
        ...

    def save(self, folder: Path) -> None:
        """Write it so that `transformers.AutoTokenizer.from_pretrained(folder)` gives the same ids."""
        ...


class ByteTokenizer:
    """One token a byte of UTF-8, and 256 for the end of a document. It needs no files and can encode anything."""

    name = "bytes"
    vocab_size = 257
    eos = 256
    fingerprint = "bytes-257"

    def encode(self, texts: list[str]) -> list[Ids]:
        """The bytes of each text, as uint8."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; the end of a document has none."""
        return bytes(token for token in ids if token != self.eos).decode(errors="replace")

    _pretrained: PreTrainedTokenizerBase | None = None

    @property
    def pretrained(self) -> PreTrainedTokenizerBase:
        """An equal Hugging Face tokenizer, made when first asked for.

        The ids are the same for every text but one that spells `<|endoftext|>` out: Hugging Face reads that as the
        end of a document, here it is 13 bytes.
        """
        if self._pretrained is None:
            self._pretrained = _byte_level()
        return self._pretrained

    def save(self, folder: Path) -> None:
        """Write the equal Hugging Face tokenizer."""
        _save(self.pretrained, folder)


def _byte_level() -> PreTrainedTokenizerBase:
    """A byte-level model without merges."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's `bytes_to_unicode`).

    Printable bytes stand for themselves, the others, in order, for the letters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class HuggingFaceTokenizer:
    """A tokenizer of `transformers`."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase):
        """Wrap `tokenizer`; raises `DataError` if it has no token that ends a text (an encoder's is its separator)."""
        ends = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if not isinstance(ends, int):
            raise DataError(
                f"tokenizer '{name}' has no end-of-text token, so documents cannot be told apart; "
                "use one made for a causal language model"
            )
        self.name = name
        self.eos = ends
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.pretrained = tokenizer
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend
        if backend is not None:  # limits of some model's length that its tokenizer.json may carry
            backend.no_truncation()
            backend.no_padding()
        rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
        self.fingerprint = hashlib.sha256(f"{rules} eos {self.eos}".encode()).hexdigest()[:16]

    def encode(self, texts: list[str]) -> list[Ids]:
        """The ids of each text, as uint32; a special token spelt out in a text is that token, as in `transformers`."""
        if self._backend is not None:  # 2.7 times as fast as calling the tokenizer, which also finds offsets
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(encoding.ids, np.uint32) for encoding in encodings]
        rows = self.pretrained(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(row, np.uint32) for row in rows]  # pyright: ignore[reportGeneralTypeIssues]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens are spelt out."""
        return str(self.pretrained.decode([int(token) for token in ids], clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        """Write it as `transformers` does."""
        _save(self.pretrained, folder)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: `"bytes"`, a folder, or a model of the Hugging Face hub.

    A folder with nothing but `vocab.json` and `merges.txt` holds GPT-2's kind. Code that a model brings is never run.
    Raises `DataError` when there is no such tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    from transformers import AutoTokenizer, GPT2Tokenizer

    folder = Path(name).expanduser()
    if not folder.is_dir() and not may_be_on_hub(name):
        raise DataError(f"tokenizer '{name}' is no folder (seen from {Path.cwd()}), and no name on the hub")
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    try:
        if {"vocab.json", "merges.txt"} <= files and not files & {"tokenizer.json", "tokenizer_config.json"}:
            loaded = GPT2Tokenizer.from_pretrained(str(folder))
        else:
            loaded = AutoTokenizer.from_pretrained(str(folder) if files else name, trust_remote_code=False)
    except Exception as error:  # transformers, tokenizers and the hub each have their own kinds
        raise DataError(
            f"cannot load tokenizer '{name}': {first_line(error)}; give 'bytes', a folder with tokenizer.json (or "
            "vocab.json and merges.txt), or the name of a model on the Hugging Face hub"
        ) from error
    return HuggingFaceTokenizer(name, loaded)


def _save(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(str(folder))
