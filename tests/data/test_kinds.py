"""The registry of data kinds: the four of the package, and one that a test registers in a few lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from blocktrain.data import DATA_KINDS, ChatConfig, DataKind, ImageConfig, LabelledConfig, TextConfig
from blocktrain.data.kinds import TrainingData, kind_of, register
from blocktrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CountingConfig:
    """Rows that count upward from a random start."""

    source: str = "numbers"
    rows: int = 4

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"rows must be at least 1, not {self.rows}")


class CountingRows:
    def __init__(self, starts: np.ndarray):
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts)

    def weights(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.full(len(indices), 3, np.int64)

    def batch(self, indices: Sequence[int] | np.ndarray, *, variant: int = 0) -> dict[str, torch.Tensor]:
        del variant
        ids = torch.from_numpy(self._starts[np.asarray(indices)][:, None] + np.arange(4))
        return {"input_ids": ids, "labels": ids}


def open_counting(config: CountingConfig, *, seed: int) -> TrainingData[CountingRows]:
    starts = np.random.default_rng(seed).integers(0, 100, config.rows + 1)
    return TrainingData(
        unit="tokens",
        train=CountingRows(starts[:-1]),
        validation=CountingRows(starts[-1:]),
        units_per_row=4,
        row_tokens=4,
        fingerprint=f"{config.rows} rows of seed {seed}",
    )


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> DataKind[CountingConfig]:
    monkeypatch.setattr("blocktrain.data.kinds.DATA_KINDS", dict(DATA_KINDS))
    kind = DataKind(
        name="counting",
        config=CountingConfig,
        open=open_counting,
        describe=lambda config: f"{config.rows} rows of numbers.",
        has_vocabulary=True,
    )
    register(kind)
    return kind


def test_a_new_kind_is_opened_through_the_registry(counting: DataKind[CountingConfig]) -> None:
    config = CountingConfig(rows=3)
    kind = kind_of(config)
    assert kind is counting
    data = kind.open(config, seed=7)
    assert (len(data.train), len(data.validation), data.fingerprint) == (3, 1, "3 rows of seed 7")
    ids = data.train.batch([1, 2])["input_ids"]
    assert (ids[:, 1:] - ids[:, :-1] == 1).all()
    assert kind.describe(config) == "3 rows of numbers."


def test_a_name_and_a_configuration_belong_to_one_kind(counting: DataKind[CountingConfig]) -> None:
    for name, config in (("counting", TextConfig), ("other", CountingConfig)):
        with pytest.raises(ValueError, match="registered already"):
            register(DataKind(name=name, config=config, open=counting.open, describe=counting.describe))


def test_the_kinds_of_the_package() -> None:
    configs = {"text": TextConfig, "chat": ChatConfig, "labelled": LabelledConfig, "images": ImageConfig}
    assert {name: kind.config for name, kind in DATA_KINDS.items()} == configs
    assert all(kind.name == name for name, kind in DATA_KINDS.items())
    abilities = {
        ability: {name for name, kind in DATA_KINDS.items() if getattr(kind, ability)}
        for ability in ("has_vocabulary", "can_generate", "has_variants")
    }
    assert abilities == {"has_vocabulary": {"text", "chat"}, "can_generate": {"chat"}, "has_variants": {"images"}}


def test_a_configuration_of_no_kind() -> None:
    with pytest.raises(KeyError, match="CountingConfig is the configuration of no registered data kind"):
        kind_of(CountingConfig())


def test_importing_the_kinds_leaves_datasets_alone() -> None:
    """It takes half a second, which `blocktrain plan` and a run whose data are cached need not wait for."""
    code = "import sys, blocktrain.data, blocktrain.train.config; print('datasets' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
