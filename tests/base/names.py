"""All tests by name, and the list of those that must be there, which `python -m tests.base.names` brings up to date.

A test that goes missing, as in a merge, fails nothing by itself; but it is on the list, and `test_names.py` misses it.
A test that is not yet on the list fails nothing either; the summary of a run counts them.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).parent.parent
LIST = TESTS / "names.txt"
COMMAND = "python -m tests.base.names"


def tests_in(path: Path) -> list[str]:
    """The names of the test functions of a file."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions)]
    return [name for name in found if name.startswith("test_")]


def collected(tests: Path = TESTS) -> dict[str, list[str]]:
    """The names of the tests of every test file below a folder."""
    return {path.relative_to(tests).as_posix(): tests_in(path) for path in sorted(tests.rglob("test_*.py"))}


def listed(path: Path = LIST) -> set[str]:
    """The tests on the list, as `file::test`."""
    return set(path.read_text().split())


def of(found: dict[str, list[str]]) -> set[str]:
    """The tests that were found, as `file::test`."""
    return {f"{file}::{name}" for file, names in found.items() for name in names}


def empty_files(found: dict[str, list[str]]) -> list[str]:
    """The test files without a test."""
    return [file for file, names in found.items() if not names]


def twice(found: dict[str, list[str]]) -> list[str]:
    """Tests whose name a later one of the same file takes: Python forgets them."""
    return sorted({f"{file}::{name}" for file, names in found.items() for name in names if names.count(name) > 1})


def unlisted() -> list[str]:
    """The tests that are not yet on the list."""
    return sorted(of(collected()) - listed())


def refresh(tests: Path = TESTS, path: Path = LIST) -> list[str]:
    """Write the list, and return what has changed: + for tests that are new on it, - for those that no longer are."""
    before, now = listed(path) if path.exists() else set(), of(collected(tests))
    path.write_text("".join(f"{name}\n" for name in sorted(now)))
    return [f"+ {name}" for name in sorted(now - before)] + [f"- {name}" for name in sorted(before - now)]


if __name__ == "__main__":
    print("\n".join(refresh()))
