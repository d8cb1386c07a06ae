"""Every estimator has a page under `docs/estimators/`, and the pages are what `python -m benchmarks.pages` writes."""

import re

import pytest

from benchmarks import page_text
from benchmarks.pages import RESULTS, joined, page, read
from streamgrad.estimators import REGISTRY


def test_every_row_has_a_page():
    there = {path.stem for path in page_text.FOLDER.glob("*.md")} - {"README"}
    missing, gone = sorted(set(REGISTRY) - there), sorted(there - set(REGISTRY))
    assert not missing, f"{missing} have no page: run `python -m benchmarks.pages --only {' '.join(missing)}`."
    assert not gone, f"{gone} are estimators no more: run `python -m benchmarks.pages --write-only`."


def test_every_row_was_measured():
    """On every network, with its default options and, on the first, with its variants."""
    found = {(one["cell"], one["estimator"]): 0 for one in read(RESULTS)}
    for one in read(RESULTS):
        found[one["cell"], one["estimator"]] += 1
    for cell in page().cells:
        for row in REGISTRY.values():
            want = 1 + (len(row.variants) if cell == page().cells[0] else 0)
            assert found.get((cell, row.name)) == want, f"run `python -m benchmarks.pages --only {row.name}`."


def test_pages_are_what_the_generator_writes():
    texts = page_text.pages(read(RESULTS), page())
    for name, text in texts.items():
        there = page_text.FOLDER / name
        assert there.exists(), f"there is no page {name}: run `python -m benchmarks.pages --write-only`."
        assert there.read_text() == text, f"{name} is out of date: run `python -m benchmarks.pages --write-only`."


def test_a_new_row_is_asked_for(monkeypatch):
    """The sentence names the row and the command."""
    row = REGISTRY["rtrl"]._replace(name="new")
    monkeypatch.setattr(page_text, "REGISTRY", {**REGISTRY, "new": row})
    with pytest.raises(ValueError, match=re.escape("run `python -m benchmarks.pages --only new`.")):
        page_text.pages(read(RESULTS), page())


def test_measured_again_in_part():
    """New numbers take the place of old ones, in the registry's order, and estimators that are no more go."""
    old = [{"cell": "vanilla", "estimator": name, "x": "old"} for name in ("bptt", "rtrl", "no_more", "uoro")]
    new = [{"cell": "vanilla", "estimator": "rtrl", "x": "new"}]
    got = [(row["estimator"], row["x"]) for row in joined(old, new)]
    assert got == [("bptt", "old"), ("rtrl", "new"), ("uoro", "old")]


def test_what_a_network_refuses_is_said():
    measured = [dict(row) for row in read(RESULTS) if row["estimator"] == "rtrl"]
    measured[-1] |= dict.fromkeys(("squared_error", "samples", "cosine", "times_bptt", "state_bytes"), "")
    measured[-1]["refused"] = "it needs a leak."
    text = page_text.page_of(REGISTRY["rtrl"], measured, page())
    assert "| LSTM of 16 | default | refused: it needs a leak. |" in text
    others = [row for row in read(RESULTS) if row["estimator"] != "rtrl"]
    assert "| refused |" in page_text.pages([*measured, *others], page())["README.md"]


DOC = """One line (Section 1).

    a = b
      + c

As `rtrl` does, in
two lines.

Args:
  model: the model.
  rank: how many; of
    several lines: with a colon.

Returns:
  The estimator.

Example:
  >>> def f(x):
  ...     return x
  >>> f(1)
  1

References:
  Someone, A title that goes on,
  2019.
  Another, Title, 2020 (for `rank`).
"""


def test_docstring_becomes_markdown():
    text = page_text.sections(DOC)
    body = "One line (Section 1).\n\n```text\na = b\n  + c\n```\n\nAs [`rtrl`](rtrl.md) does, in two lines."
    assert page_text.paragraphs(text["body"], "uoro") == body
    listed = "- `model`: the model.\n- `rank`: how many; of several lines: with a colon."
    assert page_text.arguments(text["Args"], "uoro") == listed
    assert page_text.example(text["Example"]) == "```python\ndef f(x):\n    return x\nf(1)\n# 1\n```"
    cited = "- Someone, A title that goes on, 2019.\n- Another, Title, 2020 (for `rank`)."
    assert page_text.references(text["References"]) == cited
