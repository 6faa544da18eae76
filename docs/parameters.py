"""Parameters in docstrings as lists, for the API pages: `name: what it is`, continued by indented lines."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMED = re.compile(r"^((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*): (?=\S)", re.MULTILINE)
ITEM = re.compile(r"(?:^- .*\n(?: {4}.*\n)*)+", re.MULTILINE)


class Parameters(griffe.Extension):
    """`rate: share of the rows` at the start of a docstring's line becomes an item of a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for everything it reads."""
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)


def as_lists(text: str) -> str:
    """The docstring with its parameters as a Markdown list, an empty line before and after."""
    items = NAMED.sub(lambda name: f"- `{name[1]}`: ", text + "\n")
    return ITEM.sub(lambda whole: f"\n{whole[0]}\n", items).rstrip("\n")
