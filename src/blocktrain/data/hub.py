"""Data sets of the Hugging Face hub, through the optional `datasets` package; code in them is never run."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from blocktrain.data.document import Document, Split
from blocktrain.data.files import split_of
from blocktrain.data.records import require_text
from blocktrain.errors import DataError, first_line, nearest

_NAME = re.compile(r"^[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?$")


def is_hub_name(source: str) -> bool:
    """Whether `source` looks like `owner/name` or `owner/name:configuration`."""
    return _NAME.match(source) is not None


class HubCorpus:
    """A data set called `owner/name`, or `owner/name:configuration` where it has several.

    It is downloaded whole, once, into the cache of `datasets`. Its name stands for its content: a later revision on
    the hub is not noticed until the folder it was tokenised into is deleted.
    """

    def __init__(self, source: str, *, text_field: str | None):
        self.name = source
        self._path, _, configuration = source.partition(":")
        self._configuration = configuration or None
        self._text_field = text_field

    @cached_property
    def _parts(self) -> Mapping[Split, list[str]]:
        """Each split and the hub's names for its parts (`train_sft` and `train_gen` are both training data)."""
        datasets = _datasets(self.name)
        parts: dict[Split, list[str]] = {}
        try:
            names = datasets.get_dataset_split_names(self._path, self._configuration)
        except Exception as error:  # the hub, its client and the data set each have their own kinds
            raise self._unreadable(error) from error
        for name in names:
            split = split_of(PurePath(f"{name}.parquet"))
            if split is not None:
                parts.setdefault(split, []).append(name)
        if not parts:
            raise DataError(f"data set '{self.name}' has no train split; its splits: {', '.join(names)}")
        return parts

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits it has."""
        return tuple(self._parts)

    def documents(self, split: Split) -> Iterator[Document]:
        """The rows of `split` as documents: their text field, or all fields as JSON. Ids are `part#row`."""
        datasets = _datasets(self.name)
        for part in self._parts[split]:
            try:
                rows = datasets.load_dataset(self._path, self._configuration, split=part)
            except Exception as error:  # as above
                raise self._unreadable(error) from error
            columns = rows.column_names
            if self._text_field is None:
                for row, record in enumerate(rows):
                    yield Document(id=f"{part}#{row}", text=json.dumps(record, ensure_ascii=False, default=str))
                continue
            if self._text_field not in columns:
                known = nearest(self._text_field, columns)
                raise DataError(f"data set '{self.name}' has no field '{self._text_field}'; {known} (text_field)")
            for row, record in enumerate(rows.select_columns([self._text_field])):
                text = require_text(record[self._text_field], self._text_field, f"'{self.name}' {part} row {row}")
                if text:
                    yield Document(id=f"{part}#{row}", text=text)

    def state(self) -> None:
        """Nothing: the name stands for the content."""

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(
            f"'{self.name}' is no file or folder (seen from {Path.cwd()}), and cannot be read as a Hugging Face data "
            f"set: {first_line(error)}"
        )


def _datasets(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"'{source}' is no file or folder (seen from {Path.cwd()}); to read it as a Hugging Face data set, "
            'pip install "blocktrain[hub]"'
        ) from error
