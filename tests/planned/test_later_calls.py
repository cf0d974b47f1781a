"""Calls that are expected behind one that begins."""

from __future__ import annotations

from typing import Any

from lightning_rotor.planned.joint_paths import Path
from lightning_rotor.planned.later_calls import CallOrder, later_calls
from lightning_rotor.planning import scheduled
from lightning_rotor.planning.joint_chain import StepPlan, joined
from lightning_rotor.schedule import Schedule
from tests.planned.joint_steps import Module, path


def plan_of(planned: Path) -> StepPlan:
    modules: list[Any] = [key.plans for key in planned]
    chains = [module.chain_of(key.signature) for module, key in zip(modules, planned, strict=True)]
    names = [key.name for key in planned]
    chain = joined(names, chains)
    return StepPlan.of(scheduled(chain, Schedule.keep_all(len(chain))), names, chains)


def plans_of(*paths: Path) -> dict[Path, StepPlan]:
    return {planned: plan_of(planned) for planned in paths}


def test_a_module_is_left_out_if_a_step_has_called_another_one_without_it() -> None:
    order = CallOrder()
    order.note(["a", "b"])
    assert not order.is_left_out("a", "b")
    order.note(["b"])
    assert order.is_left_out("a", "b")
    order.note(["b", "a"])  # it has come behind the other one
    assert not order.is_left_out("a", "b")
    assert not order.is_left_out("b", "a")


def test_what_came_before_in_other_steps_and_did_not_in_this_one_may_still_come() -> None:
    order = CallOrder()
    order.note(["a", "b", "c"])
    assert order.may_still_come("c", ("a",), ["a", "b"]) == [1]
    assert order.may_still_come("c", ("a", "b"), ["a", "b"]) == []
    assert order.may_still_come("c", ("a",), ["a", "a"]) == [1]  # called twice there, and once here
    order.note(["c"])
    assert order.may_still_come("c", (), ["a", "b"]) == []


def test_later_calls_are_those_of_a_path_like_this_step_with_sizes_moved_as_that_of_the_call_that_begins() -> None:
    image, text, head = (Module(name) for name in ("image", "text", "head"))
    planned = plans_of(path(image, text, head, rows=8))
    key = text.key(12, ("image",))
    (later,) = later_calls(key, planned, CallOrder())
    assert later.name == "head"
    assert later.signature == head.signature(12)
    assert later.turn == ("image", "text")
    assert later.entry() is not None


def test_a_call_that_was_passed_over_is_expected_behind_until_a_step_has_left_it_out() -> None:
    image, text, head = (Module(name) for name in ("image", "text", "head"))
    planned = plans_of(path(image, text, head))
    order = CallOrder()
    order.note(["image", "text", "head"])
    key = text.key(8, ())  # without the image
    assert [later.name for later in later_calls(key, planned, order)] == ["head", "image"]
    order.note(["text", "head"])
    assert [later.name for later in later_calls(key, planned, order)] == ["head"]


def test_the_list_ends_before_a_call_whose_costs_nobody_knows() -> None:
    image, text, head = (Module(name) for name in ("image", "text", "head"))
    planned = plans_of(path(image, text, head))
    text.knows_costs = False
    assert later_calls(image.key(12), planned, CallOrder()) == []


def test_the_second_call_of_a_module_is_followed_by_what_follows_the_second() -> None:
    net, head = Module("net"), Module("head")
    planned = plans_of(path(net, net, head))
    assert [later.name for later in later_calls(net.key(8), planned, CallOrder())] == ["net", "head"]
    assert [later.name for later in later_calls(net.key(8, ("net",)), planned, CallOrder())] == ["head"]


def test_of_paths_that_are_as_like_the_one_that_needs_most_counts_and_of_the_same_turn_goes_before() -> None:
    net, small, large = Module("net"), Module("small"), Module("large", stages=8)
    planned = plans_of(path(net, small), path(net, large))
    assert [later.name for later in later_calls(net.key(8), planned, CallOrder())] == ["large"]
    other_turn = plans_of(path(small, net, large), path(net, small))
    assert [later.name for later in later_calls(net.key(8), other_turn, CallOrder())] == ["small"]


def test_a_module_that_no_path_has_called_comes_behind_the_calls_that_wait() -> None:
    image, head, new = Module("image"), Module("head"), Module("new")
    planned = plans_of(path(image, head))
    assert [later.name for later in later_calls(new.key(8, ("image",)), planned, CallOrder())] == ["head"]
    assert later_calls(new.key(8, ("image",)), {}, CallOrder()) == []
