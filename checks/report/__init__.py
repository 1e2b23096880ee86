"""Reports of a comparison: as JSON, as one HTML page, and as a bundle that replays it."""

from tapcheck.checks.report.bundle import write_bundle
from tapcheck.checks.report.data import report_data, write_json
from tapcheck.checks.report.page import write_html
from tapcheck.checks.report.plots import ReportError, require_plots

__all__ = [
    "ReportError",
    "report_data",
    "require_plots",
    "write_bundle",
    "write_html",
    "write_json",
]
