"""Where a training step computes: the FLOPs of every submodule, counted in a dry run.

What a step asks of values has no answer in a dry run: a number is taken as 1, and a mask as true everywhere.

Counted are forwards, which is what a recomputation repeats: two FLOPs for each multiplication and addition of matrix
products, convolutions, attention and recurrent layers, one for each element that any other operation makes, none for
views.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from lightning_rotor.errors import ProfilingError
from lightning_rotor.private.torch_names import FakeTensorMode, backward_number, packet_of
from lightning_rotor.private.values import tensors_in, tree_leaves
from lightning_rotor.profiling.dry_run import AssumedValues, fake_copy, without_trace

# A loop that waits for a value would never end, since values do not change.
_MOST_READS = 1000
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class StepCompute:
    """FLOPs of the forwards in one training step.

    Attributes:
        total: Of the whole step.
        plannable: By dotted name of a submodule (``""`` is the model itself), those inside its forwards that a plan
            could run: the module is in training mode, gradients are enabled, and they flow through its output. No entry
            means none.
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
        replacements: By ``id``, what stands in the copies for objects that the model refers to and that a dry run must
            not touch.
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
    with without_trace(device, model.modules()), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        duplicate, inputs = fake_copy((model, inputs), mode, replacements)
        with _Count(duplicate) as count:
            step(duplicate, inputs)
    return StepCompute(count.flops, dict(count.plannable), count.assumed_values)


class _Count(AssumedValues):
    """Counts operations, and knows whose forward runs them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.flops = 0
        self.plannable: Counter[str] = Counter()
        self._running: list[str] = []
        for name, module in model.named_modules():
            # Not a hook: those do not fire when a forward is called by its name.
            module.__dict__["forward"] = partial(self._call, name, module, module.forward)

    def _call(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        learning = module.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        recursive, before = name in self._running, self.flops
        self._running.append(name)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._running.pop()
        if learning and not recursive and any(tensor.requires_grad for tensor in _outputs_in(output)):
            self.plannable[name] += self.flops - before
        return output

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assumed = self.assumed_values
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.assumed_values > _MOST_READS:
            raise ProfilingError(f"it asks for values more than {_MOST_READS} times")
        if self.assumed_values == assumed and backward_number() is None:  # not in a backward
            self.flops += _flops(func, args, kwargs or {}, result)
        return result


def _outputs_in(value: Any) -> list[torch.Tensor]:
    """Those in an output, also in one of the user's own classes."""
    return [*tensors_in(value), *tensors_in([getattr(leaf, "__dict__", leaf) for leaf in tree_leaves(value)])]


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
    return sum(tensor.numel() for tensor in tensors_in(result))
