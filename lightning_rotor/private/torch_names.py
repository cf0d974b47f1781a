"""Private names of torch, read in 2.11 to 2.15."""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from inspect import getclosurevars
from operator import attrgetter, methodcaller
from types import FrameType, FunctionType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch._refs
import torch.utils.checkpoint
from torch import nn
from torch._compile import _disable_dynamo
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.graph import Node
from torch.autograd.profiler import profile
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

from lightning_rotor.private.undoing import undone

# Without a public home: tensors without values, modes below autograd (documented under this name in torch's notes on
# extending it), and the classes of what ``torch.ops`` holds.
__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "is_traceable_wrapper_subclass",
    "no_dispatch",
]


@contextmanager
def fake_mode(*, allow_fallback_kernels: bool = True) -> Iterator[FakeTensorMode]:
    """Context with a mode whose tensors have no values, which lets go of the user's tensors at its end.

    The mode keeps a weak reference to each tensor that it has met, and lives on in reference cycles until Python collects
    them. As long as there is one, torch cannot move a parameter of a tensor subclass (``swap_tensors`` refuses).
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=allow_fallback_kernels)
    try:
        yield mode
    finally:
        mode.fake_tensor_converter = fake_tensor.FakeTensorConverter()


@contextmanager
def with_values(most_elements: int) -> Iterator[None]:
    """Context in which operations on tensors of :func:`fake_with_value` alone compute values as well.

    torch follows the values of single numbers by itself, and has no public name for the size up to which it does.
    """
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = most_elements
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


def fake_with_value(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a fake mode that answers questions for values like ``tensor``, which stays as it is."""
    with no_dispatch():  # a clone that the mode sees would have no values
        copy = tensor.detach().clone()
    return cast(torch.Tensor, mode.fake_tensor_converter.from_real_tensor(mode, copy, make_constant=True))


def mode_of(tensor: torch.Tensor) -> FakeTensorMode:
    """The mode that a fake tensor belongs to."""
    return cast(FakeTensor, tensor).fake_mode


def forget_value(tensor: torch.Tensor) -> None:
    """Let a fake tensor have no values from now on."""
    if isinstance(tensor, FakeTensor):
        tensor.constant = None


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a fake tensor; None if it has none."""
    return cast("torch.Tensor | None", getattr(tensor, "constant", None))


pack_sequences: Callable[..., Any] = torch._VF._pack_padded_sequence
"""What ``torch.nn.utils.rnn.pack_padded_sequence`` calls: its results have sizes that depend on values."""
pad_sequences: Callable[..., Any] = torch._VF._pad_packed_sequence
"""The operator behind ``torch.nn.utils.rnn.pad_packed_sequence``."""
istft_in_parts: Callable[..., Any] = torch._refs.istft
"""``torch.istft`` as operations of Python, since its own code looks into memory. No public name has them."""
RECURRENT: tuple[Callable[..., Any], ...] = (*(torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu),)
"""The operators of torch's recurrent layers. The third argument of packed sequences is the state, else the weights."""

# -------------------------------------------------------------------- a running backward


def backward_number() -> int | None:
    """Number of the backward in this thread, or None; ``register_multi_grad_hook`` tells backwards apart by it."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


backward_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""True if the running backward was called with ``retain_graph=True``. Only the caller knows it otherwise."""
backward_reaches: Callable[[Node], bool] = torch._C._will_engine_execute_node
"""True if the running backward will execute a node of its graph. Public hooks tell it when it is too late."""


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function once the running backward has run. No public hook can tell where its last node is."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def hooks_for_saved_tensors() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost ``saved_tensors_hooks``, which can be set but not read in public; None without any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks or None


_noticing: list[tuple[int, set[bool]]] = []
_noticing_changes = threading.Lock()


@contextmanager
def noticed_checkpoints() -> Iterator[set[bool]]:
    """Context that yields the ``use_reentrant`` of each call of ``torch.utils.checkpoint`` by this thread in it.

    The function is imported by name everywhere, so what it calls is replaced. The only public trace is that a call
    saves nothing. The last of all threads to leave puts the originals back.
    """
    seen: set[bool] = set()
    module = cast("Any", torch.utils.checkpoint)

    def stop() -> None:
        with _noticing_changes:
            _noticing[:] = [each for each in _noticing if each[1] is not seen]
            for name in () if _noticing else ("_CheckpointFrame", "CheckpointFunction"):
                if isinstance(replaced := getattr(module, name), _Noticed):
                    setattr(module, name, replaced.original)

    with undone(stop):
        with _noticing_changes:
            if not _noticing:
                module._CheckpointFrame = _Noticed(False, module._CheckpointFrame)
                module.CheckpointFunction = _Noticed(True, module.CheckpointFunction)
            _noticing.append((threading.get_ident(), seen))
        yield seen


class _Noticed:
    """A class that torch's checkpoint makes, or applies, and by which a call of it is noticed."""

    def __init__(self, reentrant: bool, original: Any) -> None:
        self.original, self._reentrant = original, reentrant

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self.original(*args, **kwargs)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self.original.apply(*args, **kwargs)

    def _note(self) -> None:
        for thread, seen in _noticing:
            if thread == threading.get_ident():
                seen.add(self._reentrant)


# -------------------------------------------------------------------- threads, and the generators that they share


_DRAW_NOTHING = tuple(
    f"{os.sep}{path.replace('/', os.sep)}"
    for path in (
        "execnet/",  # pytest-xdist's channel
        "tqdm/",  # the monitor of progress bars
        "multiprocessing/queues.py",  # hands on what was put into a queue: DataLoader has one for each worker
        "multiprocessing/resource_sharer.py",  # hands out file descriptors, once a tensor was sent to another process
        "concurrent/futures/process.py",  # hands on what a pool of processes is to do
        "torch/utils/data/_utils/pin_memory.py",
        "tensorboard/summary/writer/event_file_writer.py",
        "torch/_inductor/",  # waits for what other processes compile
    )
)
"""Code that runs in threads of its own for as long as the process lives, and draws no random numbers."""


def threads() -> int:
    """Number of threads that run Python code and may draw random numbers, also unknown to ``threading``."""
    others = sys._current_frames()
    others.pop(threading.get_ident())  # a frame that holds itself would keep the tensors of all its callers alive
    return 1 + sum(not any(path in _started_in(frame) for path in _DRAW_NOTHING) for frame in others.values())


def _started_in(frame: FrameType) -> str:
    """File of the code that a thread was started for: the outermost one besides that of ``threading``.

    Not any on the stack: a user's thread may wait in a queue, too.
    """
    file = ""
    current: FrameType | None = frame
    while current is not None:
        if current.f_code.co_filename != threading.__file__:
            file = current.f_code.co_filename
        current = current.f_back
    return file


def global_generators() -> tuple[Any, ...]:
    """The objects behind the functions of ``random`` and ``numpy.random``."""
    return random._inst, np.random.mtrand._rand


# -------------------------------------------------------------------- settings


def default_device() -> torch.device | None:
    """The default device, None where nobody has set one, for which ``torch.get_default_device()`` takes 10 µs."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


# How float32 is computed in effect, by backend and operation, and what sets it for one of them. Public attributes lead
# there, but ``torch.backends.mkldnn.fp32_precision`` sets that of all backends.
float32_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
set_float32_precision: Callable[[str, str, str], Any] = torch._C._set_fp32_precision_setter


attention_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order
"""The kernels for attention, first choice first. ``sdpa_kernel`` sets them; nothing public reads them."""
set_attention_order: Callable[[list[int]], Any] = torch._C._set_sdp_priority_order
"""Set the order alone. ``sdpa_kernel`` can only do so together with which ones are allowed, and for a time."""


# -------------------------------------------------------------------- capture for another runtime


def is_captured() -> bool:
    """True while ``torch.jit.trace``, ``torch.export`` or an ONNX exporter takes the computation down.

    Public are ``torch.jit.is_tracing()``, also True for scripted code, and ``torch.compiler.is_exporting()``, which the
    compiler of torch < 2.13 takes for True in all that it captures.
    """
    return bool(torch._C._get_tracing_state()) or bool(torch.compiler._is_exporting_flag)


# -------------------------------------------------------------------- modes and transforms


function_modes: Callable[[], list[TorchFunctionMode]] = torch.overrides._get_current_function_mode_stack
"""The modes that see calls of torch's functions, innermost last. Modes can be entered in public, but not looked at."""
without_function_mode: Callable[[], AbstractContextManager[Any]] = torch.overrides._pop_mode_temporarily
"""Context without the innermost such mode. A mode steps aside in its own handler, and nowhere else in public."""


@contextmanager
def without_modes() -> Iterator[None]:
    """Context in which no mode and no subclass of tensors sees anything, for looking at a tensor unseen."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def is_transformed() -> bool:
    """True inside of ``torch.func``'s transforms (vmap, grad), which say so nowhere in public."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# -------------------------------------------------------------------- tensors and operators


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place. torch's notes on autograd describe it; only ``_version`` tells it."""
identity_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""A number for a storage while it lives. ``data_ptr()`` is 0 for those on meta or in fake tensors."""


def stamps(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Numbers that change with tensors: their :func:`version_of`, then :func:`identity_of` their storages."""
    try:
        return [*map(version_of, tensors), *map(identity_of, map(torch.Tensor.untyped_storage, tensors))]
    except RuntimeError:  # tensors of inference mode have no version, sparse ones no storage
        return [_stamp(tensor, of_storage=of_storage) for of_storage in (False, True) for tensor in tensors]


def _stamp(tensor: torch.Tensor, *, of_storage: bool) -> int:
    try:
        return identity_of(tensor.untyped_storage()) if of_storage else version_of(tensor)
    except RuntimeError:
        return 0


# A node of autograd's graph that is the context of a user's Function has whatever attributes its forward has set, also
# with names of torch's methods. So the class is asked.


def name_of_node(node: Any) -> str:
    """``node.name()``."""
    return str(type(node).name(node))


def before_node(node: Any, hook: Callable[..., Any]) -> Any:
    """``node.register_prehook(hook)``."""
    return type(node).register_prehook(node, hook)


def leaf_of_node(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient a node accumulates; None for a node that does something else."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse COO tensor as it is. ``indices()`` and ``values()`` want it coalesced."""
    return tensor._indices(), tensor._values()


copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_
"""Copy tensors in one call, as optimizers do: on a GPU a tenth of the time. There is no public name."""
schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Names, types and aliases of an operator's arguments. ``torch.ops`` shows tags in public, and no schema."""
packet_of: Callable[[OpOverload], OpOverloadPacket] = attrgetter("_overloadpacket")
"""All overloads of the name that an operator is one of, for which torch keeps formulas."""


def written_arguments(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Arguments that an operator is given to write to."""
    yield from written_by_message(func, args)
    for place, argument in enumerate(schema_of(func).arguments if schema_of(func).is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


def written_by_message(func: OpOverload, args: Sequence[Any]) -> Iterator[Any]:
    """Arguments that an operator receives a message in. Schemas of c10d do not say so: they come first."""
    if func.namespace == "c10d" and packet_of(func).__name__ != "send" and args:
        yield args[0]


take_back: Callable[[torch.library.Library], None] = methodcaller("_destroy")
"""Undo what a library has registered. Else that happens whenever garbage is collected."""


# -------------------------------------------------------------------- modules and optimizers

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes in which a module keeps the hooks around its forward and backward. Nothing public reads them."""
_HOOKS_OF_ALL: tuple[dict[int, Any], ...] = tuple(getattr(nn_module, f"_global{name}") for name in HOOKS)
STRUCTURE = frozenset(vars(nn.Module())) - {"training", "_is_full_backward_hook"}
"""Attributes of a module that are torch's own bookkeeping."""
_HOOK_KINDS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
OPTIMIZER_HOOKS = tuple(
    f"_optimizer_{event}_{when}_hooks"
    for event in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
"""Attributes in which an optimizer keeps its hooks."""


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer has hooks around its steps."""
    return any(bool(getattr(optimizer, name, None)) for name in OPTIMIZER_HOOKS[:2])


def has_forward_hooks(module: nn.Module) -> bool:
    """True if a module has hooks of its own around its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """True if hooks of the module, or of all modules, follow its backward."""
    return any((module._backward_hooks, module._backward_pre_hooks, *_HOOKS_OF_ALL[2:]))


def hook_tables(module: nn.Module | None, names: Sequence[str] = (*HOOKS, *_HOOK_KINDS)) -> list[dict[int, Any]]:
    """Where a module keeps hooks, and how they are called; None is all modules."""
    # Not all that a module has, torch has for all modules; a scripted module has them elsewhere.
    owner, prefix = (vars(nn_module), "_global") if module is None else (vars(module), "")
    return [owner[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in owner]


def gradient_hooks(tensor: torch.Tensor) -> list[Any]:
    """The hooks that ``Tensor.register_hook`` was given."""
    return list((tensor._backward_hooks or {}).values())


@contextmanager
def without_hooks_of_several(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context without the hooks of ``register_multi_grad_hook``, which ``torch.autograd.grad`` cannot call."""
    kept = [(hooks, dict(hooks)) for tensor in tensors if (hooks := tensor._backward_hooks)]
    for hooks, before in kept:
        for key, hook in before.items():
            if getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook."):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)  # in their order


def any_hooks_of_all() -> bool:
    """True if there are hooks for every module."""
    return any(_HOOKS_OF_ALL)


def shares_weights(module: nn.Module) -> bool:
    """True inside of ``parametrize.cached()``, where a parametrized weight is computed once for all calls."""
    return bool(parametrize._cache_enabled) and any(map(parametrize.is_parametrized, module.modules()))


# -------------------------------------------------------------------- torch.compile


def outside_of_graphs(function: Callable[..., Any], reason: str | None = None) -> Callable[..., Any]:
    """``torch.compiler.disable`` without importing the compiler now; ``reason`` is told under ``fullgraph=True``."""
    kept_out: Any = _disable_dynamo(function)
    if reason is not None:
        kept_out._torchdynamo_disable = True
        kept_out._torchdynamo_disable_msg = reason
    return kept_out  # type: ignore[no-any-return]


def uncompiled() -> AbstractContextManager[Any]:
    """Context in which what was given to ``torch.compile`` runs as it is written, as it does under a mode anyway.

    torch < 2.14 never compiles code again that it has once met under a mode.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing the compiler takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


COMPILED_CALL = "_compiled_call_impl"
"""Attribute in which ``module.compile()`` keeps what runs instead."""
INNER = "_orig_mod"
"""Name under which what ``torch.compile(module)`` returns holds the module. It is in the keys of state_dicts."""


def is_compiled_in_place(module: nn.Module) -> bool:
    """True after ``module.compile()``."""
    return module.__dict__.get(COMPILED_CALL) is not None


def is_compiler_wrapper(module: nn.Module) -> bool:
    """True if a module is what ``torch.compile(module)`` returns. Its class is behind an import of the compiler."""
    return type(module).__name__ == "OptimizedModule" and INNER in module._modules


def is_compiled(module: nn.Module) -> bool:
    """True if the user compiled this very module, by ``module.compile()`` or ``torch.compile(module)``."""
    return is_compiler_wrapper(module) or is_compiled_in_place(module)


def module_inside(wrapper: nn.Module) -> nn.Module:
    """The module that was given to ``torch.compile``."""
    return wrapper.get_submodule(INNER)


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, but without what ``module.compile()`` has put there."""
    return module._call_impl(*args, **kwargs)


COMPILER_ATTRIBUTES = frozenset(
    ("forward", "dynamo_ctx", "get_compiler_config", "_torchdynamo_orig_callable", "_torchdynamo_wrapper_id")
)
"""Attributes of what ``torch.compile(module)`` returns that say nothing about the module."""


class CompilerSettings(NamedTuple):
    """Settings that a module was compiled with; ``has_more`` stands for guard_filter_fn or dynamic_shapes."""

    backend: Any
    fullgraph: bool
    dynamic: bool | None
    has_more: bool


def compiler_settings(module: nn.Module) -> CompilerSettings | None:
    """Settings that a module was compiled with, behind its ``get_compiler_config``; None if torch does not tell."""
    callable_ = module if is_compiler_wrapper(module) else getattr(module, COMPILED_CALL)
    ask = getattr(callable_, "get_compiler_config", None)
    context = getclosurevars(ask).nonlocals.get("self") if isinstance(ask, FunctionType) else None
    try:
        backend, fullgraph, dynamic = context.callback, context.fullgraph, context._dynamic  # type: ignore[union-attr]
    except AttributeError:
        return None
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    hooks, shapes = getattr(context, "_hooks", None), getattr(context, "_dynamic_shapes", None)
    return CompilerSettings(backend, fullgraph, dynamic, bool(getattr(hooks, "guard_filter_fn", None) or shapes))


def activation_budget(budget: float) -> AbstractContextManager[Any]:
    """Context in which graphs are compiled under an activation memory budget, documented under this name alone."""
    from torch._functorch import config  # the compiler, which takes a second to import

    return config.patch(activation_memory_budget=budget)  # type: ignore[no-any-return]


# -------------------------------------------------------------------- profiler


is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""True while torch's profiler records in this thread. There is room for one, and no public question."""


class AllocationLog(profile):
    """A profiler of the CPU that notes allocations and ``record_function``, and no operators: a third of the cost.

    Its public switches have nothing for that.
    """

    def __init__(self) -> None:
        super().__init__(use_cpu=True, use_kineto=False, profile_memory=True)

    def _start_trace(self) -> None:
        module: Any = torch.autograd.profiler
        enable, scopes = module._enable_profiler, {torch._C._profiler.RecordScope.USER_SCOPE}
        module._enable_profiler = lambda config, activities: enable(config, activities, scopes)
        try:
            super()._start_trace()
        finally:
            module._enable_profiler = enable


def allocation_of(event: Any) -> Any | None:
    """``device``, ``alloc_size`` and ``ptr`` if an event of the profiler's tree is an allocation, or None.

    The public events of ``torch.profiler`` have sums by operation, and no single blocks.
    """
    kind, details = event.typed
    return details if kind == torch._C._profiler._EventType.Allocation else None


# -------------------------------------------------------------------- releases of torch.distributed.pipelining


@cache
def sent_outputs_linger() -> bool:
    """True if torch's schedules hold on to sent outputs: up to torch 2.14. From 2.15 on they tell the stage."""
    from torch.distributed.pipelining import PipelineStage

    return not hasattr(PipelineStage, "release_fwd_send_outputs")
