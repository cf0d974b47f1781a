"""FLOPs of every submodule in one training step, counted in a dry run: where a step computes.

The dry run ends early where the step needs a value that does not exist. What ran before that counts all the same, and
``stopped_at`` says where it ended, so that nobody takes a part for the whole.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from traceback import extract_tb
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_rotor.errors import ProfilingError
from lightning_rotor.private.messages import members_of
from lightning_rotor.private.torch_names import (
    FakeTensorMode,
    backward_number,
    fake_mode,
    fake_with_value,
    forget_value,
    identity_of,
    mode_of,
    no_dispatch,
    packet_of,
    with_values,
)
from lightning_rotor.private.values import plain_parts, tensors_in, tree_leaves
from lightning_rotor.profiling.assumed_values import AssumedArrays, AssumedValues
from lightning_rotor.profiling.dry_run import run_dry, without_trace
from lightning_rotor.profiling.fake_copies import MOST_KNOWN, fake_copy
from lightning_rotor.profiling.remains import drop_remains
from lightning_rotor.profiling.returned_tensors import ReturnedTensors
from lightning_rotor.stages.user_code import is_users

_log = logging.getLogger(__name__)
# A loop that waits for a value would never end, since values do not change.
_MOST_READS = 1000
_LONGEST_REASON = 300


class StepCompute(AssumedValues):
    """FLOPs of the forwards in one training step, counted while it runs, by dotted names of submodules.

    Attributes:
        total: FLOPs of all forwards.
        plannable: FLOPs inside of modules that a plan could run: in training mode, with gradients enabled and flowing
            through the output.
        calls: How often each of these was called.
        messages: Ranks of the processes with which modules exchange messages, one set a group. None is sent here.
        unfinished: Modules that an exception has ended. What they computed until then counts as plannable.
        held_bytes: Bytes that the step has made, and holds at its end, when its backward would begin; None if the dry
            run ended before.
        stopped_at: The user's line at which the dry run ended before the step did; empty if it came to its end.
        returned: Tensors that modules have returned, and which of them the step makes nothing of.
    """

    def __init__(self, model: nn.Module) -> None:
        # It imports triton, which takes a tenth of a second.
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self._formulas = flop_registry
        self.total = 0
        self.plannable: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.messages: defaultdict[str, set[frozenset[int]]] = defaultdict(set)
        self.unfinished: set[str] = set()
        self.held_bytes: int | None = None
        self.stopped_at = ""
        self.returned = ReturnedTensors()
        # Storages that the step was given, and those that it has made, by identity.
        self._older = _storages([*model.parameters(), *model.buffers(), *_tensors_of(model)])
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        # Names of the modules whose forwards run now, outer ones first.
        self._running: list[str] = []
        # Seeded: which layers a step skips by chance must not change what is planned from run to run.
        self._draws = torch.Generator().manual_seed(0)
        self._counted = {name: id(module) for name, module in model.named_modules()}
        for name, module in model.named_modules():
            # Not a hook: those do not fire when a forward is called by its name.
            module.__dict__["forward"] = partial(self._call, name, module, module.forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCompute:
        """Itself: the forward of a copy that the step makes of a module finds it, and counts for none of them."""
        return self

    def exclude(self, inputs: Any) -> None:
        """Count what a step is given as not made by it."""
        self._older |= _storages(tensors_in(inputs))

    def share(self, name: str) -> float:
        """The part of the step's FLOPs that a plan for this submodule would reach, between 0 and 1."""
        return self.plannable[name] / self.total if self.total else 0.0

    def _call(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The output of a submodule's forward, which is counted."""
        # A copy, which no plan reaches.
        if id(module) != self._counted[name]:
            return forward(*args, **kwargs)
        learns = module.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        # FLOPs of a module that calls itself count once, for the outer call.
        is_outermost = name not in self._running
        total_before = self.total
        self._running.append(name)
        try:
            output = forward(*args, **kwargs)
        # Also where the step is interrupted: what ran before the failing line counts.
        except BaseException:
            if learns and is_outermost:
                self.unfinished.add(name)
                self._count(name, self.total - total_before)
            raise
        finally:
            self._running.pop()
        if learns and is_outermost and any(tensor.requires_grad for tensor in _outputs_in(output)):
            self._count(name, self.total - total_before)
            # What never learns is in nobody's plan, whoever uses it.
            self.returned.follow(name, output)
        return output

    def end_step(self) -> None:
        """The step is over, and what it has returned is still there."""
        self.returned.end_step()
        self.held_bytes = sum(size_bytes for storage, size_bytes in self._made.values() if not storage.expired())

    def _count(self, name: str, flops: int) -> None:
        self.plannable[name] += flops
        self.calls[name] += 1

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        assumed_before = self.assumed_values
        self._note_message(func, args, kwargs)
        self.returned.note_operation((args, kwargs), self._running)
        result = self._with_drawn_value(func, super().__torch_dispatch__(func, types, args, kwargs))
        if self.assumed_values > _MOST_READS:
            raise ProfilingError(f"it asks for values more than {_MOST_READS} times")
        # A plan's share is that of forwards: a backward's FLOPs belong to no module.
        if backward_number() is not None:
            return result
        for identity, storage in _storages(tensors_in(result)).items():
            if identity not in self._older:
                self._made[identity] = storage
        # What was assumed has not been computed.
        if self.assumed_values == assumed_before:
            self.total += _flops(self._formulas.get(packet_of(func)), func, args, kwargs, result)
        return result

    def _note_message(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a message between processes for all modules around it."""
        members = members_of(func, args, kwargs)
        if not members:
            return
        for name in self._running:
            self.messages[name].add(members)
        # torch would compute with known values, and so send them.
        for tensor in tensors_in((args, kwargs)):
            forget_value(tensor)

    def _with_drawn_value(self, func: Any, result: Any) -> Any:
        """A result, with a value if it is a random number that a step may ask: whether to skip a layer, say."""
        draw = _DRAWS.get(packet_of(func))
        if draw is None or result.numel() > 1 or not result.is_floating_point() or result.device.type != "cpu":
            return result
        # From a generator of its own, as the step's must not move.
        with no_dispatch():
            value = draw(result.shape, generator=self._draws).to(result.dtype)
        return fake_with_value(mode_of(result), value)


_DRAWS = {torch.ops.aten.rand: torch.rand, torch.ops.aten.randn: torch.randn}


def measure_compute(
    model: nn.Module,
    inputs: Any,
    step: Callable[[Any, Any], Any],
    *,
    replacements: Mapping[int, Any] | None = None,
) -> StepCompute:
    """FLOPs of a step on copies without values of the model and ``inputs``, as far as it can run on those.

    Args:
        model: The model whose submodules are counted. It stays as it is.
        inputs: What the step takes: tensors in containers, and anything else.
        step: Takes a copy of the model, and one of the inputs.
        replacements: By ``id``, what stands in the copies for objects that a dry run must not touch.
    Raises:
        ProfilingError: Nothing was counted: there can be no copy, or the step computes nothing.
        ModelError: The step keeps tensors of the copies where they cannot be taken away.
    """
    modes: list[FakeTensorMode] = []
    try:
        compute = _dry_step(model, inputs, step, replacements or {}, modes)
    except Exception as error:
        # deepcopy calls code of every class that users keep in their modules.
        raise ProfilingError(f"the model and its batch cannot be copied: {_text_of(error)}") from error
    finally:
        # The copies hold each other, and what looks for tensors (a recording does) would still find them.
        gc.collect()
    for mode in modes:
        drop_remains(mode)
    if not compute.total and not compute.stopped_at:
        raise ProfilingError("its dry run computes nothing")
    return compute


def _dry_step(
    model: nn.Module,
    inputs: Any,
    step: Callable[[Any, Any], Any],
    replacements: Mapping[int, Any],
    modes: list[FakeTensorMode],
) -> StepCompute:
    """The compute of a step up to its end, or to the line that needs a value. ``modes`` gets the copies' own."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def run() -> StepCompute:
        with with_values(MOST_KNOWN), fake_mode() as mode, mode:
            modes.append(mode)
            # Together, so that what both refer to is one object in the copies as well.
            duplicate, copied_inputs = fake_copy((model, inputs), mode, replacements, with_values=True)
            compute = StepCompute(duplicate)
            compute.exclude(copied_inputs)
            try:
                with compute, AssumedArrays(compute):
                    result = step(duplicate, copied_inputs)
                    compute.end_step()
                    del result
            except Exception as error:
                # Whatever a step does that was written for real tensors.
                compute.stopped_at = _place_of(error)
                _log.info("the dry run of a step ended at %s: %s", compute.stopped_at, _text_of(error))
        return compute

    with without_trace(device, model.modules()) as generators:
        return run_dry(run, generators)


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"


def _place_of(error: Exception) -> str:
    """The user's line that an error comes from. What torch says of tensors without values means nothing to users."""
    frames = [frame for frame in extract_tb(error.__traceback__) if is_users(frame.filename)]
    if not frames:
        return f"a {type(error).__name__}"
    innermost = frames[-1]
    file = innermost.filename.rpartition("/")[2]
    return f"{file}, line {innermost.lineno}: {innermost.line}"


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, tuple[StorageWeakRef, int]]:
    """Memory of tensors, as long as it is there, and its bytes, by identity."""
    storages = {}
    for tensor in tensors:
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            storages[identity_of(storage)] = StorageWeakRef(storage), storage.nbytes()
    return storages


def _tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that modules hold in attributes of their own."""
    return [held for module in model.modules() for held in vars(module).values() if isinstance(held, torch.Tensor)]


def _outputs_in(value: Any) -> list[torch.Tensor]:
    """Tensors in an output, also in one of the user's own classes."""
    insides = [getattr(leaf, "__dict__", leaf) for leaf in tree_leaves(value)]
    return [*tensors_in(value), *tensors_in(insides)]


def _flops(
    formula: Any,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> int:
    """FLOPs of an operator; one for each element of the result where torch has no formula."""
    name = packet_of(func).__name__
    # The registry knows the kernels of GPUs only.
    if name.startswith("_scaled_dot_product") and "backward" not in name:
        return _attention_flops(*args[:3])
    if name == "mkldnn_rnn_layer":
        return _recurrent_flops(args[0], args[1:5])
    if name == "_cudnn_rnn":
        return _recurrent_flops(args[0], args[1])
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if func.is_view:
        return 0
    return sum(tensor.numel() for tensor in tensors_in(result))


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return int(2 * pairs * (query.shape[-1] + value.shape[-1]))


def _recurrent_flops(sequences: torch.Tensor, weights: Iterable[torch.Tensor]) -> int:
    """Each entry of each sequence is multiplied with all weights."""
    entries = sequences.shape[:2].numel()
    return int(2 * entries * sum(weight.numel() for weight in weights))
