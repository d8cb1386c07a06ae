"""The README and the pages it leads to are true: their examples run as printed, and the table is the registry.

`make generated` brings the table up to date.
"""

import os
import re
import subprocess
import sys

import pytest

import streamgrad as sg
from tests.cells.libraries import library
from tests.docs import generated
from tests.tools import ROOT, code_blocks, error, few, make_chunk, make_model, make_params, run

README = ROOT / "README.md"
NAMES = ("chunks", "choosing", "variance", "carried", "acting", "reinforce", "scale")
PAGES = ("README.md", *(f"docs/{name}.md" for name in NAMES))


def test_the_first_screen_says_how_to_begin():
    """What it is, how to install it and the command, and the two commands with what they do and how long they take."""
    screen = "\n".join(README.read_text().splitlines()[:24])
    assert "Gradients of recurrent networks while the stream runs" in screen
    assert "pip install .  " in screen and "pip install . ./lab " in screen
    for command in ("make demo", "make test"):
        assert re.search(rf"^    {command} +# .*: \d+ minutes$", screen, flags=re.MULTILINE), command


@pytest.mark.parametrize("path", generated.PARTS, ids=lambda path: "/".join(path.parts[-2:]))
def test_table_and_exports_are_the_registry(path):
    text = path.read_text()
    assert generated.written(path, text) == text, "run `make generated`"


def test_a_row_that_is_missing_would_be_seen():
    for path in generated.PARTS:
        text = path.read_text().replace("rtrl", "")
        assert generated.written(path, text) != text


@pytest.mark.slow
def test_examples_run_as_printed():
    """In a fresh interpreter, as a newcomer would, in float32; and what they print is as good as the pages say.

    Each block begins with no names, so that it can be copied on its own.
    """
    blocks = [(page, block) for page in PAGES for block in code_blocks(ROOT / page)]
    assert {page for page, _ in blocks} == set(PAGES)
    code = "\n".join(
        f"exec(compile({block!r}, 'a block of {page}', 'exec'), {{'__name__': '__main__'}})" for page, block in blocks
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    loss = re.search(r"loss (\d\.\d+), chance 0.693", done.stdout)
    reward = re.search(r"reward (\d\.\d+), chance 0.50", done.stdout)
    assert loss and reward, done.stdout
    assert float(loss[1]) < 0.05
    assert float(reward[1]) > 0.95


NEEDS = {"import equinox": "equinox", "from flax": "flax", "import haiku": "haiku"}


@pytest.mark.parametrize("number", few(range(7), 3))
def test_examples_of_cells_run_as_printed(number):
    """Each in an interpreter of its own, as they need other libraries, and where those are."""
    block = code_blocks(ROOT / "docs/cells.md")[number]
    for words, name in NEEDS.items():
        if words in block:
            library(name)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/cells.md").read_text()
    assert all(f"    {line}".rstrip() in page for line in done.stdout.splitlines())  # what it prints is there


def test_every_example_of_cells_is_run():
    assert len(code_blocks(ROOT / "docs/cells.md")) == 7


def test_example_of_contributing_conforms():
    """The estimator that CONTRIBUTING shows runs, and is what it says."""
    scope: dict = {}
    for block in code_blocks(ROOT / "CONTRIBUTING.md"):
        exec(block, scope)
    model = make_model("lstm")
    params, chunk = make_params(model), make_chunk(model, 5)
    got = run(scope["myopic"](model), params, [chunk])[0]
    assert error(got, run(sg.windowed_bptt(model, window=1), params, [chunk])[0]) < 1e-12


def test_the_library_sets_no_global_option():
    """Platform, float64 and rank promotion are the user's to choose."""
    code = (
        "import jax; before = dict(jax.config.values); import streamgrad; "
        "assert before == dict(jax.config.values), 'importing streamgrad changed the configuration of jax'"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "README.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
)
def test_files_that_a_page_names_are_there(page):
    rooms = "adapt|cells|engine|estimators|noise|step|theory"
    named = set(re.findall(rf"(?<![\w/])((?:{rooms})/\w+\.py)\b", (ROOT / page).read_text()))
    there = {path.relative_to(generated.PACKAGE).as_posix() for path in generated.PACKAGE.rglob("*.py")}
    assert named <= there, sorted(named - there)
