"""No test is lost: no test file is empty, no test of the list is missing, none is hidden by another of its name."""

from tests.base import names


def test_no_test_file_is_empty():
    found = names.empty_files(names.collected())
    assert not found, f"{', '.join(found)} in tests/ without a test: were they lost in a merge?"


def test_no_test_is_missing():
    missing = sorted(names.listed() - names.of(names.collected()))
    assert not missing, (
        f"tests are missing that were there: {', '.join(missing)}. Restore them; or, if they were renamed or left out "
        f"on purpose, `{names.COMMAND}` brings tests/names.txt up to date."
    )


def test_no_test_is_hidden_by_another():
    found = names.twice(names.collected())
    assert not found, f"{', '.join(found)}: a later test of the same name takes their place."


def test_what_is_found(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "test_a.py").write_text("def test_one():\n    def test_inner(): ...\n\n\ndef helper(): ...\n")
    (tmp_path / "test_b.py").write_text('"""Nothing but words."""\n')
    found = names.collected(tmp_path)
    assert found == {"room/test_a.py": ["test_one"], "test_b.py": []}
    assert names.empty_files(found) == ["test_b.py"] and names.twice(found) == []
    path = tmp_path / "names.txt"
    path.write_text("room/test_a.py::test_gone\n")
    assert names.refresh(tmp_path, path) == ["+ room/test_a.py::test_one", "- room/test_a.py::test_gone"]
    assert names.listed(path) == names.of(found) == {"room/test_a.py::test_one"}
    (tmp_path / "test_b.py").write_text("def test_two(): ...\n\n\ndef test_two(): ...\n")
    assert names.twice(names.collected(tmp_path)) == ["test_b.py::test_two"]
