"""The configuration reference says everything there is to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blocktrain.train.config_docs import page, tables
from blocktrain.units import Duration


@dataclass
class Inner:
    """Inner things.

    size: how many
    """

    size: int = 3


@dataclass
class Outer:
    """Outer things.

    first, second: both of them,
        described together.
    last: of all
    """

    first: float
    second: tuple[str, ...] = ("a", "b")
    last: Duration = Duration.steps(5)
    inner: Inner | None = None
    options: dict = field(default_factory=dict)


@dataclass
class Extended(Inner):
    """More than inner things.

    groups: names of each group
    """

    groups: Mapping[str, Sequence[str]] | None = None


def test_a_table_is_its_dataclass():
    outer, inner = tables(Outer)
    assert outer.text == "Outer things."
    assert [(key.name, key.kind, key.default, key.text) for key in outer.keys if key.name != "last"] == [
        ("first", "number", "", "both of them, described together."),
        ("second", "list of text", '["a", "b"]', "both of them, described together."),
        ("options", "table", "{}", ""),
    ]
    assert (inner.name, inner.optional, inner.keys[0].default) == ("inner", True, "3")


def test_a_table_that_extends_another_tells_of_its_keys_too():
    (table,) = tables(Extended)
    assert table.text == "More than inner things."
    assert [(key.name, key.kind, key.text) for key in table.keys] == [
        ("size", "whole number", "how many"),
        ("groups", "table of list of text", "names of each group"),
    ]


def test_every_key_is_described():
    silent = [f"{table.name}.{key.name}" for table in tables() for key in table.keys if not key.text]
    assert not silent, f"say in their dataclass's docstring what these keys do: {silent}"


def test_the_page_in_the_documentation_is_this_one():
    there = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
    assert there.read_text() == page(), "write it again: blocktrain config > docs/configuration.md"
