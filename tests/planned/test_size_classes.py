"""Classes of sizes: only what differs from call to call is rounded, and never beyond the largest that has come."""

from __future__ import annotations

from typing import Any

import torch

from lightning_rotor.planned.signature import Signature
from lightning_rotor.planned.size_classes import SizeClasses, moved, with_sizes
from tests.planned.joint_steps import Recording

CUT: Any = Recording(2)


def signature(*shapes: tuple[int, ...], cut: Any = CUT) -> Signature:
    kinds = ((torch.float32, torch.device("cpu"), False),) * len(shapes)
    return Signature(shapes, kinds, cut, (), ((), ()))


def classes(*seen: Signature) -> SizeClasses:
    known = SizeClasses()
    for each in seen:
        known.note(each)
    return known


def test_a_size_that_is_always_the_same_stays_what_it_is() -> None:
    known = classes(signature((8, 77)), signature((8, 77)))
    assert known.of(signature((8, 77))) == signature((8, 77))
    assert known.of(signature((8, 50))) == signature((8, 50))  # nothing has differed yet
    assert SizeClasses().of(signature((8, 77))) == signature((8, 77))


def test_sizes_that_differ_are_rounded_up_to_a_class_alone() -> None:
    known = classes(signature((6, 77)), signature((6, 300)), signature((6, 40)))
    (rows, length) = known.of(signature((6, 80))).shapes[0]
    assert rows == 6
    assert 80 <= length <= 1.1 * 80
    assert known.of(signature((6, length))) == signature((6, length))
    assert known.of(signature((6, length - 1))) == signature((6, length))


def test_no_class_reaches_beyond_the_largest_size_that_has_come() -> None:
    known = classes(signature((6, 64)), signature((6, 97)))
    assert known.of(signature((6, 95))).shapes == ((6, 97),)
    assert known.of(signature((6, 97))).shapes == ((6, 97),)
    # One that is expected of a later call may be larger.
    (_, expected) = known.of(signature((6, 100))).shapes[0]
    assert 100 < expected <= 110


def test_what_is_empty_or_alone_is_a_class_of_its_own() -> None:
    known = classes(signature((0, 1)), signature((5, 9)))
    assert known.of(signature((0, 1))).shapes == ((0, 1),)


def test_families_have_classes_of_their_own_and_those_noted_first_are_forgotten(monkeypatch: Any) -> None:
    monkeypatch.setattr("lightning_rotor.planned.size_classes._MOST_FAMILIES", 1)
    known = classes(signature((64,)), signature((97,)))
    assert known.of(signature((95,))).shapes == ((97,),)
    known.note(signature((3, 3)))
    assert known.of(signature((95,))).shapes == ((95,),)


def test_sizes_go_to_the_dimensions_in_their_order() -> None:
    several = signature((2, 3), (), (4,))
    assert with_sizes(several, [5, 6, 7]).shapes == ((5, 6), (), (7,))
    assert with_sizes(several, [2, 3, 4]) is several


def test_sizes_in_common_change_alike() -> None:
    before, now = signature((8, 60), (60, 3)), signature((8, 75), (75, 3))
    assert moved(signature((60, 60, 8, 5)), before, now).shapes == ((75, 75, 8, 5),)
    # Other dimensions tell nothing.
    assert moved(signature((60,)), before, signature((75,))).shapes == ((60,),)
