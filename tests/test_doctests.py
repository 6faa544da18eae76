"""Every example in a docstring is true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import blocktrain

MODULES = [
    module.name
    for module in pkgutil.walk_packages(blocktrain.__path__, "blocktrain.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    assert doctest.testmod(importlib.import_module("blocktrain.units")).attempted >= 3
