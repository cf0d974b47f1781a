"""Files of plans: read as they were written, and refused with the first difference."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_rotor.errors import PlanError
from lightning_rotor.planning.plan_file import (
    check_chain,
    content_of,
    damage_as_plan_errors,
    read,
    whole_number,
    with_tuples,
    write,
)
from tests.strategies import random_chain

CHAIN = random_chain(random.Random(2), 3, "cnn")


def test_content_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write(path, content_of(CHAIN, {"budget_bytes": 7}))
    content = read(path)
    assert (content["format"], content["budget_bytes"], content["fingerprint"]) == (1, 7, CHAIN.fingerprint)
    check_chain(path, content, CHAIN)
    write(path, {"link": None})
    assert read(path)["format"] == 2


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": 99}')
    with pytest.raises(PlanError, match=r"plan\.json has format 99: expected 1 or 2"):
        read(path)


def test_the_first_difference_is_named() -> None:
    content = content_of(CHAIN, {})
    longer = replace(CHAIN, stages=(*CHAIN.stages, replace(CHAIN.stages[-1], name="more")))
    with pytest.raises(PlanError, match="stage 3 was no such stage of 3, and is 'more' of 4"):
        check_chain("the plan", content, longer)
    with pytest.raises(PlanError, match=r"device '\w+', and this chain was measured on 'cuda'"):
        check_chain("the plan", content, replace(CHAIN, device="cuda"))


def test_numbers_out_of_files_are_checked() -> None:
    assert whole_number({"size": 3}, "size") == 3
    for wrong in (True, -1, 1.0, "3", 2**63):
        with pytest.raises(ValueError, match=r"size is .* expected a whole number of at most 63 bits"):
            whole_number({"size": wrong}, "size")
    assert with_tuples({"a": [1, [2]]}) == {"a": (1, (2,))}
    with pytest.raises(PlanError, match=r"x holds no plan \(KeyError: 'size'\)"), damage_as_plan_errors("x"):
        whole_number({}, "size")
