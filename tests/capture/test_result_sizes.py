"""Sizes of results by rule, compared with what the operations return on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_rotor.capture.result_sizes import by_rule


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


SHAPES = (meta(2, 5, 8), meta(4, 8), meta(2, 8, 5).transpose(1, 2), meta(1, 1, 8), meta(0, 8))
ROW, WEIGHT = meta(8), meta(3, 8)
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...]]] = {
    "linear": (F.linear, (WEIGHT, meta(3))),
    "linear without bias": (F.linear, (WEIGHT,)),
    "linear with a parameter": (F.linear, (torch.nn.Parameter(torch.randn(3, 8)),)),
    "dropout": (F.dropout, (0.1, True, False)),
    "dropout of torch": (torch.dropout, (0.1, True)),
    "gelu": (F.gelu, ()),
    "layer_norm": (F.layer_norm, ((8,), ROW, ROW)),
    "relu": (F.relu, ()),
    "silu": (F.silu, ()),
    "tanh": (torch.tanh, ()),
    "sigmoid": (torch.Tensor.sigmoid, ()),
    "rsqrt": (torch.Tensor.rsqrt, ()),
    "neg": (torch.Tensor.neg, ()),
    "cos": (torch.cos, ()),
    "number added": (torch.Tensor.add, (2,)),
    "row added": (torch.add, (ROW,)),
    "integers added": (torch.Tensor.__add__, (meta(8, dtype=torch.int64),)),
    "doubles multiplied": (torch.Tensor.mul, (ROW.double(),)),
    "one entry of a double multiplied": (torch.mul, (meta(dtype=torch.float64),)),
    "column subtracted": (torch.sub, (meta(1, 1),)),
    "divided": (torch.Tensor.__truediv__, (3,)),
    "compared": (torch.Tensor.__lt__, (ROW,)),
    "compared with a number": (torch.eq, (0,)),
    "maximum": (torch.maximum, (ROW,)),
}


@pytest.mark.parametrize("case", CASES)
def test_rules_say_what_operations_do(case: str) -> None:
    operation, rest = CASES[case]
    found = 0
    for tensor in SHAPES:
        stand_in = by_rule(operation, (tensor, *rest), {})
        if stand_in is not None:
            assert_alike(stand_in, operation(tensor, *rest))
            found += 1
    # One shape is not contiguous.
    assert found >= len(SHAPES) - 1


@pytest.mark.parametrize("mask", [None, meta(2, 1, 10, 12), meta(10, 12, dtype=torch.bool), meta(12)])
@pytest.mark.parametrize("are_views", [False, True])
def test_the_rule_of_attention_says_what_it_does(mask: torch.Tensor | None, are_views: bool) -> None:
    query, key, value = meta(2, 10, 4, 8), meta(2, 12, 4, 8), meta(2, 12, 4, 6)
    tensors = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    if not are_views:
        tensors = [tensor.contiguous() for tensor in tensors]
    stand_in = by_rule(F.scaled_dot_product_attention, (*tensors, mask), {"dropout_p": 0.1})
    assert stand_in is not None
    assert_alike(stand_in, F.scaled_dot_product_attention(*tensors, mask, dropout_p=0.1))


def test_rules_of_choices_and_rows_say_what_they_do() -> None:
    chosen = meta(2, 1, dtype=torch.bool), meta(2, 5), 0.0
    ids = meta(2, 5, dtype=torch.int64), meta(10, 8)
    for operation, args in ((torch.where, chosen), (F.embedding, ids)):
        stand_in = by_rule(operation, args, {})
        assert stand_in is not None
        assert_alike(stand_in, operation(*args))


class Labelled(torch.Tensor):
    pass


WHOLE = meta(2, 5, dtype=torch.int64)
HEADS = meta(2, 4, 10, 8)
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "types that mix": (F.linear, (meta(2, 8), WEIGHT.double()), {}),
    "a weight that does not go together": (F.linear, (meta(2, 8), meta(3, 7)), {}),
    "sizes that do not go together": (torch.add, (meta(2, 8), meta(3, 8)), {}),
    "a factor": (torch.add, (meta(2, 8), meta(2, 8)), {"alpha": 2}),
    "integers divided": (torch.div, (WHOLE, 2), {}),
    "rounded": (torch.div, (meta(2, 8), 2), {"rounding_mode": "floor"}),
    "cosine of integers": (torch.cos, (WHOLE,), {}),
    "in place": (F.relu, (meta(2, 8),), {"inplace": True}),
    "a subclass": (F.relu, (meta(2, 8).as_subclass(Labelled),), {}),
    "places of a choice": (torch.where, (meta(2, dtype=torch.bool),), {}),
    "heads that are shared": (
        F.scaled_dot_product_attention,
        (HEADS, HEADS[:, :2], HEADS[:, :2]),
        {"enable_gqa": True},
    ),
    "a mask that does not go together": (F.scaled_dot_product_attention, (HEADS, HEADS, HEADS, meta(3, 10)), {}),
    "another operation": (torch.cumsum, (meta(2, 8), 0), {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_there_is_no_rule_where_a_result_is_not_certain(case: str) -> None:
    operation, args, kwargs = REFUSED[case]
    assert by_rule(operation, args, kwargs) is None


def test_there_is_no_rule_under_autocast() -> None:
    assert by_rule(F.relu, (meta(2, 8),), {}) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert by_rule(F.relu, (meta(2, 8),), {}) is None


def assert_alike(stand_in: torch.Tensor, result: torch.Tensor) -> None:
    assert stand_in.is_meta
    assert (stand_in.shape, stand_in.stride(), stand_in.dtype) == (result.shape, result.stride(), result.dtype)
