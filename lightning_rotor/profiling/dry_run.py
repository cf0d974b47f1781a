"""Dry runs: a user's code on copies whose tensors have shapes, types and devices but no values (torch's fake tensors).

They take no memory and little time; the originals, the generators and the output stay as they are.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from copy import deepcopy
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_rotor.capture.cuts import GraphCut
from lightning_rotor.capture.guards import firsts_of
from lightning_rotor.errors import InverseError, ModelError
from lightning_rotor.execution.executor import recomputed
from lightning_rotor.execution.isolated import kept_attributes, lent_buffers, undisturbed
from lightning_rotor.execution.passes import repeating, run_stage
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import (
    attribute_of,
    same_bits,
    tensors_in,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lightning_rotor.profiling.scan import Boundary
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.sequential import Stage, wiring_of
from lightning_rotor.stages.snapshot import PLAIN, Snapshot, code_of

_aten = torch.ops.aten


def fake_copy(value: Any, mode: private.FakeTensorMode, replacements: Mapping[int, Any]) -> Any:
    """A deep copy with fake tensors in the place of tensors; ``replacements`` stand in for objects by ``id``.

    Tied parameters stay tied, and shared objects shared. Hooks that are plain functions are dropped, since what they
    write to is not copied, and metrics give 0, since most look at values. Data sets are not copied.
    """
    memo = dict(replacements)
    for module in _modules_in(value):
        memo.update((id(held), held) for held in module.__dict__.values() if isinstance(held, (Dataset, DataLoader)))
    with private.FakeCopyMode(mode):
        duplicate = deepcopy(value, memo)
    for module in _modules_in(duplicate):
        for kind in private.HOOKS:
            hooks = module.__dict__[kind]
            for key in [key for key, hook in hooks.items() if isinstance(hook, FunctionType)]:
                del hooks[key]
        if _is_metric(module):
            module.__dict__.update(dict.fromkeys(("forward", "compute"), lambda *_, **__: torch.zeros(())))
            module.__dict__.update(dict.fromkeys(("update", "reset"), lambda *_, **__: None))
    return duplicate


def _modules_in(value: Any) -> list[nn.Module]:
    roots = value if isinstance(value, (tuple, list)) else (value,)
    return [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]


def _is_metric(module: nn.Module) -> bool:
    """True for a metric of torchmetrics, or one like it; False for a collection, which holds metrics."""
    return (
        all(callable(attribute_of(module, name)) for name in ("update", "compute", "reset"))
        and not module._modules
        and next(module.parameters(), None) is None
    )


@contextmanager
def unlogged() -> Iterator[None]:
    """Context in which fake tensors do not log errors that they raise as well, of failed traces for example."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def without_trace(device: torch.device | None = None, modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Context in which a dry run leaves generators and globals that modules refer to as they are, and is silent."""
    modules = list(modules)
    with ExitStack() as stack:
        # A copy has its own attributes, but shares globals and variables of enclosing functions.
        stack.callback(Snapshot(modules, also=code_of(modules)).restore)
        stack.callback(GeneratorStates(device).restore)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(repeating())
        # The real run says it all once more, with values.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(unlogged())
        stack.enter_context(private.uncompiled())
        yield


class AssumedValues(private.TorchDispatchMode):
    """Answers, and counts, questions for values that do not exist: masks are true, numbers 1 (floats ``number``)."""

    def __init__(self, number: float = 1.0) -> None:
        super().__init__()
        self.assumed_values = 0
        self._number = number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except (private.DataDependentOutputException, private.DynamicOutputShapeException):
            self.assumed_values += 1
            return self._answer(func, args, kwargs)

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result under the assumptions; raises DynamicOutputShapeException if none of them answers."""
        if func is _aten._local_scalar_dense.default:
            dtype = args[0].dtype
            if dtype.is_complex or dtype.is_floating_point:
                return complex(self._number) if dtype.is_complex else self._number
            return True if dtype is torch.bool else 1
        if func in (_aten.equal.default, _aten.allclose.default):
            return True
        if func is _aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is _aten.masked_select.default:
            return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
        if private.packet_of(func) in (_aten.index, _aten.index_put, _aten.index_put_):
            return func(args[0], _expanded(args[1]), *args[2:], **kwargs)
        raise private.DynamicOutputShapeException(func)


def _expanded(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices with as many positions in the place of a mask as it has elements."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            found.append(index)
    return found


# -------- Whether the stages of a traced module compute what the module computes: run both once, and compare every bit.


def require_same(module: nn.Module, cut: GraphCut, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ModelError unless stages give a module's outputs, buffers and random numbers on a call, if it repeats."""
    boundary = Boundary.of((tuple(args), dict(kwargs)))
    firsts = firsts_of(tree_leaves((tuple(args), dict(kwargs))))

    def fresh() -> Any:
        leaves, spec = tree_flatten(boundary.fresh())
        return tree_unflatten([leaves[first] for first in firsts], spec)

    constants = cut.recording.constants
    versions = [private.version_of(constant) for constant in constants]

    def plain() -> Any:
        args, kwargs = fresh()
        return type(module).forward(module, *args, **kwargs)

    def staged() -> Any:
        return wiring_of(cut.stages).run(
            cut.guards.take(cut.guards.call(*fresh())), [partial(run_stage, stage) for stage in cut.stages]
        )

    device = tensors_in((args, kwargs))[0].device
    whole = Stage(type(module).__name__, (module,))
    with undisturbed(device):
        try:
            received = _outcome(whole, staged, device)
        except InverseError:  # it names its stage, which the plain module's error would not
            raise
        except Exception:
            _outcome(whole, plain, device)  # what is wrong with the input is said by the module itself
            raise
        expected = _outcome(whole, plain, device)
        if versions != [private.version_of(constant) for constant in constants]:
            raise ModelError(
                f"the forward of {type(module).__name__} changes a tensor in place that it has made itself without any "
                "input, so a trace would change it again in every step. Move that part into a submodule"
            )
        if not _agree(expected, received) and _agree(expected, _outcome(whole, plain, device)):
            raise ModelError(
                f"the trace of {type(module).__name__} does not compute what the module does: outputs, buffers or "
                "random numbers differ. Its forward takes decisions that no trace sees (type(x) is torch.Tensor, the "
                "answers of C++ code): move them into a submodule"
            )


def _outcome(whole: Stage, forward: Any, device: torch.device) -> list[Any]:
    """Output, buffers and generators after a run from the present state, which is set back."""
    states = GeneratorStates(device)
    with kept_attributes(whole), lent_buffers(whole) as slots:
        output = Boundary.of(recomputed(forward, draws_random=False))
        buffers = [module._buffers[name] for module, name, _ in slots]
    after = GeneratorStates(device)
    states.restore()
    return [str(output.spec), output.requires_grad, len(buffers), after, *output.leaves, *buffers]


def _agree(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, GeneratorStates):
        return one.equals(other)
    # A class of the user's that derives from a number or a text may compare as it likes.
    base = next((base for base in PLAIN if issubclass(type(one), base)), object)
    return type(one) is type(other) and (one is other or base.__eq__(one, other) is True)
