"""The report of a run: one page, with everything in it, that a browser opens without a network."""

from streamgrad.report.page import Content, Part, collect, write_report
from streamgrad.report.run import Run, load_run, save_run

__all__ = ["Content", "Part", "Run", "collect", "load_run", "save_run", "write_report"]
