"""Rows without position ids hold one text each, and transformers need not look for the seams of packed ones.

It looks in each forward pass, by reading a number from the device, so the host would wait for all queued work there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from transformers import masking_utils


@contextmanager
def known_rows(batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Around a forward pass over `batch`. Where its rows are packed (they have `position_ids`) nothing changes."""
    look = masking_utils.find_packed_sequence_indices
    if "position_ids" not in batch:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = look
