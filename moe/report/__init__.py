"""Pictures and pages made from a run's JSON lines alone; nothing here trains, and matplotlib loads only when a picture is drawn."""

from moe.report.compare import compare
from moe.report.page import main, write_report

__all__ = ["compare", "main", "write_report"]
