"""A renamed public name works for one more version and says its new name; one that cannot work says it as an error."""

import pytest

import streamgrad as sg
from streamgrad.deprecations import RENAMED
from streamgrad.estimators import find_estimator
from tests.tools import ROOT

WORKING = {old: row for old, row in RENAMED.items() if row.value}
GONE = {old: row for old, row in RENAMED.items() if not row.value}


@pytest.mark.parametrize("old", WORKING)
def test_an_old_name_works_and_says_the_new_one(old):
    with pytest.warns(DeprecationWarning, match=f"streamgrad.{old} is now") as caught:
        assert getattr(sg, old) is getattr(sg, WORKING[old].value)
    assert WORKING[old].new in str(caught[0].message)


@pytest.mark.parametrize("old", GONE)
def test_a_name_that_is_gone_says_the_new_one(old):
    with pytest.raises(AttributeError, match=f"streamgrad.{old} is gone since version") as error:
        getattr(sg, old)
    assert GONE[old].new in str(error.value)


def test_an_old_name_of_the_registry():
    with pytest.warns(DeprecationWarning, match="windowed_bptt"):
        assert find_estimator("tbptt").make is sg.windowed_bptt


def test_no_old_name_is_in_use():
    assert not set(RENAMED) & set(sg.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sg.nothing


def test_every_renamed_name_is_in_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text()
    missing = [old for old in RENAMED if f"`{old}`" not in text and f"`streamgrad.{old}`" not in text]
    assert not missing and f"## {sg.__version__}" in text


def test_a_name_that_is_no_estimator_is_not_renamed_in_the_registry():
    with pytest.raises(ValueError, match=r"estimator must be one of .*not 'variance'"):
        find_estimator("variance")
