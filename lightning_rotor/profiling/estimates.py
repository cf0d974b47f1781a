"""The profiler on fake tensors: a meter for tensors without memory, and a clock that runs by a roofline.

The meter follows the life of every storage: what operators return counts until its storage dies. What a kernel
allocates for itself while it runs (a convolution's workspace, say) is not seen, so peaks are lower bounds, exact for
kernels that need nothing.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.flop_counter import flop_registry

from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.devices import block_bytes_of
from lightning_rotor.errors import ModelError, SampleError
from lightning_rotor.private.torch_names import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedOperatorException,
    identity_of,
    schema_of,
    take_back,
)
from lightning_rotor.private.values import tree_leaves
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.chain_profiler import Progress
from lightning_rotor.profiling.dry_run import unlogged
from lightning_rotor.profiling.memory_recording import Recording
from lightning_rotor.profiling.meters import Meter
from lightning_rotor.units import in_blocks

# ----------------------- How long an operator takes on an accelerator, from its arithmetic and the bytes that it moves.


# What well-tuned kernels reach of a data sheet's figures. Both factors cancel where one limit decides everything.
_ARITHMETIC_EFFICIENCY = 0.6
_BANDWIDTH_EFFICIENCY = 0.8
# The gap between two kernels in a stream, when the host keeps up.
_LAUNCH_SECONDS = 3e-6


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device as a roofline sees it."""

    name: str
    memory_bytes: int  # as the driver shows it
    bandwidth: float  # bytes per second between memory and chip
    flops: float  # operations per second on 4-byte numbers (a fused multiply-add is two), without TF32
    half_flops: float  # operations per second on 2-byte numbers (dense, on tensor cores)

    def seconds(self, operations: float, moved_bytes: float, element_bytes: int) -> float:
        """Estimated duration of one operator that multiplies numbers of ``element_bytes``."""
        peak = self.half_flops if element_bytes <= 2 else self.flops
        arithmetic = operations / (_ARITHMETIC_EFFICIENCY * peak)
        movement = moved_bytes / (_BANDWIDTH_EFFICIENCY * self.bandwidth)
        return max(arithmetic, movement, _LAUNCH_SECONDS)


_MIB = 2**20
# Vendor's data sheets; memory is what `nvidia-smi` shows of it.
GPUS: dict[str, Accelerator] = {
    gpu.name: gpu
    for gpu in (
        Accelerator("B200", 183_359 * _MIB, 8000e9, 75e12, 2250e12),
        Accelerator("H200", 143_771 * _MIB, 4800e9, 67e12, 989e12),
        Accelerator("H100", 81_559 * _MIB, 3350e9, 67e12, 989e12),
        Accelerator("H100-PCIe", 81_559 * _MIB, 2000e9, 51e12, 756e12),
        Accelerator("A100-80GB", 81_920 * _MIB, 2039e9, 19.5e12, 312e12),
        Accelerator("A100-40GB", 40_960 * _MIB, 1555e9, 19.5e12, 312e12),
        Accelerator("L40S", 46_068 * _MIB, 864e9, 91.6e12, 362e12),
        Accelerator("L4", 23_034 * _MIB, 300e9, 30.3e12, 121e12),
        Accelerator("A10G", 23_028 * _MIB, 600e9, 31.5e12, 70e12),
        Accelerator("V100-32GB", 32_768 * _MIB, 900e9, 15.7e12, 125e12),
        Accelerator("V100-16GB", 16_384 * _MIB, 900e9, 15.7e12, 125e12),
        Accelerator("T4", 15_360 * _MIB, 320e9, 8.1e12, 65e12),
        Accelerator("RTX-5090", 32_607 * _MIB, 1792e9, 104.8e12, 209.5e12),
        Accelerator("RTX-4090", 24_564 * _MIB, 1008e9, 82.6e12, 165.2e12),
        Accelerator("RTX-3090", 24_576 * _MIB, 936e9, 35.6e12, 71e12),
    )
}


_aten = torch.ops.aten


class EstimatingMeter(TorchDispatchMode, Meter):
    """Bytes of storages, rounded up to blocks, and seconds of a roofline, for what runs while this mode is active."""

    def __init__(self, accelerator: Accelerator, *, block_bytes: int = 1) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.block_bytes = block_bytes
        self._seconds = 0.0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._recording = Recording()

    def new_recording(self, *, of_step: bool = False, older: Mapping[int, int] | None = None) -> Recording:
        """A recording of what is made from now on, until the next one."""
        self._recording = Recording()
        return self._recording

    def now(self) -> float:
        """Seconds that everything so far would have taken."""
        return self._seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Before the call, since a result may share the storage of an argument.
        before = {identity_of(tensor.untyped_storage()) for tensor in taken}
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._note(tensor.untyped_storage())
        is_view = (
            all(identity_of(tensor.untyped_storage()) in before for tensor in made) and not schema_of(func).is_mutable
        )
        if made and not is_view:
            count: Any = _FLOPS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
            operations = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
            moved = sum({identity_of(tensor.untyped_storage()): tensor.nbytes for tensor in (*taken, *made)}.values())
            element_bytes = min(tensor.element_size() for tensor in made)
            self._seconds += self._accelerator.seconds(operations, moved, element_bytes)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = identity_of(storage)
        if key in self._known:
            return
        size, recording = in_blocks(storage.nbytes(), self.block_bytes), self._recording

        def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._known[key]
            recording.count(-size)

        self._known[key] = weakref.ref(storage, forget)
        recording.count(size)


# Missing in torch's own register: the attention that fake tensors on the CPU choose.
_FLOPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


# --------- Models without memory: built on ``meta``, then given fake tensors, which behave as if they were on a device.


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
    """A model in training mode whose parameters are on ``meta``; ModelError if its constructor reads their values."""

    def forget_values(module: nn.Module, name: str, param: nn.Parameter) -> None:
        if not param.is_meta:  # the same object still, which may be tied or in a list
            torch.utils.swap_tensors(param, nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad))

    hook = register_module_parameter_registration_hook(forget_values)
    try:
        return build().train()
    except RuntimeError as error:  # NotImplementedError is one
        raise ModelError(
            f"the model cannot be built without memory: {str(error).splitlines()[0]}. Expected a constructor that "
            "reads no values of weights; use the device 'cpu'"
        ) from error
    finally:
        hook.remove()


def give_fake_tensors(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace a model's parameters, buffers and tensors in attributes by fake ones on the CPU, keeping ties."""
    fakes: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        slots: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
        for slot in slots:
            for name, value in slot.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if value not in fakes:
                    with mode:
                        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
                    learns = isinstance(value, nn.Parameter)
                    fakes[value] = nn.Parameter(fake, requires_grad=value.requires_grad) if learns else fake
                slot[name] = fakes[value]


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
    """The profile that :func:`~lightning_rotor.profiling.profile_chain` would measure on an accelerator, from shapes.

    What kernels allocate for themselves is missing from peaks; seconds are a roofline's. The model is on ``meta``; its
    tensors become fake ones. ``like`` decides on operators and allocator: on ``"cuda"`` dropout keeps a byte an element
    instead of a float, attention with dropout is fused, and blocks are multiples of 512 bytes. ``floating`` replaces
    float32 in inputs. Raises ModelError if the model is no chain, or its forward needs values of tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    give_fake_tensors(model, mode)
    meter = EstimatingMeter(accelerator, block_bytes=block_bytes_of(like))
    try:
        with mode, torch.autocast("cpu", dtype=autocast, enabled=autocast is not None), unlogged():
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
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Tensors for a call, positional and by keyword."""
    positional = tuple(spec.make(device, floating=floating) for spec in inputs if spec.name is None)
    return positional, {spec.name: spec.make(device, floating=floating) for spec in inputs if spec.name is not None}


@contextmanager
def _fused_as_on_cuda() -> Iterator[None]:
    """Context in which operators on the CPU save for their backward what a GPU's do, also where one recomputes."""
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
