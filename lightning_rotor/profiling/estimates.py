"""The profiler on fake tensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lightning_rotor.capture.cuts import sequentialize
from lightning_rotor.errors import ModelError, SampleError
from lightning_rotor.private.torch_names import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    take_back,
)
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.chain import Progress
from lightning_rotor.profiling.roofline import Accelerator, EstimatingMeter
from lightning_rotor.units import BLOCK_BYTES

# ----------------------------------------------------------------------------------------------------
# Models without memory: built on ``meta``, then given fake tensors, which behave as if they were on a device.


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
        shape = () if match["shape"] == "scalar" else tuple(map(int, re.split("[x,]", match["shape"])))
        return cls(shape, _DTYPES[dtype], match["name"])

    def make(self, device: torch.device | str, *, floating: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of random numbers, or of ones if they are whole: a valid index, and a mask that masks nothing."""
        if self.dtype.is_floating_point:
            dtype = floating if floating is not None and self.dtype == torch.float32 else self.dtype
            return torch.randn(self.shape, dtype=dtype, device=device)
        return torch.ones(self.shape, dtype=self.dtype, device=device)


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """A model on ``meta``, in training mode; ModelError if its constructor reads values of tensors, say."""
    try:
        with torch.device("meta"):
            return build().train()
    except (RuntimeError, NotImplementedError) as error:
        first = error
    try:
        # Some constructors compute with small tensors and read them: then only parameters go without memory.
        with _parameters_on_meta():
            return build().train()
    except (RuntimeError, NotImplementedError) as error:
        raise ModelError(
            f"the model cannot be built without memory: {str(first).splitlines()[0]}; nor with its parameters alone "
            f"without: {str(error).splitlines()[0]}. Expected a constructor that reads no values of weights; use the "
            "device 'cpu'"
        ) from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context in which modules' parameters lose their memory; one that nobody has written to never took any."""
    register = nn.Module.register_parameter

    def register_without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def give_fake_tensors(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace a model's parameters, buffers and tensors in attributes by fake ones on the CPU, keeping ties."""
    fakes: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        slots: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
        for slot in slots:
            for name, value in slot.items():
                if isinstance(value, torch.Tensor):
                    slot[name] = fakes[value] = fakes[value] if value in fakes else _fake_on_cpu(value, mode)


def _fake_on_cpu(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


# ----------------------------------------------------------------------------------------------------


def estimate_profile(
    model: nn.Module,
    inputs: Sequence[InputSpec],
    accelerator: Accelerator,
    *,
    like: Literal["cpu", "cuda"] = "cuda",
    autocast: torch.dtype | None = None,
    floating: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Profile:
    """What :func:`~lightning_rotor.profiling.profile_chain` would measure on an accelerator, from shapes alone.

    What kernels allocate for themselves is missing from peaks; seconds are a roofline's. The model is on ``meta``; its
    tensors become fake ones. ``like`` decides on operators and allocator: on ``"cuda"`` dropout keeps a byte an element
    instead of a float, attention with dropout is fused, and blocks are multiples of 512 bytes. ``floating`` replaces
    float32 in inputs. Raises ModelError if the model is no chain, or its forward needs values of tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    give_fake_tensors(model, mode)
    meter = EstimatingMeter(accelerator, block_bytes=BLOCK_BYTES.get(like, 1))
    context: AbstractContextManager[Any] = (
        torch.autocast("cpu", dtype=autocast) if autocast is not None else nullcontext()
    )
    try:
        with mode, context, _quiet():
            args, kwargs = arguments(inputs, "cpu", floating=floating)
            cut = sequentialize(model, args, kwargs)
            value = cut.bind(args, kwargs)
            with meter, _fused_as_on_cuda() if like == "cuda" else nullcontext():
                return profile_chain(cut.stages, value, repeats=1, meter=meter, progress=progress)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise ModelError(
            f"the forward of {type(model).__name__} cannot be run on shapes alone, for it needs values of tensors or "
            f"an operator without a shape rule ({str(error).splitlines()[0]}): use the device 'cpu' or 'cuda'"
        ) from error


def arguments(
    inputs: Sequence[InputSpec], device: torch.device | str, *, floating: torch.dtype | None = None
) -> tuple[tuple[torch.Tensor, ...], Mapping[str, torch.Tensor]]:
    """Tensors for a call, positional and by keyword."""
    made = [(spec.name, spec.make(device, floating=floating)) for spec in inputs]
    return tuple(tensor for name, tensor in made if name is None), {
        name: tensor for name, tensor in made if name is not None
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which fake tensors do not log errors that they raise as well, of failed traces for example."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _fused_as_on_cuda() -> Iterator[None]:
    """Context in which operators on the CPU save for their backward what those of a GPU do.

    It acts at the dispatcher, so that it also holds where a backward recomputes, which no mode for functions sees.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
    try:
        yield
    finally:
        take_back(library)


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0:
        return input
    dropped: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _attention(
    query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0, *rest: Any, **options: Any
) -> Any:
    # Fused kernels draw their mask again in the backward, so it takes no memory.
    plain = torch.ops.aten.scaled_dot_product_attention.default
    return plain.decompose(query, key, value, mask, 0.0, *rest, **options)
