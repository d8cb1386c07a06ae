"""What an experiment is: how it runs, what its figures are, and what it claims."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Claim(NamedTuple):
    """A statement of the paper, or of this library, held against recorded numbers.

    Attributes:
      text: the statement, in one sentence.
      holds: whether the numbers bear it out; None where they leave it undecided, see `evidence.decide`.
      detail: the numbers with their uncertainty, and where it fails why.
    """

    text: str
    holds: bool | None
    detail: str


class Table(NamedTuple):
    """A table of the report.

    Attributes:
      header: the columns' names.
      rows: cells as text.
    """

    header: list[str]
    rows: list[list[str]]


class Section(NamedTuple):
    """A part of the report: one figure with its reading.

    Attributes:
      title: heading.
      figure: a matplotlib figure, or None.
      text: what is seen, in a few sentences of plain text.
      claims: what it is held against.
      table: or None.
      files: CSV files, relative to the run's folder, that a reader may download.
    """

    title: str
    figure: Any
    text: str
    claims: list[Claim]
    table: Table | None
    files: list[str]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment of `streamgrad reproduce`.

    Attributes:
      name: as on the command line; also the name of its folder inside the run's.
      figure: which figure of the paper it reproduces, in one line.
      presets: by name ("smoke", "laptop", "paper"), its configuration, a frozen dataclass of plain values.
      run: `run(config, folder, progress=silent, resume=False, data=None)` computes, and writes `folder/**/*.csv`;
        `data` is the folder of the MNIST files, or None. With `resume=True` a run that was killed goes on: what trains
        goes on from its checkpoint, and any other file that is there is complete and stays. That the configuration is
        the same is for `reproduce` to check, by the manifest of the whole run.
      sections: `sections(folder) -> list[Section]`, the report of what `run` wrote. Reads CSV files alone.
      check: `check(config, data)` raises ValueError where something is missing that `run` would need; None where there
        is nothing to miss. It is asked before anything is written.
      data_hash: `data_hash(config, data)`, that of what `run` reads from files, other than by `lab.train`, which keeps
        one of its own; empty for nothing. A run goes on with the same data alone.
    """

    name: str
    figure: str
    presets: Mapping[str, Any]
    run: Callable[..., None]
    sections: Callable[[Path], list[Section]]
    check: Callable[[Any, Path | None], None] | None = None
    data_hash: Callable[[Any, Path | None], str] | None = None
