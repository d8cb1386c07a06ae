"""The report of a run: one page, with everything in it, that a browser opens without a network."""

from streamgrad.lab.report.page import Content, Part, collect, sections_of, write_report
from streamgrad.lab.report.run import Run, load_run, save_run
from streamgrad.lab.report.training import Training, collect_training, is_training, write_training_report

__all__ = [
    "Content",
    "Part",
    "Run",
    "Training",
    "collect",
    "collect_training",
    "is_training",
    "load_run",
    "save_run",
    "sections_of",
    "write_report",
    "write_training_report",
]
