"""The profiler on fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from lightning_rotor.cutting import sequentialize
from lightning_rotor.errors import ModelError
from lightning_rotor.estimation.building import InputSpec, give_fake_tensors
from lightning_rotor.estimation.meter import EstimatingMeter
from lightning_rotor.estimation.roofline import Accelerator
from lightning_rotor.private.torch_names import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    take_back,
)
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.chain import Progress
from lightning_rotor.units import BLOCK_BYTES


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
    """What :func:`~lightning_rotor.profiling.profile_chain` would measure, from shapes alone.

    Bytes of activations, boundaries and gradients are exact in the sense that they are those of the storages that autograd keeps alive.
    What kernels allocate for themselves is unknown and missing from peaks. Seconds are those of a roofline.

    Args:
        model: On ``meta``; its tensors are replaced by fake ones.
        inputs: Of one training step.
        accelerator: Whose seconds.
        like: Whose operators and allocator: on ``"cuda"`` dropout keeps a byte for each element instead of a float, attention with
            dropout is fused, and blocks are multiples of 512 bytes.
        autocast: Lower precision of an autocast context, or None for none.
        floating: Type of inputs in the place of float32.
        progress: Called with the number of stages done and their total.
    Raises:
        ModelError: The model is no chain, or its forward needs values of tensors.
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
            f"the forward of {type(model).__name__} cannot be run on shapes alone, for it needs values of tensors or an operator without a "
            f"shape rule ({str(error).splitlines()[0]}): use the device 'cpu' or 'cuda'"
        ) from error


def arguments(
    inputs: Sequence[InputSpec], device: torch.device | str, *, floating: torch.dtype | None = None
) -> tuple[tuple[torch.Tensor, ...], Mapping[str, torch.Tensor]]:
    """Tensors for a call: positional ones and keywords."""
    made = [(spec.name, spec.make(device, floating=floating)) for spec in inputs]
    return tuple(tensor for name, tensor in made if name is None), {
        name: tensor for name, tensor in made if name is not None
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which fake tensors do not log errors that are raised as well, such as those of a trace that then takes another way."""
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

    At the dispatcher, so that it also holds where a backward recomputes, which no mode for functions sees.
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
    # Fused kernels draw their mask again in the backward, so that it takes no memory.
    plain = torch.ops.aten.scaled_dot_product_attention.default
    return plain.decompose(query, key, value, mask, 0.0, *rest, **options)
