"""A recording holds for calls like the recorded one, and for no others."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import fx, nn

from lightning_rotor import Checkpointable
from lightning_rotor.capture.ambient import ambient
from lightning_rotor.capture.call import Call, firsts_of
from lightning_rotor.capture.guards import CallGuards
from lightning_rotor.capture.node_facts import SIZE
from lightning_rotor.capture.size_guards import SizeGuards
from lightning_rotor.capture.watch import Watch
from lightning_rotor.errors import ModelError


class Net(nn.Module):
    """Two inputs and a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, *, flag: bool = True) -> torch.Tensor:
        """The sum, or x."""
        return x if y is None or not flag else x + y


def guards_for(module: nn.Module, *args: Any, **kwargs: Any) -> CallGuards:
    """Guards as of a recording in which nobody asked for a size or a value."""
    call = Call.of(module, args, kwargs)
    graph = fx.Graph()
    inputs = [graph.placeholder(f"input_{number}") for number in range(len(call.inputs))]
    sizes = SizeGuards(call.signature, inputs, [], [])
    return CallGuards(call, Watch(module, [module]), sizes, reads=range(len(inputs)))


X, Y = torch.zeros(2, 3), torch.zeros(2, 3)


def test_a_call_like_the_recorded_one_is_bound_to_what_the_chain_takes() -> None:
    guards = guards_for(Net(), X, Y)
    other = torch.ones(2, 3), torch.ones(2, 3)
    bound = guards.bind(other, {})
    assert all(left is right for left, right in zip(bound, other, strict=True))
    assert guards_for(Net(), X).bind((other[0],), {}) is other[0]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, X), {}),
        ((X,), {}),
        ((X, Y), {"flag": False}),
        ((X, Y.double()), {}),
        ((X, Y[0]), {}),
        ((X, torch.zeros(3, 2).T), {}),
        ((X, Y.clone().requires_grad_()), {}),
        ((X, torch.zeros(2, 4)), {}),
    ],
    ids=["twice the same", "one input", "a plain argument", "type", "dimensions", "layout", "gradient", "size"],
)
def test_a_call_that_differs_in_what_code_can_tell_is_not_bound(args: Any, kwargs: Any) -> None:
    assert guards_for(Net(), X, Y).bind(args, kwargs) is None


def test_autocast_and_settings_of_the_module_count() -> None:
    net = Net()
    guards = guards_for(net, X)
    with torch.autocast("cpu", torch.bfloat16):
        assert guards.bind((X,), {}) is None
        assert guards_for(net, X).bind((X,), {}) is X
    assert guards.bind((X,), {}) is X
    net.scale = 3.0
    assert guards.bind((X,), {}) is None
    net.scale = 2.0
    assert guards.bind((X,), {}) is X
    net.eval()
    assert guards.bind((X,), {}) is None


def test_hooks_on_saved_tensors_are_none_of_a_recordings_business() -> None:
    before = ambient()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert ambient().hooks is not None
        assert ambient() != before
        assert ambient().without_hooks == before.without_hooks
        assert guards_for(Net(), X).bind((X,), {}) is X
    with torch.no_grad():
        assert ambient().without_hooks != before.without_hooks


def test_the_change_of_autocast_is_told_by_device() -> None:
    base = ambient()
    assert base.autocast_changes(base) == ()
    with torch.autocast("cpu", torch.float16):
        assert ambient().autocast_changes(base) == (("cpu", True, torch.float16),)


def test_an_argument_that_may_hide_tensors_is_refused_by_its_place() -> None:
    with pytest.raises(ModelError, match=r"takes object as 'y'\[1\]: expected tensors and plain values"):
        Call.of(Net(), (X, [1, object()]), {})


def test_an_argument_that_refuses_to_tell_its_class_is_refused_by_its_place() -> None:
    class Held:
        pass

    dead = weakref.proxy(Held())  # nobody else holds it
    with pytest.raises(ModelError, match=r"takes \w+ as 'y': expected tensors and plain values"):
        Call.of(Net(), (X, dead), {})
    with pytest.raises(ModelError, match=r"takes \w+ as 'y'"):
        Checkpointable(Net(), mem_limit="1MiB", show_progress=False)(X, dead)


def test_the_arguments_of_a_call_are_put_together_again() -> None:
    call = Call.of(Net(), (X, [Y, 1.5]), {"flag": False})
    assert call.names == ("input 'x'", "input 'y'[0]")
    args, kwargs = call.with_tensors(["first", "second"])
    assert (args, kwargs) == (("first", ["second", 1.5]), {"flag": False})


def test_nan_is_one_argument_and_minus_zero_another_than_zero() -> None:
    key = Call.of(Net(), (X, float("nan")), {}).key
    assert Call.of(Net(), (X, float("nan")), {}).key == key
    assert Call.of(Net(), (X, 0.0), {}).key != Call.of(Net(), (X, -0.0), {}).key
    assert Call.of(Net(), (X, 1), {}).key != Call.of(Net(), (X, True), {}).key


def test_values_that_are_one_object_are_told() -> None:
    assert firsts_of((X, Y, X, Y)) == (0, 1, 0, 1)


def questions(answers: dict[int, bool]) -> SizeGuards:
    """Guards of code that asked, for an input of each size, whether it has more than three rows."""
    guards = None
    for size, answer in answers.items():
        graph = fx.Graph()
        x = graph.placeholder("x")
        shape = graph.call_function(getattr, (x, "shape"))
        rows = graph.call_function(lambda sizes, place: sizes[place], (shape, 0))
        asked = graph.call_function(int.__gt__, (rows, 3))
        for node, value in ((shape, (size, 2)), (rows, size), (asked, answer)):
            node.meta.update({SIZE: value, "line": ("file.py", 7)})
        signature = (((size, 2), True),)
        newer = SizeGuards(signature, [x], [(asked, answer)], [])
        if guards is None:
            guards = newer
        else:
            guards._recorded += newer._recorded
            guards._read.update(newer._read)
    assert guards is not None
    return guards


def test_one_recording_holds_for_its_own_sizes_alone() -> None:
    guards = questions({5: True})
    assert guards.hold((((5, 2), True),), [torch.zeros(5, 2)])
    assert not guards.hold((((6, 2), True),), [torch.zeros(6, 2)])


def test_two_recordings_hold_for_sizes_that_answer_the_same() -> None:
    guards = questions({5: True, 7: True})
    assert guards.hold((((6, 2), True),), [torch.zeros(6, 2)])
    assert (((6, 2), True),) in guards.settled
    assert not guards.hold((((6, 3), True),), [torch.zeros(6, 3)])  # a dimension that was always 2
    assert not guards.hold((((3, 2), True),), [torch.zeros(3, 2)])
    assert guards.objection == "a size decides over what it does, at file.py:7"


def test_values_that_code_asked_for_are_asked_again() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_method("sum", (x,))
    asked = graph.call_function(bool, (total,))
    signature = (((2,), True),)
    guards = SizeGuards(signature, [x], [], [(asked, True)])
    assert guards.asks_values
    assert not guards.settled
    assert guards.hold(signature, [torch.ones(2)])
    assert not guards.hold(signature, [torch.zeros(2)])
