"""The tables by kind of model: README, the site's home and the page of results say what the results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kinds
from tests.processes import ROOT


def test_the_page_is_what_its_results_give() -> None:
    assert (kinds.RESULTS / "kinds.md").read_text(encoding="utf-8") == kinds.document(), (
        "run python -m benchmarks.kinds"
    )


def test_readme_and_home_show_these_tables() -> None:
    curves, programs = map("\n".join, kinds.tables())
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert curves in (ROOT / "README.md").read_text(encoding="utf-8")
    assert curves in home
    assert programs in home


def test_points_without_the_bits_of_plain_training_count_for_nothing() -> None:
    point = {"method": "ours", "peak": 0.5, "time": 1.04, "same_bits": True}
    rows = {name: {"points": [point]} for names in kinds.CURVES.values() for name in names}
    rows["vit"] = {"points": [{**point, "same_bits": False}, {**point, "time": 1.08, "peak": 0.6}]}
    lines = kinds.curve_table(rows, dict.fromkeys(rows, 7.2))
    assert "| language | 50 % | 50 % | 50 % | 7 steps |" in lines
    assert "| vision, attention | 0 to 50 % | 40 to 50 % | 40 to 50 % | 7 steps |" in lines


def test_every_program_of_a_file_is_found() -> None:
    assert {"schnet_energies", "gcn_cora"} <= set(kinds.programs_of("graphs"))


def test_the_picture_shows_each_panel(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import json

    rows = json.loads((kinds.RESULTS / "frontier_cpu.json").read_text(encoding="utf-8"))
    kinds.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000
