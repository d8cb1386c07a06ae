"""Collect a run's folder, and write its page."""

import base64
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from streamgrad_lab.experiments import find_experiment
from streamgrad_lab.experiments.base import Claim, Experiment, Section
from streamgrad_lab.files import replace_text
from streamgrad_lab.manifest import Manifest, load_manifest
from streamgrad_lab.report.figure import dark_rules, inline_svg, narrow_svg, standalone_svg
from streamgrad_lab.tables import numbers, read_columns

PAGE = "report.html"
LARGEST_DOWNLOAD = 4_000_000  # bytes of one CSV file; a page must still open on a phone
VERDICTS = {True: "holds", False: "fails", None: "undecided"}


class Part(NamedTuple):
    """One experiment of a run.

    Attributes:
      experiment: its record.
      entry: what `run.json` says about it.
      sections: its figures with their readings.
    """

    experiment: Experiment
    entry: dict[str, Any]
    sections: list[Section]


class Content(NamedTuple):
    """All that is on the page.

    Attributes:
      folder: the run's.
      run: what was run.
      parts: the experiments that are finished.
      unfinished: the names of those that are not.
    """

    folder: Path
    run: Manifest
    parts: list[Part]
    unfinished: list[str]

    @property
    def claims(self) -> list[tuple[str, Section, Claim]]:
        """Every claim, with its experiment's name and its section."""
        return [(p.experiment.name, s, c) for p in self.parts for s in p.sections for c in s.claims]


def collect(folder: str | Path) -> Content:
    """Read what `streamgrad reproduce` wrote; nothing is computed again.

    Args:
      folder: the run's.

    Returns:
      The content of its page. ValueError, which names the file, where one is missing, empty or corrupt.
    """
    folder = Path(folder)
    run = load_manifest(folder)
    parts = []
    for name, entry in run.experiments.items():
        if entry["done"]:
            parts.append(Part(find_experiment(name), entry, sections_of(name, folder)))
    if not parts:
        raise ValueError(f"no experiment in {folder} is finished: `streamgrad reproduce --resume` goes on with it.")
    return Content(folder, run, parts, [name for name, entry in run.experiments.items() if not entry["done"]])


def write_report(content: Content) -> Path:
    """Write the page, `report.html`, and the figures alone, `figures/*.svg`.

    Args:
      content: from `collect`.

    Returns:
      The page's path.
    """
    embedded: set[str] = set()
    parts = [
        {"part": part, "sections": prepare(content.folder, part.experiment.name, part.sections, embedded)}
        for part in content.parts
    ]
    counts = {word: sum(c.holds is held for *_, c in content.claims) for held, word in VERDICTS.items()}
    sections = [section for part in parts for section in part["sections"]]
    return render(
        content.folder, "page.html.j2", sections, content=content, run=content.run, parts=parts, counts=counts
    )


def prepare(folder: Path, name: str, sections: list[Section], embedded: set[str]) -> list[dict[str, Any]]:
    """Sections as the templates take them; writes their figures.

    Args:
      folder: the run's.
      name: what their ids begin with; a folder inside the run's where their files are, if there is one.
      sections: the sections.
      embedded: the files that the page has already; is added to.

    Returns:
      For each its id, the section, its figures as SVG elements, its files, and which columns are numbers.
    """
    from markupsafe import Markup

    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    found = []
    for number, section in enumerate(sections, 1):
        place, svgs = f"{name}-{number}", []
        if section.figure is not None:
            document = standalone_svg(section.figure)
            replace_text(figures / f"{place}.svg", document)
            shapes = {"wide": document, "narrow": narrow_svg(section.figure)}
            svgs = [Markup(inline_svg(svg, f"{place}-{kind}-", section.title, kind)) for kind, svg in shapes.items()]
            _close(section.figure)
        files = [_download(folder, name, file, embedded) for file in section.files]
        found.append({"id": place, "section": section, "svgs": svgs, "files": files, "numeric": _numeric(section)})
    return found


def render(folder: Path, template: str, sections: list[dict[str, Any]], **values: Any) -> Path:
    """Write `folder/report.html` from a template.

    Args:
      folder: the run's.
      template: its name.
      sections: from `prepare`, all that the page has.
      values: what else the template asks for.

    Returns:
      The page's path.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("streamgrad_lab.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=duration, plain=_plain, paragraphs=_paragraphs, verdict=VERDICTS.__getitem__)
    rules = Markup(dark_rules(svg for section in sections for svg in section["svgs"]))
    replace_text(folder / PAGE, environment.get_template(template).render(rules=rules, sections=sections, **values))
    return folder / PAGE


def duration(seconds: float) -> str:
    """Seconds in words.

    Example:
      >>> duration(3.21), duration(75.0), duration(7260.0)
      ('3.2 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def sections_of(name: str, run: Path) -> list[Section]:
    """The sections of one experiment of a run.

    Args:
      name: of the experiment.
      run: the run's folder.

    Returns:
      Its sections. ValueError, which names the file, where one is missing, empty or corrupt.
    """
    experiment, folder = find_experiment(name), run / name
    files = sorted(folder.rglob("*.csv")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"{folder} has no CSV files: run `streamgrad reproduce {experiment.name}` again.")
    for file in files:
        check_csv(file)
    try:
        return experiment.sections(folder)
    except OSError as error:
        raise ValueError(f"{error.filename or folder} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, IndexError) as error:
        odd = next(filter(None, map(_odd_number, files)), None)
        names = ", ".join(str(file) for file in files)
        raise ValueError(odd or f"the report cannot be made of {names}: {type(error).__name__}: {error}") from error


def check_csv(path: Path) -> None:
    """A CSV file is whole, and has a row; but for metrics, where every trial may have diverged before the first."""
    columns = read_columns(path)
    if not next(iter(columns.values())) and path.name != "metrics.csv":
        raise ValueError(f"{path} has a header and no rows: run the experiment again.")


def _odd_number(path: Path) -> str | None:
    """Where a column begins with a number and goes on with something else: the likely cause of what went wrong."""
    for name, cells in read_columns(path).items():
        odd = [line for line, cell in enumerate(cells, 2) if numbers([cell]) is None]
        if odd and 2 not in odd:
            return f"{path}, line {odd[0]}: {name} must be a number, not {cells[odd[0] - 2]!r}."
    return None


def _download(folder: Path, experiment: str, file: str, embedded: set[str]) -> dict[str, Any]:
    """A file of the run as a link that carries its bytes, unless a link before does."""
    inside = [folder / experiment / file, folder / file]
    path = next((p for p in inside if p.is_file() and p.resolve().is_relative_to(folder.resolve())), None)
    if path is None:
        raise ValueError(f"{inside[0]} does not exist: run `streamgrad reproduce {experiment}` again.")
    name, size = "-".join(path.relative_to(folder).parts), path.stat().st_size
    content, again = None, name in embedded
    if size <= LARGEST_DOWNLOAD and not again:
        content = "data:text/csv;charset=utf-8;base64," + base64.b64encode(path.read_bytes()).decode()
        embedded.add(name)
    location = str(path.relative_to(folder))
    return {"name": name, "href": content, "size": _bytes(size), "path": location, "again": again}


def _numeric(section: Section) -> list[int]:
    """Which columns of its table hold numbers, with or without a unit or an interval behind them."""
    rows = section.table.rows if section.table is not None else []
    number = re.compile("[-\u2212+<>≤≥~ ]*\\d|—?$")
    return [i for i in range(min(map(len, rows), default=0)) if all(number.match(row[i]) for row in rows)]


def _bytes(size: int) -> str:
    return f"{size} B" if size < 1000 else f"{size / 1e3:.0f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"


def _plain(value: Any) -> str:
    """A value of a configuration as text."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "—"}[value]
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple | dict) and not value:
        return "—"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return str(value)


def _paragraphs(text: str) -> list[str]:
    return [part for part in (" ".join(p.split()) for p in text.split("\n\n")) if part]


def _close(figure: Any) -> None:
    """Forget a figure, if pyplot made it: it would keep it for ever."""
    import sys

    pyplot: Callable[..., Any] | None = getattr(sys.modules.get("matplotlib.pyplot"), "close", None)
    if pyplot is not None:
        pyplot(figure)
