"""Where a training step computes: the FLOPs of every submodule, counted in a dry run.

The dry run executes the step's Python on a copy of the model whose tensors have shapes, dtypes and devices but no values (torch's fake
tensors). It takes no memory and little time, and the model, the generators and the gradients stay as they are. What a step asks of
values has no answer there: a number is taken as 1, and a mask as true everywhere.

Counted are forwards, which is what a recomputation repeats: two FLOPs for each multiplication and addition of matrix products,
convolutions, attention and recurrent layers, one for each element that any other operation makes, none for views.
"""

from __future__ import annotations

import gc
import io
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import flop_registry

from lightning_rotor.errors import ProfilingError
from lightning_rotor.execution.recomputation import repeating
from lightning_rotor.private.torch_names import (
    HOOKS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
    TorchDispatchMode,
    backward_number,
    packet_of,
)
from lightning_rotor.private.values import tree_leaves
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.snapshot import Snapshot, code_of

# ----------------------------------------------------------------------------------------------------
# Copies of models whose tensors have no values, for dry runs that take no memory and touch nothing of the user's.


def fake_copy(value: Any, mode: FakeTensorMode, replacements: Mapping[int, Any]) -> Any:
    """Copy modules, and what they are in, deeply, with fake tensors in the place of tensors.

    Tied parameters stay tied, and shared objects shared. Two things would not be the copy's own and are left out or kept apart: hooks that
    are plain functions are dropped, since what they write to is not copied with them, and metrics (modules without parameters that can
    update, compute and reset) give 0, since most look at values. Data sets are not copied.

    Args:
        value: Any nesting of modules and tensors.
        mode: Makes the fake tensors.
        replacements: By ``id``, what stands in for an object in the copy.
    """
    memo = dict(replacements)
    for module in _modules_in(value):
        memo.update((id(held), held) for held in module.__dict__.values() if isinstance(held, (Dataset, DataLoader)))
    with FakeCopyMode(mode):
        duplicate = deepcopy(value, memo)
    for module in _modules_in(duplicate):
        for kind in HOOKS:
            hooks = getattr(module, kind)
            for key in [key for key, hook in hooks.items() if isinstance(hook, FunctionType)]:
                del hooks[key]
        if _is_metric(module):
            module.__dict__.update(forward=_zero, update=_nothing, compute=_zero, reset=_nothing)
    return duplicate


def _modules_in(value: Any) -> list[nn.Module]:
    roots = value if isinstance(value, (tuple, list)) else (value,)
    return [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]


def _is_metric(module: nn.Module) -> bool:
    """A metric of torchmetrics, or one like it; a collection of metrics is not one, but holds them."""
    return (
        all(callable(getattr(module, name, None)) for name in ("update", "compute", "reset"))
        and not module._modules
        and next(module.parameters(), None) is None
    )


def _zero(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(())


def _nothing(*_: Any, **__: Any) -> None:
    return None


# ----------------------------------------------------------------------------------------------------


_aten = torch.ops.aten
# A loop that waits for a value would never end, since values do not change.
_MOST_READS = 1000
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class StepCompute:
    """FLOPs of the forwards in one training step.

    Attributes:
        total: Of the whole step.
        plannable: By dotted name of a submodule (``""`` is the model itself), those inside its forwards that a plan could run: the
            module is in training mode, gradients are enabled, and they flow through its output. No entry means none.
        assumed_values: How often the step asked for a value, so that another course may be taken in truth.
    """

    total: int
    plannable: Mapping[str, int]
    assumed_values: int = 0

    def share(self, name: str) -> float:
        """The part of the step's FLOPs that a plan for this submodule would reach, between 0 and 1."""
        return self.plannable.get(name, 0) / self.total


def measure_compute(
    model: nn.Module,
    inputs: Any,
    step: Callable[[Any, Any], Any],
    *,
    replacements: Mapping[int, Any] | None = None,
) -> StepCompute:
    """Count the FLOPs of a training step without taking it.

    Args:
        model: Copied without its tensors' values. Nothing about it changes.
        inputs: What the step takes besides; copied likewise.
        step: Called once, with the copy of the model and that of the inputs.
        replacements: By ``id``, what stands in the copies for objects that the model refers to and that a dry run must not touch.
    Returns:
        FLOPs by submodule.
    Raises:
        ProfilingError: The step cannot run without values; says what it ran into.
    Example:
        >>> net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        >>> measure_compute(net, torch.ones(3, 8), lambda copy, batch: copy(batch)).plannable["0"]
        192
    """
    try:
        found = _count(model, inputs, step, replacements or {})
    except Exception as error:  # whatever a step does that was written for real tensors
        reason = f"its dry run fails with {type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"
    else:
        reason = "" if found.total else "its dry run computes nothing"
    gc.collect()  # the copies hold each other, and what looks for tensors (a recording does) would still find them
    if reason:
        raise ProfilingError(reason)
    return found


def _count(
    model: nn.Module, inputs: Any, step: Callable[[Any, Any], Any], replacements: Mapping[int, Any]
) -> StepCompute:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with _leaving_no_trace(device, model), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        duplicate, inputs = fake_copy((model, inputs), mode, replacements)
        with _Count(duplicate) as count:
            step(duplicate, inputs)
    return StepCompute(count.flops, dict(count.plannable), count.assumed_values)


@contextmanager
def _leaving_no_trace(device: torch.device, model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        # A copy has attributes of its own, but refers to the same globals and variables of enclosing functions.
        stack.callback(Snapshot(model.modules(), also=code_of(model.modules())).restore)
        stack.callback(GeneratorStates(device).restore)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(repeating())
        # What the step has to say comes once more from the real one, with values.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@dataclass(slots=True)
class _Call:
    """A forward that is running."""

    name: str
    flops: int = 0


class _Count(TorchDispatchMode):
    """Counts operations, and knows whose forward runs them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.assumed_values = 0
        self.plannable: Counter[str] = Counter()
        self._calls = [_Call("<step>")]
        for name, module in model.named_modules():
            # Not a hook: those do not fire when a forward is called by its name.
            module.__dict__["forward"] = partial(self._call, name, module, module.forward)

    @property
    def flops(self) -> int:
        """Of everything so far."""
        return self._calls[0].flops

    def _call(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        learning = module.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        recursive = any(call.name == name for call in self._calls)
        self._calls.append(_Call(name))
        try:
            output = forward(*args, **kwargs)
        finally:
            call = self._calls.pop()
            self._calls[-1].flops += call.flops
        if learning and not recursive and any(tensor.requires_grad for tensor in _tensors_in(output)):
            self.plannable[name] += call.flops
        return output

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if self.assumed_values == _MOST_READS:
                raise ProfilingError(f"it asks for values more than {_MOST_READS} times") from None
            self.assumed_values += 1
            return _without_values(func, args, kwargs)
        if backward_number() is None:  # not in a backward
            self._calls[-1].flops += _flops(func, args, kwargs, result)
        return result


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Those in an output, also in one of the user's own classes."""
    leaves = [deeper for leaf in tree_leaves(value) for deeper in tree_leaves(getattr(leaf, "__dict__", leaf))]
    return [leaf for leaf in [*tree_leaves(value), *leaves] if isinstance(leaf, torch.Tensor)]


# -------------------------------------------------------------------- operations


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    name = packet_of(func).__name__
    if name.startswith("_scaled_dot_product") and "backward" not in name:  # the registry knows the kernels of GPUs only
        query, key, value = args[:3]
        pairs = query.shape[:-1].numel() * key.shape[-2]
        return int(2 * pairs * (query.shape[-1] + value.shape[-1]))
    if name in ("mkldnn_rnn_layer", "_cudnn_rnn"):
        weights = args[1:5] if name == "mkldnn_rnn_layer" else args[1]
        return int(2 * args[0].shape[:2].numel() * sum(weight.numel() for weight in weights))
    formula = flop_registry.get(packet_of(func))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if func.is_view:
        return 0
    return sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))


def _without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation gives back if numbers are 1 and masks are true everywhere.

    Raises:
        DynamicOutputShapeException: The operation is none of those that ask for a number or apply a mask.
    """
    if func is _aten._local_scalar_dense.default:
        return _one(args[0].dtype)
    if func in (_aten.equal.default, _aten.allclose.default):
        return True
    if func is _aten.nonzero.default:
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
    if func is _aten.masked_select.default:
        return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
    if packet_of(func) in (_aten.index, _aten.index_put, _aten.index_put_):
        return func(args[0], _expanded(args[1]), *args[2:], **kwargs)
    raise DynamicOutputShapeException(func)


def _one(dtype: torch.dtype) -> bool | int | float | complex:
    if dtype is torch.bool:
        return True
    return complex(1) if dtype.is_complex else 1.0 if dtype.is_floating_point else 1


def _expanded(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Positions instead of masks, as many as a mask has elements."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            found.append(index)
    return found
