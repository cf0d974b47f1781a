"""Names of stages where room is short."""

from __future__ import annotations

import pytest

from lightning_rotor.report.stage_names import from_to, shortened, times


@pytest.mark.parametrize(
    ("first", "last", "name"),
    [
        ("a.b.c", "a.b.c", "a.b.c"),
        # Of the second name only what is not around the first one.
        ("a.b.c", "a.b.d", "a.b.c … d"),
        ("a.b.c", "a.e", "a.b.c … e"),
        ("a.b", "a.b.c", "a.b … b.c"),
        ("a", "b.c", "a … b.c"),
        # Stages that were merged are named like runs of them.
        ("a.0 … 2", "a.3 … 5", "a.0 … 5"),
        ("a.0 … 2", "a.0 … 2", "a.0 … 2"),
    ],
)
def test_a_run_is_named_by_its_ends(first: str, last: str, name: str) -> None:
    assert from_to(first, last, str) == name


def test_both_ends_are_shortened() -> None:
    assert from_to("a.bcd", "a.efg", lambda name: name[:3]) == "a.b … efg"


@pytest.mark.parametrize("most", [5, 12, 30])
def test_a_long_name_loses_its_middle(most: int) -> None:
    name = "encoder.layers.11.attention.self.query.lora_A.default"
    short = shortened(name, most)
    head, _, tail = short.partition("…")
    assert len(short) == most
    assert name.startswith(head)
    assert name.endswith(tail)
    # The end tells most.
    assert len(tail) > len(head)
    assert shortened(name[:most], most) == name[:most]


def test_counts_are_words() -> None:
    assert [times(count) for count in (1, 2, 3)] == ["once", "twice", "3 times"]
