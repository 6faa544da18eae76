"""Reports: what a run's event log says, as figures, a terminal table and one self-contained page."""

from blocktrain.report.multiplier import Multiplier, multipliers, multipliers_text
from blocktrain.report.report import write_report
from blocktrain.report.run import RunRecord
from blocktrain.report.summary import summary, table

__all__ = [
    "Multiplier",
    "RunRecord",
    "multipliers",
    "multipliers_text",
    "summary",
    "table",
    "write_report",
]
