"""Inputs as a command line has them."""

from __future__ import annotations

import pytest
import torch

from lightning_rotor.errors import SampleError
from lightning_rotor.profiling.input_spec import InputSpec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("64x3x224x224", InputSpec((64, 3, 224, 224))),
        ("8,512:int64", InputSpec((8, 512), torch.int64)),
        ("mask=8x512:bool", InputSpec((8, 512), torch.bool, "mask")),
        ("scalar:bf16", InputSpec((), torch.bfloat16)),
        (" 7 ", InputSpec((7,))),
    ],
)
def test_inputs_are_read(text: str, spec: InputSpec) -> None:
    assert InputSpec.parse(text) == spec
    made = spec.make("cpu")
    assert (tuple(made.shape), made.dtype) == (spec.shape, spec.dtype)


@pytest.mark.parametrize("text", ["", "axb", "3x", "3x4:float99", "=3x4", "3x4:", "1.5x2"])
def test_other_inputs_are_refused(text: str) -> None:
    with pytest.raises(SampleError, match=r"expected (a shape such as|one of float32)"):
        InputSpec.parse(text)


def test_inputs_follow_the_precision_if_they_are_plain_floats() -> None:
    assert InputSpec((2,)).make("cpu", floating=torch.bfloat16).dtype == torch.bfloat16
    assert InputSpec((2,), torch.float64).make("cpu", floating=torch.bfloat16).dtype == torch.float64
    assert InputSpec((2,), torch.int64).make("cpu", floating=torch.bfloat16).tolist() == [1, 1]
