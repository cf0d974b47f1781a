"""Right values on the simulated device.

Each operator for which torch has a CUDA kernel runs three times over, and only the first and the last touch values::

    the CPU's operator, over the arguments' memory ──►  results, kept aside
    torch's CUDA function                          ──►  allocates, advances the generator, launches; nothing is computed
    results                                        ──►  the memory that it returned, or was given to write

So allocator traffic is torch's own, temporaries included, and nothing changes if it fails. Random numbers follow the CUDA generator: the same
seed and offset draw the same numbers. Where the CPU has no such operator, ``rules.py`` has one; where neither has, it is an error.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tests.cuda_device import rules

# Only memory, metadata or the host: torch's own functions do these right.
_AS_THEY_ARE = frozenset([
    "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "_local_scalar_dense", "set_.source_Storage", "set_",
    "set_.source_Tensor", "set_.source_Storage_storage_offset", "resize_", "record_stream", "is_pinned", "_pin_memory", "is_set_to", "unfold",
    "alias", "_cudnn_init_dropout_state", "_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor", "_fused_sdp_choice",
])  # fmt: skip
# Values decide about shapes, so the results are made anew: their temporaries are in no account.
_MADE_ANEW = frozenset([
    "nonzero", "nonzero_static", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave.Tensor", "bincount", "equal",
])  # fmt: skip
# These write running statistics, although their schemas do not say so.
_WITH_RUNNING_STATISTICS = frozenset(["native_batch_norm", "cudnn_batch_norm", "batch_norm_gather_stats_with_counts"])
_ALSO_WRITTEN = ("running_mean", "running_var")
_READS = frozenset(["copy_"])
_HALF = (torch.half, torch.bfloat16)

_device = ctypes.CDLL(None)
_installed: list[Any] = []
_threads: set[int | None] = set()
"""Those in which operators have run."""


class NotSimulatedError(RuntimeError):
    """The simulated device does not know what an operator computes."""


def host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on the device as the CPU's tensor."""
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    seen = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        seen = torch._conj(seen)
    return torch._neg_view(seen) if tensor.is_neg() else seen


def install() -> None:
    """Put the CPU behind every CUDA kernel of torch in this process."""
    library = torch.library.Library("aten", "IMPL")
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        has_kernel = name != full and torch._C._dispatch_has_kernel_for_dispatch_key(full, "CUDA")
        if (not has_kernel and full != "aten::copy_") or name in _AS_THEY_ARE:  # copy_ is one function for all devices
            continue
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if op is not None and not op.is_view:
            library.impl(name, _Operator(name, op), "CUDA", with_keyset=True, allow_override=True)
    _installed.append(library)  # its end would be the end of what it registered
    atexit.register(_let_autograd_end)


def _let_autograd_end() -> None:
    """Give autograd's thread, whose kernels are Python code here, time to need Python no more: it would abort."""
    if _threads - {threading.main_thread().ident}:
        time.sleep(0.3)


class _Operator:
    """Takes the place of one CUDA kernel."""

    def __init__(self, name: str, op: Any) -> None:
        self.__name__ = name
        self._name, self._op = name, op
        self._original = torch.library.get_kernel(op, "CUDA")
        self._rule = rules.RULES.get(name, op)
        arguments = op._schema.arguments
        self._names = [each.name for each in arguments]
        self._tensors = {each.name for each in arguments if str(each.type) == "Tensor"}
        self._written = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
        self._returns_argument = any(each.alias_info is not None for each in op._schema.returns)
        self._written.update(_ALSO_WRITTEN if name in _WITH_RUNNING_STATISTICS else ())
        self._takes_numbers = torch._C._should_allow_numbers_as_tensors(op._schema.name.removeprefix("aten::"))
        self._draws = torch.Tag.nondeterministic_seeded in op.tags or name in rules.DRAWING

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if not _device.simulated_enter(self._name in _READS):
            return self._on_device(keys, given, len(args))  # part of another one, which writes the results
        _threads.add(threading.get_ident())
        try:
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                return self._run(keys, given, len(args))
        finally:
            _device.simulated_leave()

    def _run(self, keys: Any, given: dict[str, Any], places: int) -> Any:
        at_host = {name: _each_tensor(host, value) for name, value in given.items()}
        written = self._written & given.keys()
        at_host |= {name: _each_tensor(torch.clone, at_host[name]) for name in written}
        if _device.simulated_copies():
            stream = torch.cuda.current_stream().cuda_stream
            if stream and self._name == "copy_" and _crosses(given["self"], given["src"]):
                return self._on_device(keys, given, places)  # the runtime copies, when it is time
            _device.simulated_computes(ctypes.c_void_p(stream))
        try:
            computed = self._compute(given, at_host, places)
        except Exception as error:
            self._on_device(keys, given, places)  # it refuses the same arguments, if they are wrong
            raise NotSimulatedError(f"{self._name}: {type(error).__name__}: {error}") from error
        if self._name in _MADE_ANEW:
            device = next(each.device for each in _tensors_in(given.values()) if each.is_cuda)
            return _each_tensor(lambda value: _on(device, value), computed)
        received = self._on_device(keys, given, places)
        for name in written:
            self._write(given[name], at_host[name])
        if not self._returns_argument:
            self._write(received, computed)
        return computed if isinstance(computed, (bool, int, float)) else received

    def _compute(self, given: dict[str, Any], at_host: dict[str, Any], places: int) -> Any:
        """Results of the CPU's operator; what it writes is in ``at_host``."""
        state = _seed_and_offset(given) if self._draws else None
        elsewhere = {"device": torch.device("cpu"), "pin_memory": None, "generator": None}
        values = at_host | {name: elsewhere[name] for name in elsewhere.keys() & at_host.keys()}
        if not self._takes_numbers:
            values |= self._numbers_as_tensors(values)
        if self._name in rules.DRAWING:
            values["philox"] = state
        with nullcontext() if state is None else _drawing(*state):
            try:
                return self._rule(*[*values.values()][:places], **dict([*values.items()][places:]))
            except RuntimeError:
                if not any(each.dtype in _HALF for each in _tensors_in(values.values())):
                    raise
            # The CPU has not every operator in half precision, nor with parameters of another precision.
            wide = {name: _each_tensor(_widened, value) for name, value in values.items()}
            computed = self._rule(*[*wide.values()][:places], **dict([*wide.items()][places:]))
            for name in self._written & given.keys():
                for target, value in zip(_tensors_in([at_host[name]]), _tensors_in([wide[name]]), strict=True):
                    target.copy_(value)
            return computed

    def _on_device(self, keys: Any, given: dict[str, Any], places: int) -> Any:
        """What torch's CUDA function returns, in memory that no kernel has written."""
        values = given | self._numbers_as_tensors(given)
        if self._name.startswith(("index.", "index_put", "_index_put", "_unsafe_index")):
            values["indices"] = [part for index in given["indices"] for part in _without_mask(index)]
        return self._original.call_boxed(keys, *[*values.values()][:places], **dict([*values.items()][places:]))

    def _numbers_as_tensors(self, values: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Python's numbers among the tensors: the dispatcher has made them of scalars, and these promote as they do."""
        other = next(_tensors_in(values.values()), None)
        numbers = {
            name: values[name]
            for name in self._tensors & values.keys()
            if isinstance(values[name], (int, float, complex))
        }
        return {name: torch.tensor(value, dtype=torch.result_type(other, value)) for name, value in numbers.items()}

    def _write(self, received: Any, computed: Any) -> None:
        if isinstance(received, (list, tuple)):
            for each, value in zip(received, computed, strict=True):
                self._write(each, value)
        elif isinstance(received, torch.Tensor) and isinstance(computed, torch.Tensor) and received.numel():
            if received.shape != computed.shape:
                raise NotSimulatedError(
                    f"{self._name}: shape {tuple(received.shape)} on the device, {tuple(computed.shape)} on the CPU"
                )
            host(received).copy_(computed)


def _crosses(target: torch.Tensor, source: torch.Tensor) -> bool:
    """True for a plain copy between host and device, which is no kernel."""
    is_plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    return is_plain and target.is_cuda != source.is_cuda


def _each_tensor(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    return type(value)([_each_tensor(function, each) for each in value]) if isinstance(value, (list, tuple)) else value


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _on(device: torch.device, value: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if value.numel():
        host(made).copy_(value)
    return made


def _without_mask(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Places instead of a mask: torch would count on the device what it selects."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [_on(index.device, places.contiguous()) for places in host(index).nonzero().unbind(1)]


def _seed_and_offset(given: dict[str, Any]) -> tuple[int, int]:
    """The state of the CUDA generator that an operator draws from."""
    generator = next((each for each in given.values() if isinstance(each, torch.Generator)), None)
    if generator is None:
        devices = (each.device.index for each in _tensors_in(given.values()) if each.is_cuda)
        generator = torch.cuda.default_generators[next(devices, torch.cuda.current_device())]
    state = bytes(generator.get_state().tolist())
    return int.from_bytes(state[:8], "little"), int.from_bytes(state[8:16], "little")


@contextmanager
def _drawing(seed: int, offset: int) -> Iterator[None]:
    """The CPU draws as this state of a CUDA generator wants."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(rules.seed_of(seed, offset))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
