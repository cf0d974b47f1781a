"""Values of a chain by number, skips among them, and what is known of layers."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from lightning_rotor import skippable
from lightning_rotor.skip import pop, stash
from lightning_rotor.stages.known_layers import (
    does_more_than_forward,
    has_own_code,
    is_plain_stock,
    runs_members_in_a_row,
)
from lightning_rotor.stages.other_threads import leaving_alone, left_alone, others_may_draw
from lightning_rotor.stages.threaded_skips import ThreadedLayer, thread_skips
from lightning_rotor.stages.wiring import Wire, Wiring, packed, unpacked


def test_a_row_hands_one_value_on() -> None:
    wiring = Wiring.of([Wire((0,), (1,)), Wire((1,), (2,))], [2])
    assert wiring.wire == Wire((0,), (2,))
    assert wiring.dead == ((), (1,))
    assert wiring.run(3, [lambda value: value + 1, lambda value: value * 2]) == 8


def test_values_go_where_they_are_read_and_die_after_it() -> None:
    steps = [Wire((0,), (1, 2)), Wire((1, 5), (3,)), Wire((2, 3), (4,))]
    wiring = Wiring.of(steps, [4, 1])
    assert wiring.wire == Wire((0, 5), (1, 4))
    assert wiring.dead == ((), (), (2, 3))
    received: list[object] = []

    def last(values: object) -> str:
        received.append(values)
        return "end"

    assert wiring.run(("a", "b"), [lambda value: (value + "1", value + "2"), "".join, last]) == ("a1", "end")
    assert received == [("a2", "a1b")]


def test_a_value_that_nobody_reads_dies_where_it_is_made() -> None:
    assert Wiring.of([Wire((0,), (1, 2))], [1]).dead == ((2,),)


def test_one_value_is_itself_and_several_a_tuple() -> None:
    assert packed(["a"]) == "a"
    assert packed(["a", "b"]) == ("a", "b")
    assert unpacked("a", 1) == ("a",)
    assert unpacked(("a", "b"), 2) == ("a", "b")


@skippable(stash=["kept"])
class Keeps(nn.Module):
    """Stashes its input."""

    def forward(self, x):  # type: ignore[no-untyped-def]
        yield stash("kept", x)
        return x + 1


@skippable(pop=["kept"])
class Adds(nn.Module):
    """Adds what was stashed."""

    def forward(self, x):  # type: ignore[no-untyped-def]
        kept = yield pop("kept")
        return x + kept


def test_skips_are_values_behind_those_of_the_layers() -> None:
    layers = [("0", Keeps()), ("1", nn.ReLU()), ("2", Adds())]
    threaded = thread_skips(layers)
    assert [wire for _, wire in threaded] == [Wire((0,), (1, 4)), Wire((1,), (2,)), Wire((2, 4), (3,))]
    assert isinstance(threaded[0][0], ThreadedLayer)
    assert threaded[1][0] is layers[1][1]
    output, kept = threaded[0][0](torch.ones(2))
    assert torch.equal(threaded[2][0]((output, kept)), torch.full((2,), 3.0))


def test_layers_of_torch_without_anything_around_are_known() -> None:
    layer = nn.Linear(2, 2)
    assert is_plain_stock(layer)
    assert not has_own_code(layer)
    assert not does_more_than_forward(layer)
    layer.register_forward_hook(print)
    assert not is_plain_stock(layer)
    assert does_more_than_forward(layer)

    class Own(nn.Linear):
        pass

    assert has_own_code(Own(2, 2))
    assert not is_plain_stock(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))


def test_an_sequential_with_a_forward_of_its_own_is_no_row() -> None:
    class Backwards(nn.Sequential):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value

    assert runs_members_in_a_row(nn.Sequential())
    assert not runs_members_in_a_row(Backwards())


def test_kinds_of_generators_are_left_alone_in_this_thread() -> None:
    with leaving_alone(["a"]), leaving_alone(["b"]):
        assert left_alone() == {"a", "b"}
        seen: list[frozenset[str]] = []
        thread = threading.Thread(target=lambda: seen.append(left_alone()))
        thread.start()
        thread.join()
        assert seen == [frozenset()]
    assert left_alone() == frozenset()


def test_another_thread_may_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rotor.private.torch_names.threads", lambda: 1)
    assert not others_may_draw()
    monkeypatch.setattr("lightning_rotor.private.torch_names.threads", lambda: 2)
    assert others_may_draw()
