"""Records which rows a store holds, so that no row that is stale, half-written or damaged is ever read.

For each slot the ledger has the boundary whose hidden states it holds (0: the slot is empty) and their checksum. For
each boundary it has the fingerprint of the layers below, which computed them. The ledger of a file store is on
disk beside it, in two files

    ledger.json     key: rows, encoding, versions; fingerprint of the layers below each boundary
    slots.bin       boundary and CRC-32 of each slot, marked only after the slot's row was written

so that a run that is resumed in the middle of a visit finds the rows that it had stored and checks them.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from blocktrain.cache.encoding import Fields
from blocktrain.cache.store import Store, as_bytes, reserve
from blocktrain.chain.chain import Chain, Layer
from blocktrain.errors import storage_errors
from blocktrain.modules.placeholder import backing_tensors

CODE_VERSION = 2  # to be raised when the code would store other bytes under the same key
_SLOT = np.dtype([("boundary", np.int32), ("crc", np.uint32)])

Key = Mapping[str, object]  # plain JSON values: what the rows in the slots are


class Fingerprints:
    """For each boundary, SHA-256 of every parameter and buffer of the layers below it, in forward order.

    A layer is read once, when a boundary above it is first asked for. So an instance is valid until a weight changes,
    and each visit makes its own.

    combine: turns this rank's digest into the digest of the whole weight (sharded weights only). It is collective, so
        every rank must ask for the same boundaries.
    """

    def __init__(self, chain: Chain, *, combine: Callable[[str], str] = str):
        self._chain = chain
        self._combine = combine
        self._hash = hashlib.sha256()
        self._digests = [self._hash.hexdigest()]  # by boundary, as far as layers have been read

    def at(self, boundaries: Iterable[int]) -> dict[int, str]:
        """The fingerprints at those of `boundaries` that the chain has."""
        wanted = sorted(boundary for boundary in set(boundaries) if boundary < len(self._chain.layers))
        for layer in self._chain.layers[len(self._digests) - 1 : wanted[-1] if wanted else 0]:
            self._hash_layer(layer)
            self._digests.append(self._combine(self._hash.hexdigest()))
        return {boundary: self._digests[boundary] for boundary in wanted}

    def _hash_layer(self, layer: Layer) -> None:
        for path, module in layer.modules.items():
            for name, tensor in [*module.named_parameters(path), *module.named_buffers(path)]:
                self._hash.update(name.encode())
                for part in backing_tensors(tensor):  # the quantized tensors of a weight that is stored quantized
                    local = part.to_local() if isinstance(part, DTensor) else part
                    self._hash.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class Ledger:
    """Which slots hold which boundary: in memory, or in `folder`, where it continues an earlier ledger of equal key."""

    def __init__(self, num_slots: int, *, key: Key, folder: Path | None = None):
        self.key = {"code": CODE_VERSION, "slots": num_slots, **key}
        self.made_from: dict[int, str] = {}  # boundary -> fingerprint of the layers below it
        self._folder = folder
        if folder is None:
            self._slots = np.zeros(num_slots, _SLOT)
            return
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            known = self._load()
            with (folder / "slots.bin").open("r+b" if known else "w+b") as file:
                reserve(file.fileno(), num_slots * _SLOT.itemsize)
            self._slots = np.memmap(folder / "slots.bin", _SLOT, "r+", shape=(num_slots,))
            if not known:
                self._save()

    @property
    def boundaries(self) -> np.ndarray:
        """The boundary whose hidden states each slot holds, int32 (slots,); 0 where the slot is empty."""
        return self._slots["boundary"]

    def mark(self, slots: np.ndarray, boundary: int, rows: Fields) -> None:
        """Record that `slots` now hold `rows` of `boundary`; to be called after the rows were written."""
        if self._folder is not None:
            self._slots["crc"][slots] = checksums(rows, np.full(len(slots), boundary))
        self._slots["boundary"][slots] = boundary

    def unmark(self, slots: np.ndarray | slice) -> None:
        """Record that `slots` are empty; to be called before they are overwritten."""
        self._slots["boundary"][slots] = 0

    def drop_stale(self, current: Mapping[int, str]) -> int:
        """Empty the slots whose boundary does not have the fingerprint that made them in `current`; returns how many.

        current: boundary -> fingerprint, of the weights as they are. Rows marked from now on are made from it.
        """
        fresh = {boundary for boundary, digest in current.items() if self.made_from.get(boundary) == digest}
        stale = [at for at in np.unique(self.boundaries).tolist() if at and at not in fresh]
        slots = np.isin(self.boundaries, stale)
        self.unmark(np.flatnonzero(slots))
        self.made_from = dict(current)
        self._save()
        return int(slots.sum())

    def drop_damaged(self, store: Store, *, rows_at_once: int = 64) -> int:
        """Read every marked slot back and empty those whose checksum differs; returns how many."""
        marked, damaged = np.flatnonzero(self.boundaries), 0
        for start in range(0, len(marked), rows_at_once):
            slots = marked[start : start + rows_at_once]
            wrong = slots[checksums(store.read(slots), self.boundaries[slots]) != self._slots["crc"][slots]]
            self.unmark(wrong)
            damaged += len(wrong)
        return damaged

    def close(self, *, keep_files: bool = False) -> None:
        """Delete the ledger's files unless `keep_files`."""
        if self._folder is not None and not keep_files:
            for name in ("slots.bin", "ledger.json"):
                (self._folder / name).unlink(missing_ok=True)

    def _load(self) -> bool:
        """Load the fingerprints of the ledger in the folder; returns whether there is one and its key is equal."""
        path = Path(self._folder or "") / "ledger.json"
        try:
            saved = json.loads(path.read_text())
            if saved["key"] != json.loads(json.dumps(self.key)) or not (path.parent / "slots.bin").is_file():
                return False
            self.made_from = {int(boundary): digest for boundary, digest in saved["made_from"].items()}
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


def checksums(rows: Fields, boundaries: np.ndarray) -> np.ndarray:
    """CRC-32 of each row over all fields in order, seeded with its boundary: (B,) int -> uint32 (B,)."""
    found = boundaries.astype(np.uint32)
    for name in sorted(rows):
        for index, row in enumerate(as_bytes(rows[name])):
            found[index] = zlib.crc32(row, int(found[index]))
    return found
