"""What stands on the pages of `docs/estimators/`: rows of the registry, their docstrings, and what was measured."""

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streamgrad.estimators.registry import REGISTRY, Row

FOLDER = Path(__file__).parent.parent / "docs" / "estimators"
COMMAND = "python -m benchmarks.pages"
REFUSED = "it takes no chunks of {chunk} steps"
SECTIONS = ("Args", "Returns", "Example", "References")
EXACT = 1e-9  # a squared error below is rounding
NETWORKS = {"vanilla": "tanh RNN", "lstm": "LSTM"}


class Page(NamedTuple):
    """What all pages say.

    Attributes:
      task: what was measured on, in words.
      cells: the networks.
      chunk: K, steps of a chunk.
      streams: B.
    """

    task: str
    cells: tuple[str, ...]
    chunk: int
    streams: int


def write_pages(folder: Path, measured: Sequence[Mapping[str, Any]], page: Page) -> None:
    """Write all pages, and remove those of estimators that are no more.

    Args:
      folder: where.
      measured: rows of the CSV.
      page: what all of them say.
    """
    texts = pages(measured, page)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def pages(measured: Sequence[Mapping[str, Any]], page: Page) -> dict[str, str]:
    """The text of each page by the name of its file.

    Args:
      measured: rows of the CSV.
      page: what all of them say.

    Returns:
      A page for each row of the registry, and README.md. ValueError, which says what to run, where one is missing.
    """
    rows = list(REGISTRY.values())
    for row in rows:
        if not any(one["estimator"] == row.name for one in measured):
            raise ValueError(f"{row.name} has not been measured: run `{COMMAND} --only {row.name}`.")
    texts = {f"{row.name}.md": page_of(row, of(measured, row.name), page) for row in rows}
    return {"README.md": index(rows, measured, page), **texts}


def of(measured: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The rows of one estimator."""
    return [row for row in measured if row["estimator"] == name]


def page_of(row: Row, measured: Sequence[Mapping[str, Any]], page: Page) -> str:
    """The page of an estimator."""
    text = sections(inspect.getdoc(row.make) or "")
    parts = [f"# `{row.name}`", f"<!-- Written by {COMMAND}: change the docstring, not this page. -->"]
    parts += [paragraphs(text["body"], row.name)]
    cuts = ", ".join(row.cuts) or "none"
    parts += [
        table(
            ("gradient", "time per step", "memory", "cuts"),
            [(row.promise, code(row.time), code(row.memory), cuts)],
        )
    ]
    parts += ["Per stream and up to a constant; [the index](README.md) explains the letters."]
    parts += ["## Arguments", arguments(text["Args"], row.name)]
    parts += ["## Returns", paragraphs(text["Returns"], row.name), "## Example", example(text["Example"])]
    parts += ["## On a small task", f"Recall: {page.task}.", verdict(row, measured, page)]
    parts += [measured_table(row, measured, page), LEGEND.format(streams=page.streams)]
    if text["References"]:
        parts += ["## References", references(text["References"])]
    return "\n\n".join(part for part in parts if part) + "\n"


LEGEND = """Error is E‖ĝ - g‖² / ‖g‖² of the mean over {streams} streams, against BPTT of the whole streams; *of it
bias* is the part that stays however often one averages. Cosine is the mean of that between ĝ and g. Time is per step,
in multiples of [`bptt`](bptt.md) on the same chunks in the same run, on two CPU cores. State is what one stream keeps
from chunk to chunk, in float32."""

VERDICTS = {
    "exact": "It is exact: what there is of an error is rounding, shown as 0.",
    "exact in the chunk": """It is exact inside a chunk, and gives no credit to what lies before. On chunks of {chunk}
steps its error is therefore a bias: no number of streams or updates averages it out. With the whole
stream as one chunk it would be 0.""",
    "biased": """It is biased: its error is a bias{noise}, which no number of streams or updates averages out. It can
still be the better choice, where it is cheap and its cosine is high.""",
    "unbiased for the noisy network": """Its mean is the gradient of the network with noise in its state, close to that
of the network without. Nearly all of its error is noise, which falls as 1/B with B streams, and averages out over
updates.""",
    "unbiased for the smoothed loss": """Its mean is the gradient of the loss smoothed by noise in the parameters, close
to that of the network without. Nearly all of its error is noise, which falls as 1/B with B streams, and averages out
over updates.""",
    "unbiased": """It is unbiased: its error is noise, which falls as 1/B with B streams, and averages out over updates.
Where a bias is shown all the same, a variant trades one for the other.""",
}


def verdict(row: Row, measured: Sequence[Mapping[str, Any]], page: Page) -> str:
    """What kind of error it is, in words."""
    noisy = any(float(one["samples"]) > 1 for one in measured if not one["options"] and not one["refused"])
    words = VERDICTS.get(row.promise, f"Its gradient is {row.promise}.")
    return words.format(chunk=page.chunk, noise=" beside some noise" if noisy else "")


def measured_table(row: Row, measured: Sequence[Mapping[str, Any]], page: Page) -> str:
    """Error and cost of default options and variants on every network."""
    lines = []
    for cell in page.cells:
        for one in measured:
            if one["cell"] != cell:
                continue
            default = " ".join(f"{option}={value}" for option, value in row.options.items())
            options = code(one["options"] or default) if one["options"] or default else "default"
            costs = (f"refused: {one['refused']}",) + ("",) * 4 if one["refused"] else measures(one)
            lines.append((network(one), options, *costs))
    return table(("network", "options", "error", "of it bias", "cosine", "time", "state"), lines)


def measures(one: Mapping[str, Any]) -> tuple[str, ...]:
    """Error, bias, cosine, time and state."""
    error, bias, noise = (float(one[name]) for name in ("squared_error", "squared_bias", "squared_error_noise"))
    if error < EXACT:
        shown = ("0", "0")
    elif float(one["samples"]) == 1:
        shown = (number(error), "all")
    else:
        seen = number(bias) if one["bias_seen"] == "yes" else "none seen"
        shown = (f"{number(error)} ± {number(1.96 * noise)}", seen)
    return (*shown, f"{float(one['cosine']):.3f}", number(float(one["times_bptt"])), size(float(one["state_bytes"])))


def index(rows: Sequence[Row], measured: Sequence[Mapping[str, Any]], page: Page) -> str:
    """The page that leads to all others."""
    lines = []
    for row in rows:
        cells: list[str] = [f"[`{row.name}`]({row.name}.md)", row.promise]
        default = {one["cell"]: one for one in of(measured, row.name) if one["options"] == ""}
        for cell in page.cells:
            one = default[cell]
            shown = ("refused", "", "", "", "") if one["refused"] else measures(one)
            cells += [shown[0].partition(" ")[0], shown[2], shown[3]]
        lines.append((*cells, row.summary))
    kinds = [f"{what}, {NETWORKS.get(cell, cell)}" for cell in page.cells for what in ("error", "cosine", "time")]
    return INDEX.format(
        command=COMMAND,
        task=page.task,
        table=table(("estimator", "gradient", *kinds, "what it is"), lines),
        legend=LEGEND.format(streams=page.streams),
    )


INDEX = """# The estimators

<!-- Written by {command}: change docstrings and the registry, not this page. -->

One page for each, with its equation, arguments, an example, and its error and cost on the same small task.
[choosing.md](../choosing.md) says which one to take, [chunks.md](../chunks.md) how those work that backpropagate inside
chunks.

**The task.** Recall: {task}. Default options; the pages have others as well.

{table}

{legend}

The error of what is exact in the chunk, and of what is biased, is a bias: no number of streams or updates averages it
out. The error of what is unbiased is noise, which falls as 1/B with B streams. So the two are not alike at the same
size: over many updates noise averages out, and bias adds up.

**Letters** on the pages: S state units, N preactivations, A features, P recurrent parameters, G groups, R blocks or
particles, r terms, T or K steps in a chunk. A *cut* is the vertex of the transition at which noise enters.

`{command}` measures again and writes all pages ([CSV](../../benchmarks/results/pages.csv)), with `--only NAME` some of
them; `{command} --write-only` writes them from what was measured.
"""


def sections(doc: str) -> dict[str, str]:
    """A docstring in parts: "body", and each of `SECTIONS`, "" where there is none.

    Example:
      >>> sections("One line.\\n\\nArgs:\\n  x: a number.")["Args"]
      'x: a number.'
    """
    found, name = {"body": [], **{name: [] for name in SECTIONS}}, "body"
    for line in doc.splitlines():
        if line.endswith(":") and line[:-1] in SECTIONS:
            name = line[:-1]
        else:
            found[name].append(line)
    return {name: inspect.cleandoc("\n".join(["", *lines])).strip("\n") for name, lines in found.items()}


def paragraphs(text: str, name: str) -> str:
    """Prose with every equation, indented in a docstring, as a block of code, and estimators' names as links."""
    parts = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("    "):
            parts.append("```text\n" + inspect.cleandoc("\n" + block) + "\n```")
        elif block.startswith("|"):
            parts.append(block)
        else:
            parts.append(linked(" ".join(block.split()), name))
    return "\n\n".join(parts)


def arguments(text: str, name: str) -> str:
    """A list of arguments: a new one begins where a line is not indented."""
    entries: list[str] = []
    for line in text.splitlines():
        if line[:1].strip():
            entries.append(line)
        elif line.strip():
            entries[-1] += " " + line.strip()
    parts = [entry.partition(":") for entry in entries]
    return "\n".join(f"- `{argument}`:{linked(rest, name)}" for argument, _, rest in parts)


def example(text: str) -> str:
    """A session of the interpreter as code to copy; what it printed stands behind as comments."""
    lines = []
    for line in text.splitlines():
        if line.startswith((">>> ", "... ")):
            lines.append(line[4:])
        elif line.strip() in (">>>", "..."):
            lines.append("")
        elif line.strip():
            lines.append(f"# {line}")
    imports = [number for number, line in enumerate(lines) if line.startswith(("import ", "from "))]
    if imports:  # a blank line between them and the rest
        lines.insert(imports[-1] + 1, "")
    return "```python\n" + "\n".join(lines) + "\n```"


def references(text: str) -> str:
    """A list of references: each ends with a full stop at the end of a line."""
    entries, now = [], ""
    for line in text.splitlines():
        now = f"{now} {line.strip()}".strip()
        if now.endswith("."):
            entries.append(now)
            now = ""
    return "\n".join(f"- {entry}" for entry in [*entries, now] if entry)


def linked(text: str, name: str) -> str:
    """Names of other estimators lead to their pages."""
    others = "|".join(other for other in REGISTRY if other != name)
    return re.sub(rf"`({others})`", r"[`\1`](\1.md)", text)


def network(one: Mapping[str, Any]) -> str:
    """A network in words."""
    return f"{NETWORKS.get(one['cell'], one['cell'])} of {one['hidden']}"


def code(text: str) -> str:
    """In type of its own."""
    return f"`{text}`"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def number(x: float) -> str:
    """Two digits.

    Example:
      >>> number(0.0), number(0.01234), number(1234.5), number(1.2e-7)
      ('0', '0.012', '1200', '1.2e-07')
    """
    return f"{float(f'{x:.2g}'):g}" if x == 0 or 1e-3 <= abs(x) < 1e5 else f"{x:.1e}"


def size(count: float) -> str:
    """Bytes.

    Example:
      >>> size(12), size(12_345)
      ('12 B', '12.3 kB')
    """
    return f"{count:.0f} B" if count < 1000 else f"{count / 1e3:.1f} kB"
