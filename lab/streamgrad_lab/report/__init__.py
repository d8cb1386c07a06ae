"""The report of a run: one page, with everything in it, that a browser opens without a network."""

from streamgrad_lab.report.page import VERDICTS, Content, Part, collect, sections_of, write_report
from streamgrad_lab.report.training import Training, collect_training, write_training_report

__all__ = [
    "VERDICTS",
    "Content",
    "Part",
    "Training",
    "collect",
    "collect_training",
    "sections_of",
    "write_report",
    "write_training_report",
]
