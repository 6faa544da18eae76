"""Reports on runs, from their logs: a summary, a table for a terminal, and one self-contained HTML page."""

from blocktrain.report.multiplier import MeasuredMultiplier, multipliers, multipliers_text
from blocktrain.report.page import write_report
from blocktrain.report.run import RunRecord
from blocktrain.report.summary import Summary, summary
from blocktrain.report.summary_table import table

__all__ = [
    "MeasuredMultiplier",
    "RunRecord",
    "Summary",
    "multipliers",
    "multipliers_text",
    "summary",
    "table",
    "write_report",
]
