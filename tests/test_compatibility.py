"""The figures of docs/compatibility.md: what a report says of each test, and where it is counted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compatibility import ROOT, TORCHS, by_row, document, outcomes, rows

_REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_callback" name="test_some[1]"/>
<testcase classname="tests.test_callback" name="test_other"><failure message="AssertionError: why&#10;more">trace</failure></testcase>
<testcase classname="tests.test_lightning_loggers" name="test_csv"><skipped message="no CSV"/></testcase>
<testcase classname="tests.test_lightning_loggers" name="test_nothing_of_the_kind"/>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    return by_row(outcomes(_REPORT))


def test_tests_are_counted_in_their_rows(counted: dict[str, Any]) -> None:
    assert counted["callback"] == {"passed": 1, "others": [["failed: test_other", "AssertionError: why"]]}
    assert counted["loggers"] == {"passed": 0, "others": [["skipped: test_csv", "no CSV"]]}
    assert counted["pipeline"] == {"passed": 0, "others": []}


def test_every_row_has_tests_that_exist() -> None:
    for row, tests in rows().items():
        assert tests, row
        assert all((ROOT / test.split("::")[0]).exists() for test in tests), row


def test_a_document_names_what_did_not_pass(counted: dict[str, Any]) -> None:
    core = {
        "rows": counted,
        "demo": "same weights",
        "python": "3.11",
        "lightning": "2.6",
        "minutes": 5,
    }
    text = document({"torch": {TORCHS[0]: core}, "instructions": {}})
    assert "| callback | **1 of 2** | not run | not run | not run |" in text
    assert f"- torch {TORCHS[0]}, callback: **failed**: test_other (AssertionError: why)" in text
