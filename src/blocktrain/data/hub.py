"""Data sets of the Hugging Face hub, through `datasets`, which runs no code that comes with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePath

from blocktrain.data.document import Document, Split
from blocktrain.data.files import split_of
from blocktrain.data.records import require_text
from blocktrain.data.row_report import RowError
from blocktrain.errors import DataError, first_line, nearest

_NAME = re.compile(r"^[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?$")


def is_hub_name(source: str) -> bool:
    """Whether `source` looks like `owner/name` or `owner/name:configuration`."""
    return _NAME.match(source) is not None


class HubCorpus:
    """A data set called `owner/name`, or `owner/name:configuration` where it has several.

    It is downloaded whole, once, into `cache/datasets`. The name stands for the content: a later revision on the hub
    goes unnoticed until the caches made from it are deleted.
    """

    def __init__(self, source: str, *, text_field: str | None, cache: Path):
        self.name = source
        self._path, _, configuration = source.partition(":")
        self._configuration = configuration or None
        self._text_field = text_field
        self._cache = str(cache / "datasets")

    @cached_property
    def _parts(self) -> Mapping[Split, list[str]]:
        """For each split the hub's names of its parts (`train_sft` and `train_gen` are both training data)."""
        import datasets

        try:
            names = datasets.get_dataset_split_names(self._path, self._configuration, cache_dir=self._cache)
        except Exception as error:  # the hub, its client and the data set each raise their own classes
            raise self._unreadable(error) from error
        parts: dict[Split, list[str]] = {}
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
        import datasets

        for part in self._parts[split]:
            try:
                rows = datasets.load_dataset(self._path, self._configuration, split=part, cache_dir=self._cache)
            except Exception as error:  # as above
                raise self._unreadable(error) from error
            if self._text_field is None:
                for row, record in enumerate(rows):
                    yield Document(id=f"{part}#{row}", text=json.dumps(record, ensure_ascii=False, default=str))
                continue
            if self._text_field not in rows.column_names:
                known = nearest(self._text_field, rows.column_names)
                raise DataError(f"data set '{self.name}' has no field '{self._text_field}'; {known} (text_field)")
            for row, value in enumerate(rows[self._text_field]):
                try:
                    if text := require_text(value, self._text_field, f"'{self.name}' {part} row {row}"):
                        yield Document(id=f"{part}#{row}", text=text)
                except RowError as error:
                    yield Document(id=f"{part}#{row}", text="", bad=str(error))

    def state(self) -> str:
        """The name, which stands for the content."""
        return self.name

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(
            f"'{self.name}' is not a file or folder (seen from {Path.cwd()}), and cannot be read as a Hugging Face "
            f"data set: {first_line(error)}"
        )
