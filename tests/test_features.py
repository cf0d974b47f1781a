"""The table of features is what the tests say."""

from __future__ import annotations

from pathlib import Path

from tests.features import TABLE, Feature, FeatureResults, declared_features, feature_table, listed_features

_TEST = """
@pytest.mark.feature("Tools", "a clock", note="in UTC")
def test_time(): ...

@pytest.mark.parametrize("form", [pytest.param("a", marks=pytest.mark.feature("Forms", "a")), "b"])
def test_forms(form): ...
"""


def _without_notes(features: list[Feature]) -> set[tuple[str, str, str, str]]:
    return {(feature.group, feature.name, feature.file, feature.test) for feature in features}


def test_the_table_lists_exactly_the_tests_that_show_a_feature() -> None:
    declared = declared_features()
    assert len(declared) > 10
    listed = listed_features(TABLE.read_text(encoding="utf-8"))
    assert _without_notes(listed) == _without_notes(declared), "run 'make features'"


def test_no_feature_stands_there_twice() -> None:
    rows = [(feature.group, feature.name) for feature in declared_features()]
    assert len(rows) == len(set(rows))


def test_marks_are_read_from_sources(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_TEST)
    assert declared_features(tmp_path) == [
        Feature("Tools", "a clock", "test_some.py", "test_time", "in UTC"),
        Feature("Forms", "a", "test_some.py", "test_forms"),
    ]


def test_tests_in_folders_are_rows_as_well(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "test_some.py").write_text(_TEST)
    features = declared_features(tmp_path)
    assert [feature.file for feature in features] == ["training/test_some.py"] * 2
    text = feature_table(features, {})
    assert "[`test_forms`](../tests/training/test_some.py) |" in text
    assert _without_notes(listed_features(text)) == _without_notes(features)


def test_a_table_says_what_came_of_each_feature(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_TEST)
    features = declared_features(tmp_path)
    text = feature_table(features, {("Tools", "a clock"): "yes"})
    assert "| a clock<br>*in UTC* | yes | [`test_time`](../tests/test_some.py) |" in text
    assert "| a | not run | [`test_forms`](../tests/test_some.py) |" in text
    assert _without_notes(listed_features(text)) == _without_notes(features)


class _Report:
    def __init__(self, outcome: str, reason: str = "", *, simulated: bool = False) -> None:
        self.outcome, self.when = outcome, "call"
        self.longrepr = ("file", 1, f"Skipped: {reason}")
        self.user_properties = [("feature", ["Tools", "a clock"]), *([("simulated", True)] if simulated else [])]


def test_a_feature_works_if_all_its_tests_pass(tmp_path: Path) -> None:
    def verdict(*reports: _Report) -> str:
        collected = FeatureResults(tmp_path / "table.md")
        for report in reports:
            collected.pytest_runtest_logreport(report)
        return collected.results["Tools", "a clock"]

    assert verdict(_Report("passed"), _Report("passed")) == "yes"
    assert verdict(_Report("passed"), _Report("failed")) == "**no**"
    assert verdict(_Report("passed", simulated=True)) == "on a simulated device"
    assert verdict(_Report("skipped", "needs a CUDA device")) == "not run: needs a CUDA device"
