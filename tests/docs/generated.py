"""Text that follows from the registry of estimators: exports, and the README's table. `make generated` writes it.

Between two marks each: a hand-written line there would be lost.
"""

from collections.abc import Callable
from pathlib import Path

import streamgrad
from streamgrad.estimators.registry import REGISTRY, markdown_table
from tests.tools import ROOT

PACKAGE = Path(streamgrad.__file__).parent  # which need not be below the root: tests also run on an installed wheel


def imports_of_files() -> str:
    """One import for each estimator, from its file."""
    return "".join(f"from streamgrad.estimators.{name} import {name}\n" for name in sorted(REGISTRY))


def imports_of_page() -> str:
    """One import for all estimators, from their room."""
    return "from streamgrad.estimators import (\n" + "".join(f"    {name},\n" for name in sorted(REGISTRY)) + ")\n"


def names() -> str:
    """The estimators in a list of names."""
    return "".join(f'    "{name}",\n' for name in sorted(REGISTRY))


# For each file its parts: the marks around them, and their text.
PARTS: dict[Path, list[tuple[str, str, Callable[[], str]]]] = {
    ROOT / "README.md": [("<!-- estimators -->\n", "<!-- /estimators -->", markdown_table)],
    PACKAGE / "__init__.py": [
        ("# estimators: written by `make generated`\n", "# /estimators\n", imports_of_page),
        ("    # estimators: written by `make generated`\n", "    # /estimators\n", names),
    ],
    PACKAGE / "estimators" / "__init__.py": [
        ("# estimators: written by `make generated`\n", "# /estimators\n", imports_of_files),
        ("    # estimators: written by `make generated`\n", "    # /estimators\n", names),
    ],
}


def written(path: Path, text: str) -> str:
    """The text of a file with its generated parts as they should be."""
    for begin, end, make in PARTS[path]:
        before, _, rest = text.partition(f"\n{begin}")
        _, _, after = rest.partition(end)
        text = f"{before}\n{begin}{make()}{end}{after}"
    return text


def write() -> list[str]:
    """Bring all files up to date; returns those that have changed."""
    changed = []
    for path in PARTS:
        before = path.read_text()
        after = written(path, before)
        if after != before:
            path.write_text(after)
            changed.append("/".join(path.parts[-2:]))
    return changed


if __name__ == "__main__":
    print("\n".join(write()))
