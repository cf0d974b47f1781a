"""Operations as nodes: their names, which arguments they have, and which no recording holds."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_rotor.capture.operations import (
    METADATA,
    UntraceableError,
    is_torchs,
    name_of_function,
    node_parts,
    require_recordable,
    words,
)


class Seen(TorchFunctionMode):
    """Keeps what a mode is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def seen_in(code: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The last call that torch shows a mode while code runs."""
    with Seen() as seen:
        code()
    return seen.calls[-1]


X = torch.arange(4.0).reshape(2, 2)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (lambda: X + 1, ("call_method", "add", (X, 1))),
        (lambda: X @ X, ("call_method", "matmul", (X, X))),
        (lambda: X > 1, ("call_method", "gt", (X, 1))),
        (lambda: 2 - X, ("call_function", operator.__sub__, (2, X))),
        (lambda: 2 / X, ("call_function", operator.__truediv__, (2, X))),
        (lambda: X[0], ("call_function", operator.__getitem__, (X, 0))),
        (lambda: X.view(4), ("call_method", "view", (X, 4))),
        (lambda: X.T, ("call_function", getattr, (X, "T"))),
        (lambda: torch.relu(X), ("call_function", torch.relu, (X,))),
    ],
    ids=["sum", "product", "comparison", "swapped", "division", "index", "method", "property", "function"],
)
def test_a_call_becomes_a_node_that_does_the_same(code: Any, expected: tuple[Any, ...]) -> None:
    function, args, _ = seen_in(code)
    kind, target, positional = node_parts(function, args)
    assert (kind, target) == expected[:2]
    for argument, wanted in zip(positional, expected[2], strict=True):
        assert argument is wanted or argument == wanted
    run = getattr(positional[0], target) if kind == "call_method" else target
    rest = positional[1:] if kind == "call_method" else positional
    assert torch.equal(run(*rest), code())


def test_properties_have_the_name_of_what_they_read() -> None:
    assert name_of_function(seen_in(lambda: X.shape)[0]) == "shape"
    assert name_of_function(seen_in(lambda: X.grad)[0]) == "grad"
    assert name_of_function(torch.add) == "add"
    assert name_of_function(object()) == ""
    assert words("a b", "c") == {"a", "b", "c"}
    assert {"dtype", "ndim", "is_contiguous"} <= METADATA


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (X.data_ptr, r"asks for a tensor's memory \(data_ptr\)"),
        (lambda: X.grad_fn, r"asks what autograd knows about a tensor \(grad_fn\)"),
        (lambda: X.clone().requires_grad_(), r"computes or changes gradients by itself \(requires_grad_\)"),
        (lambda: X.clone().requires_grad_().register_hook(print), r"sets a hook on a tensor \(register_hook\)"),
        (lambda: setattr(X.clone(), "data", X), "assigns to the attribute 'data' of a tensor"),
        (lambda: torch.rand(2, generator=torch.Generator()), r"draws random numbers from a torch.Generator"),
        (lambda: torch.add(X, X, out=X.clone()), r"gives add a tensor to write to \(out=\)"),
    ],
    ids=["memory", "autograd", "gradient", "hook", "assignment", "generator", "out"],
)
def test_what_no_recording_holds_is_refused_with_the_reason(code: Any, message: str) -> None:
    with pytest.raises(UntraceableError, match=message):
        require_recordable(*seen_in(code))


def test_ordinary_operations_are_held() -> None:
    require_recordable(*seen_in(lambda: X + 1))
    require_recordable(*seen_in(lambda: torch.cat([X, X], dim=0)))


def test_torchs_own_operations_are_told_from_others() -> None:
    def own(value: torch.Tensor) -> torch.Tensor:
        return value

    assert is_torchs(torch.relu)
    assert is_torchs(operator.add)
    assert is_torchs(torch.ops.aten.relu.default)
    assert is_torchs(nn.functional.gelu)
    assert not is_torchs(own)
