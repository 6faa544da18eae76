"""What of the rows of a data set is not used: bad rows, which are skipped, and fields that nothing reads.

A file from elsewhere has a bad row now and then, which should not cost a run; many bad rows mean that the file was
misread, which should. Either way nothing is left out in silence. The report is stored with the tokens, so a run that
finds these in the cache warns as well.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocktrain.errors import DataError

logger = logging.getLogger(__name__)

_SHOWN = 3  # reasons


class RowError(DataError):
    """A row that cannot be used although its file can; the message names its place and the reason."""


def is_empty(value: object) -> bool:
    """Whether leaving out `value` loses nothing: null, or an empty text, list or object."""
    return value is None or value in ("", [], {})


def filled_fields(record: Mapping[str, object], *, but: Iterable[str] = ()) -> list[str]:
    """The names of the fields of `record` that hold something, without those in `but`, in the row's order."""
    known = frozenset(but)
    return [name for name, value in record.items() if name not in known and not is_empty(value)]


@dataclass(kw_only=True)
class RowReport:
    """Counts for one part of a data set, such as its training rows.

    rows: what the error and the warning call them, such as "train conversations".
    ignored: for each field that is not read, the number of rows that have it.
    reasons: why the first bad rows are bad.
    """

    rows: str
    count: int = 0
    bad: int = 0
    reasons: list[str] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)

    def add(self, ignored: Iterable[str] = ()) -> None:
        """Count a good row and the fields of it that nothing reads."""
        self.count += 1
        self.ignored.update(ignored)

    def skip(self, reason: str) -> None:
        """Count a bad row."""
        self.count += 1
        self.bad += 1
        self.reasons += [reason] if len(self.reasons) < _SHOWN else []

    def check(self) -> None:
        """Raise `DataError` where all rows are bad, or more than 1 % of them and more than one."""
        if self.bad and (self.bad == self.count or self.bad > max(1, self.count // 100)):
            raise DataError(
                f"{self.bad} of {self.count} {self.rows} cannot be used, and at most 1 % may be skipped; the first: "
                f"{self.reasons[0]}"
            )


def save_reports(reports: Sequence[RowReport], folder: Path) -> None:
    """Write `rows.report` into `folder`."""
    (folder / "rows.report").write_text(json.dumps([vars(report) for report in reports], indent=1))


def load_reports(folder: Path) -> list[RowReport]:
    """What `save_reports` wrote, nothing in a cache from before there were reports; raises `DataError` if it is
    damaged."""
    if not (folder / "rows.report").exists():
        return []
    try:
        values: list[dict[str, Any]] = json.loads((folder / "rows.report").read_text())
        return [RowReport(**{**value, "ignored": Counter(value["ignored"])}) for value in values]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"'{folder}' has no readable report of its rows ({error}); delete it") from error


def warn_of_unused(reports: Sequence[RowReport], source: str, way_out: str) -> None:
    """One warning for each part that has bad rows, and one for all ignored fields of the data set `source`.

    way_out: what to do about the ignored fields.
    """
    for report in reports:
        if report.bad:
            shown = "the first" if report.bad > len(report.reasons) else "they"
            logger.warning(
                "'%s': %d of %d %s cannot be used and are skipped; %s: %s",
                *(source, report.bad, report.count, report.rows, shown, "; ".join(report.reasons)),
            )
    ignored = sum((report.ignored for report in reports), Counter[str]())
    if ignored:
        fields = ", ".join(f"'{name}' ({rows} rows)" for name, rows in sorted(ignored.items()))
        total = sum(report.count for report in reports)
        logger.warning("'%s': these fields are not read: %s of %d rows; %s", source, fields, total, way_out)
