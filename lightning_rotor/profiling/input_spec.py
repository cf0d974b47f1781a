"""Inputs of a model as a command line has them: shape, type and name of each argument."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_rotor.errors import SampleError

_DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool,
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "long": torch.int64, "int": torch.int32,
}  # fmt: skip
_INPUT = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:[x,]\d+)*|scalar)(?::(?P<dtype>\w+))?")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Shape (batch dimension first, usually) and type of an argument, a keyword one if it has a name."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Read ``64x3x224x224``, ``8x512:int64`` or ``attention_mask=8x512:bool``, or raise SampleError."""
        match = _INPUT.fullmatch(text.strip())
        if match is None:
            raise SampleError(
                f"input {text!r} cannot be read: expected a shape such as 64x3x224x224, with a type if it is not "
                "float32 (8x512:int64), and with the argument's name if it is a keyword (attention_mask=8x512:bool)"
            )
        dtype = match["dtype"] or "float32"
        if dtype not in _DTYPES:
            raise SampleError(f"input {text!r} has the unknown type {dtype!r}: expected one of {', '.join(_DTYPES)}")
        # A scalar has no dimension, which no list of sizes could spell.
        shape: tuple[int, ...] = ()
        if match["shape"] != "scalar":
            shape = tuple(map(int, re.split("[x,]", match["shape"])))
        return cls(shape, _DTYPES[dtype], match["name"])

    def make(
        self,
        device: torch.device | str,
        *,
        floating: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor of random numbers, or of ones if they are whole: a valid index, and a mask that masks nothing."""
        if not self.dtype.is_floating_point:
            # Not zeros: as a mask they would hide everything, and a loss over nothing is NaN.
            return torch.ones(self.shape, dtype=self.dtype, device=device)
        # A type that was written down stays. float32 may be the default alone, which a model in another one cannot
        # take.
        dtype = self.dtype
        if dtype == torch.float32 and floating is not None:
            dtype = floating
        return torch.randn(self.shape, dtype=dtype, device=device)


def arguments(
    inputs: Sequence[InputSpec],
    device: torch.device | str,
    *,
    floating: torch.dtype | None = None,
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Tensors for a call, positional and by keyword."""
    positional = []
    for spec in inputs:
        if spec.name is None:
            positional.append(spec.make(device, floating=floating))
    by_keyword = {}
    for spec in inputs:
        if spec.name is not None:
            by_keyword[spec.name] = spec.make(device, floating=floating)
    return tuple(positional), by_keyword
