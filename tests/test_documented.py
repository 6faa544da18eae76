"""Every public name says what it is, and every parameter it takes is named there."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import blocktrain as bt
from blocktrain.integrations.card import write_card
from blocktrain.integrations.hub import push
from blocktrain.integrations.trackers import Trackers
from blocktrain.integrations.visiting import VisitingOptimizer

API = Path(__file__).resolve().parent.parent / "docs" / "api.md"


def public() -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(bt, name) for name in bt.__all__}
    found |= {item.__name__: item for item in (Trackers, VisitingOptimizer, push, write_card)}
    if find_spec("accelerate") is not None:
        from blocktrain.integrations import hf

        found |= {"Blocks": hf.Blocks, "BlockTrainer": hf.BlockTrainer, "BlockTrainerMixin": hf.BlockTrainerMixin}
    return found


PUBLIC = public()


def own_members(item: Any) -> dict[str, Any]:
    """The public functions and properties that a class defines itself."""
    if not inspect.isclass(item):
        return {}
    kinds = (classmethod, staticmethod, property)
    mine = {name: value for name, value in vars(item).items() if inspect.isfunction(value) or isinstance(value, kinds)}
    return {name: getattr(item, name) for name in mine if not name.startswith("_")}


def parameters(item: Any) -> list[str]:
    """The parameters that a call takes by name, except tables of the configuration, whose own classes document them."""
    if not callable(item) or item is bt.BlocktrainError:
        return []
    tables: set[str] = set()
    if item is bt.RunConfig:
        kinds = {name: {kind, *typing.get_args(kind)} for name, kind in typing.get_type_hints(item).items()}
        tables = {name for name, arms in kinds.items() if any(map(dataclasses.is_dataclass, arms))}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = inspect.signature(typing.cast(typing.Callable[..., Any], item)).parameters.values()
    return [one.name for one in taken if one.kind not in variable and one.name not in tables]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_and_its_parameters_are_documented(name: str) -> None:
    item = PUBLIC[name]
    text = inspect.getdoc(item if callable(item) else type(item)) or ""
    assert text, f"'{name}' has no docstring"
    silent = [parameter for parameter in parameters(item) if not re.search(rf"\b{parameter}\b", text)]
    assert not silent, f"'{name}' does not say what {silent} are"
    for member, value in own_members(item).items():
        assert inspect.getdoc(value), f"'{name}.{member}' has no docstring"


def test_a_silent_parameter_is_found() -> None:
    def scale(rate: float, size: int) -> None:
        """Scale by `rate`."""

    assert parameters(scale) == ["rate", "size"]
    assert "size" not in (inspect.getdoc(scale) or "")


@pytest.mark.parametrize("name", [name for name in PUBLIC if name in bt.__all__])
def test_the_api_page_has_every_name_of_the_package(name: str) -> None:
    assert re.search(rf"^::: blocktrain(\.\w+)*\.{name}$", API.read_text(), re.MULTILINE)
