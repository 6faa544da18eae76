"""Docstrings as Markdown, for the API page: parameters (`name: what it is`) become lists, examples code."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMED = re.compile(r"^((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*): (?=\S)", re.MULTILINE)
EXAMPLE = re.compile(r"(?:^>>> .*\n(?:.+\n)*)+", re.MULTILINE)
ITEM = re.compile(r"(?:^- .*\n(?: {4}.*\n)*)+", re.MULTILINE)


class Parameters(griffe.Extension):
    """Rewrites every docstring that griffe reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for everything it reads."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Parameters as a list, examples as code, an empty line before and after each."""
    items = NAMED.sub(lambda name: f"- `{name[1]}`: ", text + "\n")
    items = ITEM.sub(lambda whole: f"\n{whole[0]}\n", items)
    return EXAMPLE.sub(lambda whole: f"\n```pycon\n{whole[0]}```\n", items).rstrip("\n")
