"""Dry runs: a user's code on copies whose tensors have shapes, types and devices but no values (torch's fake tensors).

They take no memory and little time; the originals, the generators and the output stay as they are.

What a step asks of its batch (lengths, labels, masks, edges of a graph) decides over shapes. So small tensors may keep
their values, and operations on such tensors alone are computed. Values that come out of parameters do not exist.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from copy import deepcopy
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from lightning_rotor.capture.call import firsts_of
from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.errors import InverseError, ModelError
from lightning_rotor.execution.isolated import draws_seen, kept_attributes, lent_buffers, undisturbed
from lightning_rotor.execution.passes import dropping_saved, repeating, run_stage
from lightning_rotor.execution.segment import recomputed
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.messages import copied_as_they_are
from lightning_rotor.private.undoing import undone
from lightning_rotor.private.values import (
    attribute_of,
    is_fake,
    same_bits,
    tensors_in,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lightning_rotor.profiling.stage_input import Boundary
from lightning_rotor.stages.draws import drawn_since
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.holders import PLAIN
from lightning_rotor.stages.other_threads import others_may_draw
from lightning_rotor.stages.sequential import Stage, wiring_of
from lightning_rotor.stages.snapshot import Snapshot
from lightning_rotor.stages.user_code import code_of

_aten = torch.ops.aten
T = TypeVar("T")


MOST_KNOWN = 2**16
"""Elements of tensors whose values a dry run may know."""


class _CopyWithValues(private.FakeCopyMode):
    """Lets small tensors keep their values in a deep copy. Parameters lose them: all compute would become real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and type(args[0]) is torch.Tensor:
            tensor, memo = args
            is_small = tensor.numel() <= MOST_KNOWN and tensor.layout is torch.strided and tensor.device.type != "meta"
            if is_small and not tensor.requires_grad and not is_fake(tensor):
                if id(tensor) not in memo:
                    memo[id(tensor)] = private.fake_with_value(self.fake_mode, tensor)
                return memo[id(tensor)]
        return super().__torch_function__(func, types, args, kwargs)


def fake_copy(
    value: Any, mode: private.FakeTensorMode, replacements: Mapping[int, Any], *, with_values: bool = False
) -> Any:
    """A deep copy with fake tensors in the place of tensors; ``replacements`` stand in for objects by ``id``.

    Tied parameters stay tied, and shared objects shared. Hooks that are plain functions are dropped, since what they
    write to is not copied, and metrics give 0, since most look at values. Data sets are not copied. Small tensors may
    keep their values.
    """
    memo = dict(replacements)
    for module in _modules_in(value):
        memo.update((id(held), held) for held in module.__dict__.values() if isinstance(held, (Dataset, DataLoader)))
    with _CopyWithValues(mode) if with_values else private.FakeCopyMode(mode), copied_as_they_are():
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
def without_trace(device: torch.device | None = None, modules: Iterable[nn.Module] = ()) -> Iterator[GeneratorStates]:
    """Context in which a dry run leaves generators and globals that modules refer to as they are, and is silent.

    Whoever knows from which generators it draws says so to what this yields.
    """
    modules, generators = list(modules), GeneratorStates(device)
    with ExitStack() as stack:
        # A copy has its own attributes, but shares globals and variables of enclosing functions.
        stack.callback(Snapshot(modules, also=code_of(modules)).restore)
        stack.callback(generators.restore)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(repeating())
        # The real run says it all once more, with values.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(unlogged())
        stack.enter_context(private.uncompiled())
        yield generators


def run_dry(run: Callable[[], T], generators: GeneratorStates) -> T:
    """The result of a dry run. Of ``generators``, only those remain from which it draws, and not another thread."""
    try:
        return run()
    finally:
        generators.keep_only(drawn_since(generators, partial(_attempt, run)))


def _attempt(run: Callable[[], object]) -> None:
    with suppress(Exception):
        run()


def undrawn(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The generators that a module's forward does not draw from, if another thread may: it runs once to tell.

    Else none, as nobody minds if they are set back.
    """
    if not others_may_draw():
        return frozenset()
    boundary, device = Boundary.of((tuple(args), dict(kwargs))), tensors_in((args, kwargs))[0].device
    whole = Stage(type(module).__name__, (module,))

    def plain() -> Any:
        args, kwargs = boundary.fresh()
        return type(module).forward(module, *args, **kwargs)

    modules = list(module.modules())

    def run() -> None:
        # Nobody watches this run, so what it changes outside of modules has to be put back here.
        outside = Snapshot(modules, also=code_of(modules))
        with (
            undone(outside.restore),
            kept_attributes(whole),
            lent_buffers(whole),
            torch.enable_grad(),
            repeating(),
            dropping_saved(),
        ):
            plain()

    before = GeneratorStates(device)
    try:
        with draws_seen(whole) as certain:
            run()
    except Exception:  # what is wrong is said by who runs it next
        return frozenset()
    drawn = drawn_since(before, run, certain=certain)
    before.restore(drawn)
    return before.kinds - drawn


class AssumedValues(private.TorchDispatchMode):
    """Answers, and counts, questions for values that do not exist, so that code goes on.

    Masks are true, numbers 1 (floats ``number``), all entries differ from each other, sequences have their full length,
    no box overlaps another, and an entry is repeated once.
    """

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
            return self.answer(func, args, kwargs)

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        packet = private.packet_of(func)
        if packet is _aten.repeat_interleave:
            return args[0].new_empty(args[0].numel(), dtype=torch.int64)
        if packet in (_aten._unique2, _aten.unique_consecutive, _aten.unique_dim, _aten._unique):
            return _all_differ(packet, *args, **kwargs)
        if packet is _aten._pack_padded_sequence:
            return _packed(*args, **kwargs)
        if packet.__name__ == "nms":
            return args[0].new_empty(len(args[0]), dtype=torch.int64)
        if packet is _aten.bincount:
            return args[0].new_empty(max(2, kwargs.get("minlength", args[2] if len(args) > 2 else 0)))
        if packet is _aten._ctc_loss:
            steps, size = args[0].shape[:2]
            longest = args[1].shape[1] if args[1].dim() > 1 else args[1].numel()
            return args[0].new_empty(size), args[0].new_empty(size, steps, 2 * longest + 1)
        raise private.DynamicOutputShapeException(func)


def _all_differ(packet: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Results of ``unique`` and its kin for entries that all differ: entries, places in them, and counts."""
    if packet is _aten.unique_dim:
        along = tensor.shape[args[0] if args else kwargs["dim"]]
        indices = tensor.new_empty(along, dtype=torch.int64)
        return torch.empty_like(tensor), indices, torch.empty_like(indices)
    values = tensor.new_empty(tensor.numel())
    places = tensor.new_empty(tensor.shape, dtype=torch.int64)
    if packet is _aten._unique:
        return values, places
    return values, places, tensor.new_empty(tensor.numel(), dtype=torch.int64)


def _packed(tensor: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of padded sequences in a row, and how many sequences have one at each time."""
    size, steps = tensor.shape[:2] if batch_first else tensor.shape[1::-1]
    known = private.value_of(lengths)
    with private.no_dispatch():
        found = [steps] * size if known is None else known.tolist()
        sizes = torch.tensor([sum(length > step for length in found) for step in range(max(found))])
    return tensor.new_empty(sum(found), *tensor.shape[2:]), private.fake_with_value(private.mode_of(tensor), sizes)


class AssumedArrays(TorchFunctionMode):
    """Answers what no dispatcher sees: NumPy gets ones for values that do not exist; packed sequences run as one."""

    def __init__(self, counts: AssumedValues) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and is_fake(args[0]):
            return self._array(args[0])
        if func is torch.Tensor.__deepcopy__:
            return _copied(*args)
        if func in private.RECURRENT and isinstance(args[2], (torch.Tensor, tuple)) and is_fake(args[0]):
            return _packed_run(func, *args)
        if func is private.pad_sequences and is_fake(args[0]):
            return _padded(*args)
        if func in (torch.istft, torch.Tensor.istft) and is_fake(args[0]):
            return private.istft_in_parts(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _array(self, tensor: torch.Tensor) -> Any:
        known = private.value_of(tensor)
        self._counts.assumed_values += known is None
        with private.no_dispatch():
            return (torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known).numpy()


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy. Torch's own (2.14) fails on fake tensors, and leaves one behind that crashes the process."""
    copied: torch.Tensor | None = memo.get(id(tensor))
    if copied is None:
        memo[id(tensor)] = copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copied


def _packed_run(func: Any, data: torch.Tensor, sizes: torch.Tensor, state: Any, *settings: Any) -> Any:
    """Results of a recurrent layer on packed sequences, which take the compute of one that is as long as all."""
    states = state if isinstance(state, tuple) else (state,)
    first = tuple(each[:, :1].contiguous() for each in states)
    output, *after = func(data.unsqueeze(1), first if isinstance(state, tuple) else first[0], *settings, False)
    return output.squeeze(1), *(each.expand_as(state) for each, state in zip(after, states, strict=True))


def _padded(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, value: float, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed sequences side by side, and their lengths."""
    counts = private.value_of(sizes)
    with private.no_dispatch():
        counted = [1] * len(sizes) if counts is None else counts.tolist()
    batch, steps = max(counted), max(total, len(counted))
    padded = data.new_full((batch * steps, *data.shape[1:]), value)
    padded = padded.index_add(0, data.new_empty(len(data), dtype=torch.int64), data).unflatten(0, (batch, steps))
    with private.no_dispatch():
        lengths = torch.tensor([sum(count > place for count in counted) for place in range(batch)])
    known = private.fake_with_value(private.mode_of(data), lengths)
    return padded if batch_first else padded.transpose(0, 1), known


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
    base = next((base for base in (*PLAIN, tuple) if issubclass(type(one), base)), object)
    return type(one) is type(other) and (one is other or base.__eq__(one, other) is True)
