"""Strict numerics for every test: the CPU, float64, no rank promotion, shapes of annotations checked at run time."""

import gc
import os
from importlib.util import find_spec
from pathlib import Path

from tests.flags import FLAGS

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads and XLA's get in each other's way
os.environ.setdefault("XLA_FLAGS", FLAGS)

import jax
import jaxtyping
import pytest

from tests.base import names
from tests.cells.libraries import have

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 4)  # of which all but `tests/devices` use the first alone
jax.config.update("jax_numpy_rank_promotion", "raise")

# For good, not in a `with`: modules of both packages are imported when they are first used.
jaxtyping.install_import_hook(["streamgrad", "streamgrad_lab"], "beartype.beartype")

# The library is tested without the laboratory, too. These tests need it, or what it installs.
LAB = find_spec("streamgrad_lab") is not None
NEED_LAB = ("benchmarks", "devices/test_train_devices.py", "docs/test_pages.py", "examples", "lab")
collect_ignore = [] if LAB else list(NEED_LAB)


# The docstrings whose examples need another library.
NEEDS = {f"streamgrad.cells.from_{name}": name for name in ("equinox", "flax", "haiku")}


# Their examples are programs to compile, each for itself, of what other tests call as well.
SLOW = ("streamgrad_lab.", "streamgrad.theory.", "streamgrad.estimators.", "streamgrad.noise.kronecker_reduction.")


def pytest_configure(config: pytest.Config) -> None:
    """Without the laboratory leave out the examples in its docstrings: their folder is beside this one, not below."""
    if not LAB and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args = [folder for folder in config.args if Path(folder).parts[0] != "lab"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the examples of adapters for libraries that are not there, or do not work with this JAX; mark slow ones."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        name = NEEDS.get(item.name.rpartition(".")[0])
        if name is not None and not have(name):
            item.add_marker(pytest.mark.skip(reason=f"{name} cannot be imported here"))


def pytest_collection_finish() -> None:
    """Tracing makes many small objects, for which the collector would walk through all modules again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it where tests were left out, and where some are not yet on the list of those that must be there."""
    if not LAB:
        left_out = ", ".join(f"tests/{name}" for name in NEED_LAB)
        terminalreporter.write_line(f"streamgrad_lab is not installed: {left_out} were left out.")
    if new := names.unlisted():
        terminalreporter.write_line(f"{len(new)} tests are not in tests/names.txt yet: `{names.COMMAND}` adds them.")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs that several tests compile are compiled once for the whole session, by whichever worker is first."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)  # to read a smaller one back takes as long
    yield
    jax.config.update("jax_compilation_cache_dir", None)


# Linux gives a process 65,530 mappings of memory, and a compiled program takes several: beyond, XLA's compiler crashes.
MOST_MAPPINGS = 40_000


@pytest.fixture(scope="module", autouse=True)
def room_for_programs():
    """Forget compiled programs before there are too many, as when all tests run in few processes."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def as_a_user():
    """Without the run-time check of annotations, which users do not have and which would answer first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
