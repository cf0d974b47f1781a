"""Operations of a graph as Python functions."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.graph_stage import Ref, Step, function_of


def call(target: Any, *args: Any, frees: tuple[int, ...] = (), **kwargs: Any) -> Step:
    return Step("call_function", target, args, kwargs, frees)


def test_arguments_of_every_kind_arrive_as_they_were_written() -> None:
    nan, seen = float("nan"), []

    def note(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    args = (
        Ref(0),
        (1,),
        [Ref(1), -2],
        {"k": Ref(0), 3: None},
        slice(None, Ref(1), 2),
        ...,
        nan,
        True,
        "a'\n",
        torch.float16,
        (),
    )
    run = function_of(2, [call(note, *args, **{"from": Ref(1), "not a name": ()})], (Ref(1), [Ref(0)]))
    given = object(), 7
    for _ in range(2):
        assert run(given) == (7, [given[0]])
    received = (
        given[0],
        (1,),
        [7, -2],
        {"k": given[0], 3: None},
        slice(None, 7, 2),
        ...,
        nan,
        True,
        "a'\n",
        torch.float16,
        (),
    )
    assert seen == [(received, {"from": 7, "not a name": ()})] * 2
    # Callees may change the lists and dicts that they are given.
    assert seen[0][0][2] is not seen[1][0][2]
    assert seen[0][0][3] is not seen[1][0][3]


def test_values_live_as_long_as_in_the_users_code() -> None:
    alive: list[bool] = []

    def look(*values: torch.Tensor) -> torch.Tensor:
        alive.append(made() is not None)
        return values[0] * 1

    def make(value: torch.Tensor) -> torch.Tensor:
        nonlocal made
        result = value + 1
        made = weakref.ref(result)
        return result

    made: Any = lambda: None  # noqa: E731
    steps = [call(make, Ref(0)), call(look, Ref(1), frees=(1,)), call(look, Ref(2), frees=(0, 2))]
    assert function_of(1, steps, Ref(3))(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert alive == [True, False]


def test_what_is_read_is_looked_up_at_each_call_and_equal_operations_share_their_code() -> None:
    layers = nn.Linear(2, 2), nn.Linear(2, 2)

    def run_of(layer: nn.Linear) -> Any:
        steps = [
            Step("read", (layer, "weight"), (), {}, ()),
            Step("call_module", layer, (Ref(0),), {}, (0,)),
            Step("call_method", "add", (Ref(2), Ref(1)), {"alpha": 2}, (1, 2)),
        ]
        return function_of(1, steps, Ref(3))

    first, second = map(run_of, layers)
    assert first.__code__ is second.__code__
    for _ in range(2):
        for run, layer in zip((first, second), layers, strict=True):
            assert torch.equal(run(torch.eye(2)), layer(torch.eye(2)) + 2 * layer.weight)
            layer.weight = nn.Parameter(torch.randn(2, 2))
