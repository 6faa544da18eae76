"""What is in a store, and whether it may be used: nothing stale, half-written or damaged is ever read.

For each slot the ledger has the level whose hidden states it holds (0: none) and their checksum; for each level the
fingerprint of everything below it that made them. Beside a file store it lies on disk, in two files

    ledger.json     key: rows, encoding, versions; fingerprint of the layers below each level
    slots.bin       level and CRC-32 of each slot, marked only after the slot's row was written

so that a run that is resumed in mid-visit finds what it had stored and checks it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from blocktrain.cache.encoding import Fields
from blocktrain.cache.store import Store, as_bytes, claim
from blocktrain.chain.chain import Chain, Layer
from blocktrain.errors import storage_errors
from blocktrain.modules.placeholder import backing_tensors

CODE_VERSION = 1  # raise it when the same key would store other bytes
_SLOT = np.dtype([("level", np.int32), ("crc", np.uint32)])

Key = Mapping[str, Any]


class Fingerprints:
    """For each level, SHA-256 of every parameter and buffer of the layers below it, in forward order.

    A layer is read once, when a level above it is first asked for. So one of these is good until a weight changes, and
    whoever starts a visit has one. together: of weights that are in parts, from the digest of this process's the one of
    all; then every process must ask for the same levels.
    """

    def __init__(self, chain: Chain, *, together: Callable[[str], str] = str):
        self._chain = chain
        self._together = together
        self._digest = hashlib.sha256()
        self._found = [self._digest.hexdigest()]  # by level, as far as has been read

    def at(self, levels: Iterable[int]) -> dict[int, str]:
        """Of those of `levels` that the chain has."""
        wanted = sorted(level for level in set(levels) if level < len(self._chain.layers))
        for layer in self._chain.layers[len(self._found) - 1 : wanted[-1] if wanted else 0]:
            self._read(layer)
            self._found.append(self._together(self._digest.hexdigest()))
        return {level: self._found[level] for level in wanted}

    def _read(self, layer: Layer) -> None:
        for path, module in layer.modules.items():
            for name, tensor in [*module.named_parameters(path), *module.named_buffers(path)]:
                self._digest.update(name.encode())
                for part in backing_tensors(tensor):  # of resting weights, their packed form
                    here = part.to_local() if isinstance(part, DTensor) else part
                    self._digest.update(here.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class Ledger:
    """Which slots hold what. In memory, or in `folder`, where an earlier one with the same key is taken up."""

    def __init__(self, num_slots: int, *, key: Key, folder: Path | None = None):
        self.key = {"code": CODE_VERSION, "slots": num_slots, **key}
        self.made_from: dict[int, str] = {}  # level -> fingerprint of the layers below it
        self._folder = folder
        if folder is None:
            self._slots = np.zeros(num_slots, _SLOT)
            return
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            known = self._saved_key()
            with (folder / "slots.bin").open("r+b" if known else "w+b") as file:
                claim(file.fileno(), num_slots * _SLOT.itemsize)
            self._slots = np.memmap(folder / "slots.bin", _SLOT, "r+", shape=(num_slots,))
            if not known:
                self._save()

    @property
    def levels(self) -> np.ndarray:
        """The level each slot holds, int32 (slots,); 0 where it holds nothing."""
        return self._slots["level"]

    def mark(self, slots: np.ndarray, level: int, rows: Fields) -> None:
        """Note that `slots` now hold `rows` of `level`; call it after they were written."""
        if self._folder is not None:
            self._slots["crc"][slots] = checksums(rows, np.full(len(slots), level))
        self._slots["level"][slots] = level

    def unmark(self, slots: np.ndarray | slice) -> None:
        """Forget what is in `slots`; call it before they are written over."""
        self._slots["level"][slots] = 0

    def refuse_stale(self, now: Mapping[int, str]) -> int:
        """Forget slots whose level is not in `now` with the fingerprint they were made from; returns how many."""
        fresh = {level for level, digest in now.items() if self.made_from.get(level) == digest}
        stale = [level for level in np.unique(self.levels).tolist() if level and level not in fresh]
        slots = np.isin(self.levels, stale)
        self.unmark(np.flatnonzero(slots))
        self.made_from = dict(now)
        self._save()
        return int(slots.sum())

    def refuse_damaged(self, store: Store, *, rows_at_once: int = 64) -> int:
        """Read every marked slot back and forget those whose checksum differs; returns how many."""
        marked, damaged = np.flatnonzero(self.levels), 0
        for start in range(0, len(marked), rows_at_once):
            slots = marked[start : start + rows_at_once]
            wrong = slots[checksums(store.read(slots), self.levels[slots]) != self._slots["crc"][slots]]
            self.unmark(wrong)
            damaged += len(wrong)
        return damaged

    def close(self, *, keep_files: bool = False) -> None:
        """Delete the ledger's files unless they are to stay."""
        if self._folder is not None and not keep_files:
            for name in ("slots.bin", "ledger.json"):
                (self._folder / name).unlink(missing_ok=True)

    def _saved_key(self) -> bool:
        """Whether the folder holds a ledger of the same key; its fingerprints are then taken up."""
        path = Path(self._folder or "") / "ledger.json"
        try:
            saved = json.loads(path.read_text())
            if saved["key"] != json.loads(json.dumps(self.key)) or not (path.parent / "slots.bin").is_file():
                return False
            self.made_from = {int(level): digest for level, digest in saved["made_from"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return True

    def _save(self) -> None:
        if self._folder is None:
            return
        path = self._folder / "ledger.json"
        with storage_errors(path):
            temporary = path.with_suffix(".partial")
            temporary.write_text(json.dumps({"key": self.key, "made_from": self.made_from}))
            os.replace(temporary, path)


def checksums(rows: Fields, levels: np.ndarray) -> np.ndarray:
    """CRC-32 of each row over all fields in order, begun with its level: (B,) int -> uint32 (B,)."""
    found = levels.astype(np.uint32)
    for name in sorted(rows):
        for index, row in enumerate(as_bytes(rows[name])):
            found[index] = zlib.crc32(row, int(found[index]))
    return found
