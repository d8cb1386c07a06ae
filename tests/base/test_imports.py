"""Imports point one way, and the library needs jax, numpy and optax alone."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.tools import ROOT

PACKAGE = ROOT / "streamgrad"
# A file may import its own room and those before it. `streamgrad` is the public page, streamgrad/__init__.py.
ORDER = (
    ("_typing", "base", "checks", "contract", "keys", "heads", "parts", "step_loss", "trees"),
    ("step",),
    ("cells",),
    ("noise",),
    ("engine",),
    ("estimators",),
    ("theory",),
    ("adapt",),
    ("streamgrad",),
    ("lab",),
)
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, module: str, package: bool) -> Iterator[str]:
    """The modules of streamgrad that a file names, wherever in it: also in functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "streamgrad")
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                above = module.split(".")[: -(node.level - package) or None]
                start = ".".join([*above, *([node.module] if node.module else [])])
            if start.split(".")[0] == "streamgrad":
                inside = (f"{start}.{alias.name}" for alias in node.names)
                yield from (name if is_module(name) else start for name in inside)


@functools.cache
def graph() -> dict[str, set[str]]:
    """Each module of the package, and those it imports."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = name_of(path)
        found[name] = set(imported(path.read_text(), name, path.name == "__init__.py")) - {name}
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def arrows_back(modules: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, others in modules.items()
        for other in sorted(others)
        if RANK[room(other)] > RANK[room(name)]
    ]


def test_every_room_has_its_place():
    assert {room(name) for name in graph()} == set(RANK)


def test_no_arrow_points_back():
    assert not (found := arrows_back(graph())), "\n".join(found)


def test_no_file_imports_itself_through_others():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    "source",
    [
        "import streamgrad_lab.files",
        "from streamgrad import lab",
        "from streamgrad_lab import files",
        "def late():\n    from streamgrad_lab.files import write_text",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..lab import files",
        "from ..theory.episode import collect",
        "import streamgrad as sg",
    ],
)
def test_an_arrow_back_is_seen(source):
    """However it is written, in a file among the estimators."""
    name = "streamgrad.estimators.new"
    assert arrows_back({name: set(imported(source, name, package=False))})


ALONE = """
import sys
import jax, jax.scipy.linalg, numpy, optax

known = {name.partition(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)

class NothingElse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in known | {"streamgrad"}:
            raise ModuleNotFoundError(f"{name} is not installed here.", name=name)

sys.meta_path.insert(0, NothingElse)
import streamgrad as sg

new = {name.partition(".")[0] for name in sys.modules} - known
assert new == {"streamgrad"}, new
inside = {name for name in sys.modules if name.startswith("streamgrad_lab")}
assert not inside, inside
model = sg.Model(sg.cells.lstm(2, 3), sg.heads.softmax(2))
params = model.init(jax.random.key(0))
chunk = sg.Chunk(jax.numpy.ones((2, 2)), jax.numpy.zeros(2, int))
grads, state, info = sg.uoro(model).update(params, sg.uoro(model).init(params), chunk, jax.random.key(1))
import streamgrad_lab.progress, streamgrad_lab.tasks.queue, streamgrad_lab.tasks.mnist
"""


def test_the_library_needs_jax_numpy_and_optax_alone():
    """In a fresh interpreter that finds no other package; and nothing of the laboratory is loaded with it."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", ALONE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
