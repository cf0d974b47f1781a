"""Ways to keep a stage, each a share of what torch would save of the whole graph."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rotor.compiling import stage_options
from lightning_rotor.compiling.joint_graph import Stages
from lightning_rotor.compiling.stage_options import options_of
from tests.compiling.joint_graphs import Residual, looked_at, perceptron


def summary(stages: Stages) -> list[list[tuple[str, int, bool, bool]]]:
    options = []
    for number, alternatives in enumerate(options_of(stages)):
        assert all(option.saved <= set(stages.nodes[number]) for option in alternatives)
        assert all(not option.saved & option.again for option in alternatives)
        options.append(
            [(option.name, len(option.saved), option.needs_input, option.needs_output) for option in alternatives]
        )
    return options


def test_each_stage_is_kept_first_and_no_option_comes_twice() -> None:
    for alternatives in looked_at(Residual(), summary):
        assert alternatives[0][0] == "keep"
        assert len({option[1:] for option in alternatives}) == len(alternatives)


def test_a_stage_needs_what_its_backward_reads() -> None:
    first, activation, linear, *_ = (alternatives[0] for alternatives in looked_at(perceptron(), summary))
    assert first == ("keep", 0, False, False)  # its input is that of the graph
    assert activation == ("keep", 0, True, False)
    assert linear == ("keep", 0, True, False)


def test_without_other_budgets_there_is_torchs_own_way_alone() -> None:
    def look(stages: Stages) -> list[int]:
        return [len(alternatives) for alternatives in options_of(stages, budgets=(1.0,))]

    assert looked_at(perceptron(), look) == [1] * 6


def test_a_budget_that_torch_cannot_solve_for_is_left_out_but_not_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = stage_options.chosen_by_torch

    def refusing(joint: Any, parts: Any, budget: float) -> Any:
        if budget in refused:
            raise RuntimeError("no solution")
        return chosen(joint, parts, budget)

    monkeypatch.setattr(stage_options, "chosen_by_torch", refusing)
    refused = [0.3, 0.6]
    assert all(len(alternatives) == 1 for alternatives in looked_at(perceptron(), summary))
    refused = [1.0]
    with pytest.raises(Exception, match="no solution"):
        looked_at(perceptron(), summary)
