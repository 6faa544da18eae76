"""A forward pass over rows of one text each reads no number, so that the host need not wait for the device."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from blocktrain.modules.dispatch import EagerDispatchMode
from blocktrain.modules.unpacked_rows import known_rows

from ..tiny_models import llama


class Reads(EagerDispatchMode):
    """Counts numbers that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[object] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        return self.seen[torch.ops.aten._local_scalar_dense.default] + self.seen[torch.ops.aten.is_nonzero.default]


def reads(batch: dict[str, Tensor]) -> int:
    model = llama()
    model.config.use_cache = False
    with Reads() as reading:
        plain = model(**batch).loss
    with known_rows(batch), Reads() as knowing:
        assert torch.equal(model(**batch).loss, plain)
    assert reading.count == 1  # else there is nothing to save
    return knowing.count


def test_rows_of_one_text_are_not_looked_at() -> None:
    ids = torch.arange(8).view(2, 4)
    assert reads({"input_ids": ids, "labels": ids}) == 0


def test_packed_rows_are() -> None:
    ids = torch.arange(8).view(2, 4)
    assert reads({"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}) == 1
