"""Answers to questions for values that do not exist, one operator at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from lightning_rotor.profiling.assumed_values import AssumedArrays, AssumedValues

MASK = torch.ones(3, 4, dtype=torch.bool)


def answered(function: Callable[..., Any], *tensors: torch.Tensor, number: float = 1.0) -> tuple[Any, int]:
    """The result on fake tensors, and how many questions were asked."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
        assumed = AssumedValues(number)
        with assumed, AssumedArrays(assumed):
            result = function(*fakes)
    return result, assumed.assumed_values


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (lambda x: x[0, 0].item(), 0.5),
        (lambda x: (x[0, 0] > 5).item(), True),
        (lambda x: x.argmax().item(), 1),
        (lambda x: x[0, 0].to(torch.complex64).item(), complex(0.5)),
        (lambda x: torch.equal(x, x + 1), True),
    ],
    ids=["float", "bool", "int", "complex", "equal"],
)
def test_numbers(function: Callable[..., Any], answer: Any) -> None:
    result, questions = answered(function, torch.randn(3, 4), number=0.5)
    assert result == answer
    assert questions == 1


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: x.nonzero(), [(12, 2)]),
        (lambda x: x.masked_select(x > 0), [(12,)]),
        (lambda x: x[x > 0], [(12,)]),
        (lambda x: x[x.sum(1) > 0], [(3, 4)]),
        (torch.unique, [(12,)]),
        (lambda x: torch.unique(x, return_inverse=True, return_counts=True), [(12,), (3, 4), (12,)]),
        (lambda x: torch.unique(x, dim=1, return_counts=True), [(3, 4), (4,)]),
        (torch.unique_consecutive, [(12,)]),
        (lambda x: torch.bincount(x.flatten().long(), minlength=7), [(7,)]),
        (lambda x: torch.bincount(x.flatten().long()), [(2,)]),
    ],
    ids=["nonzero", "masked_select", "mask", "mask of rows", "unique", "counts", "dim", "consecutive", "bins", "bin"],
)
def test_shapes(function: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    result, questions = answered(function, torch.randn(3, 4))
    results = result if isinstance(result, tuple) else (result,)
    assert [tuple(tensor.shape) for tensor in results] == shapes
    assert questions == 1


def test_sequences_have_their_full_length() -> None:
    def run(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        output, (hidden, _) = nn.LSTM(4, 6)(packed)
        return *nn.utils.rnn.pad_packed_sequence(output, batch_first=True), hidden

    (padded, _, hidden), _ = answered(run, torch.randn(2, 5, 4), torch.tensor([5, 3]))
    assert (tuple(padded.shape), tuple(hidden.shape)) == ((2, 5, 6), (1, 2, 6))


def test_arrays_of_unknown_values_are_ones() -> None:
    array, questions = answered(lambda x: x.numpy(), torch.randn(3))
    assert np.array_equal(array, np.ones(3, dtype=np.float32))
    assert questions == 1


def test_other_questions_are_not_answered() -> None:
    with pytest.raises(DynamicOutputShapeException, match="nonzero"):
        AssumedValues().answer(torch.ops.aten.nonzero.out, (torch.ones(2),), {})
