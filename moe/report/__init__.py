"""Pictures and pages made from a run's metrics.jsonl. matplotlib is imported only to draw a picture."""

from moe.report.compare import compare
from moe.report.page import main, write_report

__all__ = ["compare", "main", "write_report"]
