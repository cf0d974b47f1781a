"""Results in notebooks: a picture above the tables, and the tables where there is no matplotlib."""

from __future__ import annotations

import sys
from html import escape
from typing import Any

import pytest

from lightning_rotor.chain import Chain
from lightning_rotor.planning import Frontier, frontier
from lightning_rotor.report.notebooks import chain_html, plan_html
from tests.report.small_plans import CHAIN, KEEP_ALL, plan_for


@pytest.mark.parametrize(
    "shown", [CHAIN, KEEP_ALL, frontier(CHAIN), plan_for("(0-2) (3-5) 6-7")], ids=lambda shown: type(shown).__name__
)
def test_what_python_shows_of_it_is_one_line(shown: object) -> None:
    assert repr(shown).startswith(f"<{type(shown).__name__} of ")
    assert len(repr(shown)) < 200


@pytest.mark.parametrize(
    "shown", [CHAIN, frontier(CHAIN), plan_for("(0-2) (3-5) 6-7")], ids=lambda shown: type(shown).__name__
)
def test_notebooks_show_a_picture_and_a_table(shown: Any) -> None:
    html = shown._repr_html_()
    assert html.count("<svg") == html.count("</svg>") == 1
    if not isinstance(shown, Chain):
        assert escape(str(shown)) in html
    assert "layer0" in html or isinstance(shown, Frontier)


def test_notebooks_without_matplotlib_show_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    html = frontier(CHAIN)._repr_html_()  # type: ignore[attr-defined]
    assert html.startswith("<pre")


def test_html_is_that_of_the_registered_functions() -> None:
    plan = plan_for("(0-2) 3-7")
    assert chain_html(CHAIN) == CHAIN._repr_html_()  # type: ignore[attr-defined]
    # Without the header of a file, which HTML does not want.
    assert plan_html(plan).startswith("<svg")
