"""Imports point one way, in the library and in the laboratory, and the library needs jax, numpy and optax alone."""

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tools import ROOT

LIBRARY, LABORATORY = "streamgrad", "streamgrad_lab"
# A file may import its own room and those before it. The name of a package is its public page, its __init__.py.
ORDERS = {
    LIBRARY: (
        ("_typing", "base", "checks", "contract", "deprecations", "keys", "heads", "parts", "step_loss", "trees"),
        ("step",),
        ("cells",),
        ("noise",),
        ("engine",),
        ("estimators",),
        ("theory",),
        ("adapt",),
        (LIBRARY,),
    ),
    LABORATORY: (
        ("files", "interrupts", "own", "progress", "timing"),
        ("locks", "manifest", "tables"),
        ("environments", "tasks"),
        ("agent", "training"),
        ("candidates", "choice", "comparison", "programs"),
        ("experiments",),
        ("report",),
        ("cli", "command"),
        (LABORATORY,),
    ),
}
# The folders that hold the packages; the laboratory may not be installed.
SPECS = {package: find_spec(package) for package in ORDERS}
FOLDERS = {package: Path(str(spec.origin)).parent.parent for package, spec in SPECS.items() if spec is not None}
needs_lab = pytest.mark.skipif(LABORATORY not in FOLDERS, reason="streamgrad_lab is not installed")
# The laboratory comes after the whole library.
RANK = {
    (package, room): (place, rank)
    for place, (package, order) in enumerate(ORDERS.items())
    for rank, rooms in enumerate(order)
    for room in rooms
}
# The laboratory is a user of the library, and uses its public pages.
PUBLIC = {LIBRARY, *(f"{LIBRARY}.{name}" for name in ("cells", "estimators", "heads", "noise", "theory"))}
# Beyond them: annotations and checks of arguments, which both packages word alike, and parts of the theory and of the
# sharded estimator that its experiments take apart.
PRIVATE = {
    "streamgrad._typing",
    "streamgrad.base",
    "streamgrad.checks",
    "streamgrad.deprecations",
    "streamgrad.engine.sharded",
    "streamgrad.noise.rescale",
    "streamgrad.theory.empirical",
    "streamgrad.theory.matrices",
    "streamgrad.theory.objective",
    "streamgrad.theory.predictions",
    "streamgrad.theory.spatial",
    "streamgrad.trees",
}


def is_module(name: str) -> bool:
    package = name.split(".")[0]
    path = FOLDERS.get(package, ROOT).joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def name_of(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, module: str, package: bool) -> Iterator[str]:
    """The modules of either package that a file names, wherever in it: also in functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in ORDERS)
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                above = module.split(".")[: -(node.level - package) or None]
                start = ".".join([*above, *([node.module] if node.module else [])])
            if start.split(".")[0] in ORDERS:
                inside = (f"{start}.{alias.name}" for alias in node.names)
                yield from (name if is_module(name) else start for name in inside)


@functools.cache
def graph(package: str) -> dict[str, set[str]]:
    """Each module of a package, and those it imports."""
    found = {}
    for path in sorted((FOLDERS[package] / package).rglob("*.py")):
        name = name_of(path, FOLDERS[package])
        found[name] = set(imported(path.read_text(), name, path.name == "__init__.py")) - {name}
    return found


def room(module: str) -> tuple[str, str]:
    package, *inside = module.split(".")
    return package, inside[0] if inside else package


def arrows_back(modules: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, others in modules.items()
        for other in sorted(others)
        if RANK[room(other)] > RANK[room(name)]
    ]


@pytest.mark.parametrize("package", FOLDERS)
def test_every_room_has_its_place(package):
    assert {room(name) for name in graph(package)} == {room for room in RANK if room[0] == package}


@pytest.mark.parametrize("package", FOLDERS)
def test_no_arrow_points_back(package):
    """Neither inside a package nor from the library to the laboratory."""
    assert not (found := arrows_back(graph(package))), "\n".join(found)


def test_no_file_imports_itself_through_others():
    try:
        TopologicalSorter({name: others for package in FOLDERS for name, others in graph(package).items()}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@needs_lab
def test_the_laboratory_uses_public_pages():
    """And of the private modules those listed, no other."""
    files = (FOLDERS[LABORATORY] / LABORATORY).rglob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    pages = [node for node in froms if str(node.module).split(".")[0] == LIBRARY]
    assert {node.module for node in pages} - PUBLIC == PRIVATE
    for node in pages:
        listed = getattr(importlib.import_module(str(node.module)), "__all__", ())
        unlisted = {alias.name for alias in node.names} - {*listed, *(page.rpartition(".")[2] for page in PUBLIC)}
        assert node.module in PRIVATE or not unlisted, f"{node.module} does not list {unlisted}"


@pytest.mark.parametrize(
    "source",
    [
        "import streamgrad_lab.files",
        "import streamgrad_lab",
        "from streamgrad_lab import files",
        "def late():\n    from streamgrad_lab.files import write_text",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..theory import matrices",
        "from ..theory.episode import collect",
        "import streamgrad as sg",
    ],
)
def test_an_arrow_back_is_seen(source):
    """However it is written, in a file among the estimators."""
    name = "streamgrad.estimators.new"
    assert arrows_back({name: set(imported(source, name, package=False))})


@needs_lab
def test_an_arrow_back_inside_the_laboratory_is_seen():
    name = "streamgrad_lab.tasks.new"
    assert arrows_back({name: set(imported("from ..training import loop", name, package=False))})
    assert not arrows_back({name: set(imported("import streamgrad as sg\nfrom .. import own", name, package=False))})


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
model = sg.Model(sg.cells.lstm(2, 3), sg.heads.softmax(2))
params = model.init(jax.random.key(0))
chunk = sg.Chunk(jax.numpy.ones((2, 2)), jax.numpy.zeros(2, int))
grads, state, info = sg.uoro(model).update(params, sg.uoro(model).init(params), chunk, jax.random.key(1))
"""
# Names of the laboratory that need nothing more: the queue is made, and MNIST read, without scikit-learn.
WITH_LAB = """
known |= {"streamgrad_lab"}
import streamgrad_lab, streamgrad_lab.progress, streamgrad_lab.tasks.mnist
streamgrad_lab.find_task("queue")
"""


def test_the_library_needs_jax_numpy_and_optax_alone():
    """In a fresh interpreter that finds no other package; and nothing of the laboratory is loaded with it."""
    code = ALONE + (WITH_LAB if LABORATORY in FOLDERS else "")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
