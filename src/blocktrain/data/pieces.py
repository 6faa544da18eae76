"""Cutting a long text where its tokenizer cuts it anyway: memory does not grow with the text, and all cores work.

A tokenizer needs some 100 bytes of memory per character and one core per text. The tokens of the pieces, one after the
other, are those of the whole text: a place is used only if the text around it has the same tokens with and without a
cut. Texts of at most `WHOLE` characters are never cut.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from blocktrain.data.document import Document
from blocktrain.data.tokenizer import Ids, Tokenizer

logger = logging.getLogger(__name__)

WHOLE = 2**20  # characters
PIECE = 2**17
_WINDOW = 256  # characters on each side of a cut that are compared
_TRIES = 200
_PLACES = re.compile(r"(?<=\S)(?=\s)|(?<=\n)(?=\S)")

# A tokenizer may treat the beginning of a text in its own way (Llama 2 puts a space before it), so a piece is encoded
# after a line break, whose tokens are then dropped.
_BEFORE = "\n"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Characters from `offset` of the document `id`; `last` says whether the document ends here."""

    id: str
    text: str
    offset: int
    last: bool


class PieceEncoder:
    """Cuts documents into pieces, and encodes them."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._dropped = tokenizer.encode([_BEFORE])[0]
        self._warned = False

    def pieces(self, documents: Iterable[Document]) -> Iterator[Piece]:
        """The pieces of `documents`, in order."""
        text, offset = "", 0
        for document in documents:
            text += document.text
            begin = 0
            if offset or not document.last or len(text) > WHOLE:
                for end in self._places(text):
                    yield Piece(id=document.id, text=text[begin:end], offset=offset + begin, last=False)
                    begin = end
            text, offset = text[begin:], offset + begin
            if document.last:
                yield Piece(id=document.id, text=text, offset=offset, last=True)
                text, offset = "", 0

    def encode(self, pieces: Sequence[Piece]) -> list[Ids]:
        """The tokens of each piece; those of a whole document end with the token for its end."""
        texts = [_BEFORE + piece.text if piece.offset else piece.text for piece in pieces]
        encoded: list[Ids] = []
        for piece, ids in zip(pieces, self._tokenizer.encode(texts), strict=True):
            kept = ids[len(self._dropped) :] if piece.offset else ids
            encoded.append(np.append(kept, self._tokenizer.eos) if piece.last else kept)
        return encoded

    def _places(self, text: str) -> Iterator[int]:
        """Where `text` can be cut, about `PIECE` characters apart; the window of the last lies in `text` too."""
        begin = 0
        while begin + PIECE + _WINDOW <= len(text):
            found = list(_PLACES.finditer(text, begin + PIECE // 2, begin + PIECE))[-_TRIES:]
            place = next((match.start() for match in reversed(found) if self._is_safe(text, match.start())), None)
            if place is not None:
                yield place
            elif not self._warned:
                logger.warning(
                    "tokenizer '%s' joins words across spaces and lines, or a text has none of these: such a text is "
                    "tokenized in larger pieces, which needs about 100 bytes of memory per character",
                    self._tokenizer.name,
                )
                self._warned = True
            begin = place or begin + PIECE

    def _is_safe(self, text: str, place: int) -> bool:
        left, right = text[place - _WINDOW : place], text[place : place + _WINDOW]
        whole, first, second = self._tokenizer.encode([left + right, left, _BEFORE + right])
        count = len(self._dropped)
        return np.array_equal(second[:count], self._dropped) and np.array_equal(
            whole, np.concatenate([first, second[count:]])
        )
