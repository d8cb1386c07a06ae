"""The README is true: its examples run as printed, and its table is the registry.

`make table` (this file as a script) brings the table up to date.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
MARKS = ("<!-- estimators -->\n", "<!-- /estimators -->")


def code_blocks(path: Path) -> list[str]:
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [re.sub(r"^   ", "", block, flags=re.MULTILINE) if block.startswith("   ") else block for block in blocks]


def table_in(text: str) -> str:
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    return text[begin:end]


def test_table_is_the_registry():
    from streamgrad.estimators import markdown_table

    assert table_in(README.read_text()) == markdown_table(), "run `make table`"


def test_examples_run_as_printed():
    """In a fresh interpreter, as a newcomer would, in float32; and the printed loss is as good as the README says.

    Each block begins with no names, so that it can be copied on its own.
    """
    blocks = code_blocks(README)
    assert len(blocks) >= 4
    code = "\n".join(
        f"exec(compile({block!r}, 'block {i} of README', 'exec'), {{'__name__': '__main__'}})"
        for i, block in enumerate(blocks)
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    loss = re.search(r"loss (\d\.\d+), chance 0.693", done.stdout)
    assert loss, done.stdout
    assert float(loss[1]) < 0.05


def test_example_of_contributing_conforms():
    """The estimator that CONTRIBUTING shows runs, and is what it says."""
    import streamgrad as sg
    from tests.tools import error, make_chunk, make_model, make_params, run

    scope: dict = {}
    for block in code_blocks(ROOT / "CONTRIBUTING.md"):
        exec(block, scope)
    model = make_model("lstm")
    params, chunk = make_params(model), make_chunk(model, 5)
    got = run(scope["myopic"](model), params, [chunk])[0]
    assert error(got, run(sg.tbptt(model, window=1), params, [chunk])[0]) < 1e-12


def test_core_imports_with_jax_numpy_and_optax_alone():
    """In a fresh interpreter that has none of the other packages."""
    extras = ["jaxtyping", "beartype", "hypothesis", "pytest", "tyro", "rich", "orbax", "matplotlib", "jinja2"]
    extras += ["sklearn"]
    code = f"import sys; sys.modules.update(dict.fromkeys({extras}))\nimport streamgrad as sg, jax\n"
    code += "import streamgrad.lab.progress, streamgrad.lab.tasks.queue, streamgrad.lab.tasks.mnist\n"
    code += "m = sg.Model(sg.cells.lstm(2, 3), sg.heads.softmax(2)); print(sg.uoro(m).init(m.init(jax.random.key(0))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_library_sets_no_global_option():
    """Platform, float64 and rank promotion are the user's to choose."""
    code = (
        "import jax; before = dict(jax.config.values); import streamgrad; "
        "assert before == dict(jax.config.values), 'importing streamgrad changed the configuration of jax'"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    from streamgrad.estimators import markdown_table

    text = README.read_text()
    README.write_text(text.replace(MARKS[0] + table_in(text), MARKS[0] + markdown_table()))
