"""The profiler on fake tensors: what a chain would cost on an accelerator, from shapes alone.

Bytes come from the lives of storages, seconds from a roofline (``estimating_meter``, ``accelerators``). Operators on
the CPU save other tensors for their backward than a GPU's. So some are replaced by what a GPU runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.devices import block_bytes_of
from lightning_rotor.errors import ModelError
from lightning_rotor.private.torch_names import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    take_back,
)
from lightning_rotor.profiling.accelerators import Accelerator
from lightning_rotor.profiling.chain_profile import Profile
from lightning_rotor.profiling.chain_profiler import Progress, profile_chain
from lightning_rotor.profiling.dry_run import unlogged
from lightning_rotor.profiling.estimating_meter import EstimatingMeter
from lightning_rotor.profiling.input_spec import InputSpec, arguments
from lightning_rotor.profiling.models_without_memory import give_fake_tensors
from lightning_rotor.stages.sequential import Stage


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
    """:func:`estimate_profiles` of the stages as they are cut."""
    profiles = estimate_profiles(
        model, inputs, accelerator, [tuple], like=like, autocast=autocast, floating=floating, progress=progress
    )
    return profiles[0]


def estimate_profiles(
    model: nn.Module,
    inputs: Sequence[InputSpec],
    accelerator: Accelerator,
    ways: Sequence[Callable[[Sequence[Stage]], Sequence[Stage]]],
    *,
    like: Literal["cpu", "cuda"] = "cuda",
    autocast: torch.dtype | None = None,
    floating: torch.dtype | None = None,
    progress: Progress | None = None,
) -> list[Profile]:
    """Profiles that :func:`~lightning_rotor.profiling.profile_chain` would measure on an accelerator, from shapes.

    What kernels allocate for themselves is missing from peaks; seconds are a roofline's.

    Args:
        model: On ``meta``; its tensors become fake ones.
        inputs: Of a call.
        accelerator: For the seconds.
        ways: To put the stages of one cut together, a profile for each.
        like: Decides on operators and allocator: on ``"cuda"`` dropout keeps a byte an element instead of a float,
            attention with dropout is fused, and blocks are multiples of 512 bytes.
        autocast: The type to compute in; None without autocast.
        floating: Replaces float32 in inputs.
        progress: Called with the number of stages done and their total.
    Raises:
        ModelError: The model is no chain, or its forward needs values of tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    give_fake_tensors(model, mode)
    meter = EstimatingMeter(accelerator, block_bytes=block_bytes_of(like))
    try:
        # Of the CPU, on which the fake tensors are, whatever device is estimated.
        with mode, torch.autocast("cpu", dtype=autocast, enabled=autocast is not None), unlogged():
            args, kwargs = arguments(inputs, "cpu", floating=floating)
            cut = sequentialize(model, args, kwargs)
            profiles = []
            with meter, _fused_as_on_cuda() if like == "cuda" else nullcontext():
                for together in ways:
                    value = cut.bind(args, kwargs)
                    stages = together(cut.stages)
                    profiles.append(profile_chain(stages, value, meter=meter, progress=progress))
            return profiles
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise ModelError(
            f"the forward of {type(model).__name__} cannot be run on shapes alone, for it needs values of tensors or "
            f"an operator without a shape rule ({str(error).splitlines()[0]}): use the device 'cpu' or 'cuda'"
        ) from error


@contextmanager
def _fused_as_on_cuda() -> Iterator[None]:
    """Context in which operators on the CPU save for their backward what a GPU's do, also where one recomputes."""
    # At autograd's key: what an operator saves for its backward is decided there.
    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
    try:
        yield
    finally:
        take_back(library)


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout by the operator that keeps a mask of bytes, as a GPU's does."""
    if not train or p == 0:
        return input
    # A mask of bytes, where the CPU's own keeps one of floats.
    dropped: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    dropout_p: float = 0.0,
    *rest: Any,
    **options: Any,
) -> Any:
    """Attention as a GPU's fused kernel saves it: without the mask of dropout."""
    # Fused kernels draw their mask again in the backward, so it takes no memory.
    # Decomposed, as the operator itself has just been replaced by this function.
    plain = torch.ops.aten.scaled_dot_product_attention.default
    return plain.decompose(query, key, value, mask, 0.0, *rest, **options)
