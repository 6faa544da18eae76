"""The configuration of the cache of frozen layers' hidden states: the table `[prefix]` of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blocktrain.cache.encoding import EncodingKind
from blocktrain.cache.store import STORES
from blocktrain.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class PrefixConfig:
    """The prefix cache of a run.

    store: "auto" decides at each visit; "off"; or a store: "device", "host" (pinned on a GPU machine), "file" (in the
        run's folder), or another one that is registered in `cache.store.STORES`.
    dtype: "compute" stores hidden states as they are; "bf16"; "int8" with a scale for each token (lossy).
    fill: "lazy" computes a row when it is first needed; "ahead" computes all before the visit, `fill_rows` at a time.
    fill_rows: rows in one forward pass that fills ahead.
    """

    store: str = "auto"
    dtype: EncodingKind = "compute"
    fill: Literal["lazy", "ahead"] = "lazy"
    fill_rows: int = 32

    def __post_init__(self) -> None:
        known = ("auto", "off", *STORES)
        if self.store not in known:
            raise ConfigError(f"store {self.store!r} is unknown; {nearest(self.store, known)}")
        if self.fill_rows < 1:
            raise ConfigError(f"fill_rows must be at least 1, not {self.fill_rows}")
