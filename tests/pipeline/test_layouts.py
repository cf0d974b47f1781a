"""Layouts: what crosses a cut, taken apart into tensors and put together again."""

from __future__ import annotations

import pytest
import torch

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.layouts import Layout, TensorMeta


def test_values_are_put_together_from_their_tensors() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.zeros(3, dtype=torch.int64)
    values = [a, {"deep": (b, None)}, 7]
    layout = Layout.of(values, "a stage", sizes=True)
    assert layout.metas == (TensorMeta((2,), torch.float32, True), TensorMeta((3,), torch.int64, False))
    flat = layout.flat(values)
    assert len(flat) == 2
    assert flat[0] is a
    assert flat[1] is b
    first, deep, size = layout.values([b, a])
    assert (first is b, deep["deep"][0] is a, deep["deep"][1], size) == (True, True, None, 7)


def test_buffers_fit_and_gradients_are_for_those_that_learn() -> None:
    layout = Layout.of([torch.ones(2, requires_grad=True), torch.zeros(3, dtype=torch.int64)], "a stage")
    one, other = layout.buffers(torch.device("cpu"))
    assert (one.shape, one.dtype, other.shape, other.dtype) == ((2,), torch.float32, (3,), torch.int64)
    gradient, nothing = layout.gradient_buffers(torch.device("cpu"))
    assert gradient is not None
    assert gradient.shape == (2,)
    assert nothing is None


@pytest.mark.parametrize(("value", "sizes"), [("text", True), (3, False), (1.5, True)])
def test_what_cannot_be_sent_is_refused_by_type(value: object, sizes: bool) -> None:
    with pytest.raises(PipelineError, match=rf"a stage hands over {type(value).__name__}: expected tensors"):
        Layout.of([torch.ones(1), value], "a stage", sizes=sizes)


@pytest.mark.parametrize("other", [[torch.ones(1), torch.ones(1)], [(torch.ones(1),)], [torch.ones(1), 5]])
def test_values_that_nest_otherwise_are_refused(other: list[object]) -> None:
    layout = Layout.of([torch.ones(1), 4], "a stage", sizes=True)
    with pytest.raises(PipelineError, match="expected outputs that nest alike in every micro-batch"):
        layout.flat(other)


def test_layouts_of_equal_values_are_equal_keys() -> None:
    known = {Layout.of([torch.ones(2)], "one"): "seen"}
    assert known[Layout.of([torch.zeros(2)], "other")] == "seen"
    assert Layout.of([torch.zeros(3)], "other") not in known
