"""The tiny run as a file, for tests of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def config_file(tiny_mapping: dict[str, Any], tmp_path: Path) -> Path:
    """The tiny run as a TOML file."""
    path = tmp_path / "tiny.toml"
    path.write_text(_toml(tiny_mapping))
    return path


def _toml(values: dict[str, Any], prefix: str = "") -> str:
    plain = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    tables = [
        f"[{prefix}{key}]\n{_toml(value, f'{prefix}{key}.')}"
        for key, value in values.items()
        if isinstance(value, dict)
    ]
    return "\n".join([*plain, *tables])
